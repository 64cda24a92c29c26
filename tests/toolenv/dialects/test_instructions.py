"""What a model is shown is what is read: in every dialect the example is the call that it describes."""

import enum
import inspect
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.toolenv.dialects import DIALECTS, get_dialect, resolve_dialect
from agentrl.toolenv.dialects.sample import sample_arguments
from agentrl.toolenv.tools.function import FunctionTool, tool
from agentrl.types import ToolCall

from ...render.conftest import templated
from .test_native import CHAT, FORMS


class Colour(enum.Enum):
    RED = "red"


class Place(pydantic.BaseModel):
    name: str
    near: "Place | None"
    tags: list[str] = []


KINDS: Sequence[Any] = (
    *(str, int, float, bool, list[str], list[int], dict[str, int], Place, list[Place], Colour, Any),
    *(Literal["a", "b"], Literal["one"], Literal[3], str | None, int | str, list[int] | None, tuple[int, str]),
    *(Annotated[int, pydantic.Field(ge=3)], Annotated[float, pydantic.Field(gt=2, lt=9)]),
    *(Annotated[int, pydantic.Field(le=-5)], Annotated[list[int], pydantic.Field(min_length=2)]),
)
NAMES = ("query", "a", "items", "json", "limit", "code", "name", "arguments")
parameters = st.lists(st.tuples(st.sampled_from(KINDS), st.booleans()), max_size=4)


def made(kinds: Sequence[tuple[Any, bool]], name: str = "find") -> FunctionTool:
    """A tool with a parameter of each kind, of which some may be left out."""

    def function(**arguments: object) -> str:
        """Find it."""
        return json.dumps(list(arguments))

    keyword, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    signature = [
        inspect.Parameter(parameter, keyword, annotation=kind, default=None if optional else empty)
        for parameter, (kind, optional) in zip(NAMES, sorted(kinds, key=lambda kind: kind[1]), strict=False)
    ]
    function.__signature__ = inspect.Signature(signature)  # pyright: ignore
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    return tool(name=name)(function)


@pytest.mark.parametrize("name", [name for name, kind in DIALECTS.items() if not kind.native])
@given(kinds=parameters, other_kinds=parameters)
def test_the_example_is_the_call_that_it_describes(
    name: str, kinds: Sequence[tuple[Any, bool]], other_kinds: Sequence[tuple[Any, bool]]
) -> None:
    tools = [made(kinds), made(other_kinds, "python")]
    dialect = get_dialect(name, tools)
    calls = dialect.parse(dialect.instructions())
    assert [call.name for call in calls] == ["find", "python"][: 1 if name == "hermes" else 2]
    for call, tool_ in zip(calls, tools, strict=False):
        assert not call.error
        tool_.call(call.arguments)
        assert dialect.parse(dialect.render(call.name, call.arguments))[0].arguments == call.arguments


@given(kinds=parameters)
def test_made_up_arguments_fit(kinds: Sequence[tuple[Any, bool]]) -> None:
    tool_ = made(kinds)
    assert set(sample_arguments(tool_.parameters, optional=True)) == set(NAMES[: len(kinds)])
    for arguments in (sample_arguments(tool_.parameters), sample_arguments(tool_.parameters, "x", optional=True)):
        tool_.call(arguments)


@pytest.mark.parametrize(
    "schema",
    [{}, {"properties": True}, {"properties": {"a": True}, "required": 5}, {"properties": {"a": {"$ref": "#/x"}}}],
)
def test_odd_schemas_have_some_example(schema: Mapping[str, object]) -> None:
    json.dumps(sample_arguments(schema, optional=True))


def written(tokenizer: Any, tools: Sequence[Mapping[str, object]], name: str, arguments: Mapping[str, object]) -> str:
    """What a chat template itself writes where the assistant calls a tool."""
    call = {"type": "function", "id": "abcdefghi", "function": {"name": name, "arguments": arguments}}
    asked = [{"role": "user", "content": "Qq?"}]
    whole = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    prompt = tokenizer.apply_chat_template(asked, tools=list(tools), tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(whole, tools=list(tools), tokenize=False)
    return text.removeprefix(prompt) if text.startswith(prompt) else text.partition("Qq?")[2]


@pytest.mark.parametrize("form", FORMS)
def test_what_a_chat_template_writes_is_read(form: str) -> None:
    """The template describes the tools there, so its own call stands for the example."""
    value = FORMS[form].replace("{{ v }}", "{{ v if v is string else v | tojson }}")
    tokenizer = templated(CHAT.replace("CALL", value))
    assert resolve_dialect("native", tokenizer) == form
    clear = [(kind, False) for kind in KINDS if kind != int | str]  # two of the forms write a text and a number alike
    for kinds in [[], *([kind] for kind in clear), *itertools.combinations(clear, 2)]:
        tool_ = made(kinds)
        dialect = get_dialect(form, [tool_])
        arguments = sample_arguments(tool_.parameters, "two words", optional=True)
        text = written(tokenizer, dialect.template_tools, "find", arguments)
        assert dialect.parse(text) == (ToolCall(name="find", arguments=arguments, id="call_0"),)
        tool_.call(arguments)
