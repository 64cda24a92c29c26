"""Tools: a typed function becomes a JSON schema with validated arguments.

Example:
    >>> @tool
    ... def add(a: int, b: int) -> str:
    ...     "Add two numbers."
    ...     return str(a + b)
    >>> add.call({"a": 2, "b": "3"})
    '5'
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Protocol

import pydantic

from agentrl.errors import EnvContractError, InfrastructureError


class ToolError(Exception):
    """A tool could not answer; its text is what the model gets to read."""


class Tool(Protocol):
    """What an environment can offer to the agent."""

    @property
    def name(self) -> str:
        """The name that the model calls."""
        ...

    @property
    def description(self) -> str:
        """One or two sentences for the model."""
        ...

    @property
    def parameters(self) -> Mapping[str, object]:
        """The JSON schema of the arguments."""
        ...

    def call(self, arguments: Mapping[str, object]) -> str:
        """Run the tool.

        Raises:
            ToolError: bad arguments or a failure inside the tool, in words for the model.
            InfrastructureError: what the tool runs on failed.
        """
        ...

    def open(self, seed: int) -> None:
        """Begin an episode: forget everything of the one before."""
        ...

    def close(self) -> None:
        """Give back whatever the episode holds."""
        ...


class FunctionTool:
    """A tool without state, made from a typed function by :func:`tool`."""

    def __init__(self, function: Callable[..., str]) -> None:
        self._function = function
        self.name = function.__name__
        self.description = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0]
        self._model = _arguments_model(function)

    @property
    def parameters(self) -> Mapping[str, object]:
        """The JSON schema of the arguments."""
        return self._model.model_json_schema()

    def call(self, arguments: Mapping[str, object]) -> str:
        """Validate ``arguments`` and run the function.

        Raises:
            ToolError: the arguments do not fit the schema, or the function raised.
            InfrastructureError: what the function runs on failed.
        """
        try:
            valid = self._model.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            raise ToolError(f"bad arguments for {self.name}: {explain(error)}") from error
        values = {str(field.alias): valid.__dict__[key] for key, field in self._model.model_fields.items()}
        try:
            return str(self._function(**values))
        except (InfrastructureError, ToolError):
            raise
        except Exception as error:  # a tool's own fault is an observation, whatever it raises
            raise ToolError(f"{type(error).__name__}: {error}") from error

    def open(self, seed: int) -> None:
        """Nothing to begin: a function keeps no state."""

    def close(self) -> None:
        """Nothing to give back."""


def tool(function: Callable[..., str]) -> FunctionTool:
    """Make a tool of a typed function; its docstring's first paragraph describes it.

    Raises:
        EnvContractError: a parameter has no type hint, is positional-only, or is ``*args``/``**kwargs``.
    """
    return FunctionTool(function)


def explain(error: pydantic.ValidationError) -> str:
    """Every problem of ``error`` in one line."""
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'value'}: {item['msg']}" for item in error.errors())


def _arguments_model(function: Callable[..., str]) -> type[pydantic.BaseModel]:
    hints = inspect.get_annotations(function, eval_str=True)
    fields: dict[str, tuple[object, object]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or name not in hints:
            raise EnvContractError(f"tool {function.__name__!r}: give parameter {name!r} a name and a type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        # By alias: pydantic keeps names such as copy, json or _x for itself.
        fields[f"argument_{len(fields)}"] = (hints[name], pydantic.Field(default, alias=name))
    config = pydantic.ConfigDict(extra="forbid")
    make: Callable[..., type[pydantic.BaseModel]] = pydantic.create_model
    return make(function.__name__, __config__=config, **fields)
