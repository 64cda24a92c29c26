"""JSON schemas from functions' type hints and docstrings, and the validation of arguments against them."""

import inspect
import re
import reprlib
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pydantic
from pydantic.json_schema import GenerateJsonSchema

from agentrl.errors import EnvContractError

MAX_PROBLEMS = 5
"""Most problems of one call that the model reads; more than these teach nothing."""
_ARGUMENTS = re.compile(r"^(?:args|arguments|parameters):[ \t]*\n((?:[ \t].*\n|\n)*)", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A function's description, schema and validator."""

    description: str
    """The first paragraph of its docstring, on one line."""
    schema: Mapping[str, object]
    """The JSON schema of the model's arguments."""
    model: type[pydantic.BaseModel]
    """Validates and converts these arguments."""
    hidden: str | None
    """The parameter that is hidden from the model, if there is one."""
    is_method: bool
    """True if the first parameter is ``self``."""

    def values(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Validate ``arguments``, convert them to the hinted types, and fill in defaults.

        Raises:
            ValueError: they do not fit the schema; the message says which, why and what is expected, on one line.
        """
        try:
            valid = self.model.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            raise ValueError(f"{explain(error)}. Expected: {self.expected()}") from error
        # Not model_dump, which would turn nested models and dataclasses back into dicts.
        return {str(field.alias): valid.__dict__[key] for key, field in self.model.model_fields.items()}

    def expected(self) -> str:
        """Describe the arguments: ``city (string), days (integer, optional)``."""
        properties = cast(Mapping[str, Mapping[str, object]], self.schema["properties"])
        required = cast(list[str], self.schema.get("required", []))
        wanted = [
            f"{name} ({_kind(schema)}{'' if name in required else ', optional'})" for name, schema in properties.items()
        ]
        return ", ".join(wanted) or "no arguments"


class _Untitled(GenerateJsonSchema):
    """Leaves out titles: they repeat the arguments' names, and the whole schema goes into the prompt."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def read_signature(function: Callable[..., object], hidden: type) -> Signature:
    """Read the signature of ``function``.

    Args:
        function: has type hints and a docstring in Google style.
        hidden: a parameter with this type hint is not in the schema.

    Raises:
        EnvContractError: a parameter has no type hint, is positional-only, is ``*args`` or ``**kwargs``, or has a type
            that JSON can't express; or two are hidden.
    """
    parameters = dict(inspect.signature(function).parameters)
    is_method = next(iter(parameters), "") == "self"
    if is_method:
        del parameters["self"]
    hints = _hints(function)
    names = [name for name in parameters if hints.get(name) is hidden]
    if len(names) > 1:
        raise EnvContractError(f"tool {function.__name__!r}: only one parameter can be a {hidden.__name__}")
    docs = argument_docs(function.__doc__ or "")
    # Field is fully typed, so pyright rejects options whose names are computed.
    make_field: Callable[..., object] = pydantic.Field
    fields: dict[str, tuple[object, object]] = {}
    for name, parameter in parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or name not in hints:
            raise EnvContractError(f"tool {function.__name__!r}: give parameter {name!r} a name and a type hint")
        if name not in names:
            options = {"description": docs[name]} if name in docs else {}
            default = ... if parameter.default is parameter.empty else parameter.default
            # By alias: pydantic reserves names such as copy, json or _x.
            fields[f"argument_{len(fields)}"] = (hints[name], make_field(default, alias=name, **options))
    model, schema = _model(function.__name__, fields)
    summary = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0]
    return Signature(
        description=" ".join(summary.split()),
        schema=schema,
        model=model,
        hidden=names[0] if names else None,
        is_method=is_method,
    )


def argument_docs(docstring: str) -> dict[str, str]:
    """Read the arguments' descriptions from the ``Args:`` section of a Google docstring, each on one line.

    Example:
        >>> argument_docs('''Search.
        ...
        ...     Args:
        ...         query (str): what to look for,
        ...             in any language.
        ... ''')
        {'query': 'what to look for, in any language.'}
    """
    section = _ARGUMENTS.search(f"{inspect.cleandoc(docstring)}\n")
    docs: dict[str, str] = {}
    # A line that is indented deeper than the arguments, or has no colon, continues a description.
    for entry in re.split(r"\n(?=\S.*:)", textwrap.dedent(section[1]).strip()) if section else ():
        head, colon, text = entry.partition(":")
        if colon and "\n" not in head:
            docs[head.split("(")[0].strip(" *`")] = " ".join(text.split())
    return docs


def explain(error: pydantic.ValidationError) -> str:
    """Describe the first problems of ``error``, on one line."""
    problems = error.errors(include_url=False)
    sentences = [_problem(cast(Mapping[str, Any], problem)) for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        sentences.append(f"and {len(problems) - MAX_PROBLEMS} more")
    return "; ".join(" ".join(sentence.split()) for sentence in sentences)


def _problem(problem: Mapping[str, Any]) -> str:
    argument = _shorter(".".join(map(str, problem["loc"])) or "value", 80)
    if problem["type"] == "missing":
        return f"{argument} is missing"
    if problem["type"] == "extra_forbidden":
        return f"{argument} is unknown"
    message = str(problem["msg"])
    return f"{argument}: {message[:1].lower()}{_shorter(message[1:], 200)}, not {_shown(problem['input'])}"


def _shown(value: object) -> str:
    try:
        return _shorter(reprlib.repr(value), 60)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return "so large a number"


def _shorter(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _kind(schema: Mapping[str, object]) -> str:
    if "enum" in schema:
        return " or ".join(map(repr, cast(list[object], schema["enum"])))
    if "const" in schema:
        return repr(schema["const"])
    if "anyOf" in schema:
        return " or ".join(_kind(choice) for choice in cast(list[Mapping[str, object]], schema["anyOf"]))
    if schema.get("type") == "array" and isinstance(items := schema.get("items"), Mapping):
        return f"array of {_kind(cast(Mapping[str, object], items))}"
    return str(schema.get("type", "object" if "$ref" in schema else "anything"))


def _hints(function: Callable[..., object]) -> dict[str, Any]:
    try:
        return inspect.get_annotations(function, eval_str=True)
    except NameError as error:
        message = f"tool {function.__name__!r}: a type hint names {error.name!r}, which its module does not import"
        raise EnvContractError(message) from error


def _model(
    name: str, fields: Mapping[str, tuple[object, object]]
) -> tuple[type[pydantic.BaseModel], dict[str, object]]:
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    make: Callable[..., type[pydantic.BaseModel]] = pydantic.create_model
    try:
        model = make(name, __config__=config, **fields)
        schema = model.model_json_schema(schema_generator=_Untitled)
    except pydantic.errors.PydanticUserError as error:
        reason = str(error).splitlines()[0]
        raise EnvContractError(f"tool {name!r}: JSON can't express the type of a parameter: {reason}") from error
    # The title is the function's name, which the tool's name says already; properties are there even if empty.
    return model, {key: value for key, value in schema.items() if key != "title"} | {
        "properties": schema.get("properties", {})
    }
