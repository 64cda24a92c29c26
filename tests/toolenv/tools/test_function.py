"""Tools from typed functions: schema, validation, and errors the model can read."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, EnvContractError, InfrastructureError
from agentrl.sandboxes import SandboxError
from agentrl.toolenv.tools.function import FunctionTool, ToolContext, ToolError, cut_middle, tool
from agentrl.types import Task


@tool
def add(a: int, b: int = 1) -> str:
    """Add two numbers.

    This paragraph is for people.
    """
    return str(a + b)


@tool
def paint(color: Literal["red", "blue"], spots: list[int]) -> str:
    """Paint."""
    return f"{color} {sum(spots)}"


@pytest.mark.parametrize(
    ("which", "arguments", "message"),
    [
        (add, {}, "a is missing. Expected: a (integer), b (integer, optional)"),
        (add, {"a": "two"}, "a: input should be a valid integer, unable to parse string as an integer, not 'two'"),
        (add, {"a": 1, "c": 1}, "c is unknown"),
        (paint, {"color": "green", "spots": []}, "color: input should be 'red' or 'blue', not 'green'"),
        (paint, {"color": "red", "spots": ["x"]}, "spots.0: "),
        (paint, {"color": "red", "spots": ["x"] * 1000}, "; and 995 more."),
        (add, {"a": "9" * 9000}, "not '99"),
        (add, {"a": 1, "x" * 9000 + "\n": 1}, "xxx… is unknown"),
    ],
)
def test_bad_arguments_are_explained(which: FunctionTool, arguments: Mapping[str, object], message: str) -> None:
    with pytest.raises(ToolError, match="bad arguments for " + which.name) as caught:
        which.call(arguments)
    error = str(caught.value)
    assert message in error
    assert "\n" not in error and "http" not in error and len(error) < 1500


def test_an_infrastructure_fault_passes_through() -> None:
    @tool
    def ask(ctx: ToolContext) -> str:
        raise ctx.state["fault"]

    for fault, message in [(InfrastructureError, "^it is gone"), (SandboxError, "^sandbox failed: it is gone")]:
        (episode := context()).state["fault"] = fault("it is gone")
        with pytest.raises(InfrastructureError, match=message):
            ask.call({}, episode)


def test_parameters_may_have_names_that_pydantic_uses() -> None:
    @tool
    def save(copy: bool, json: str, _x: int = 3, model_fields: int = 4) -> str:
        return f"{copy} {json} {_x} {model_fields}"

    assert save.call({"copy": True, "json": "{}", "_x": 5}) == "True {} 5 4"
    assert set(save.parameters["properties"]) == {"copy", "json", "_x", "model_fields"}


def context(seed: int = 0) -> ToolContext:
    return ToolContext(task=Task(id="one", prompt="?", answer="42"), seed=seed)


@tool
def remember(word: str, ctx: ToolContext) -> list[str]:
    """Remember a word."""
    ctx.state.setdefault("words", []).append(word)
    return ctx.state["words"]


def test_the_episode_is_hidden_from_the_model() -> None:
    assert set(remember.parameters["properties"]) == {"word"}
    with pytest.raises(ToolError, match="ctx is unknown"):
        remember.call({"word": "a", "ctx": {}}, context())


def test_the_episode_brings_task_seed_and_chance() -> None:
    @tool
    def draw(ctx: ToolContext) -> str:
        return f"{ctx.task.answer} {ctx.seed} {ctx.rng.integers(1000)}"

    same, expected = context(5), np.random.default_rng(5).integers(1000, size=2)
    drawn = [draw.call({}, episode) for episode in (same, same, context(5))]
    assert drawn == [f"42 5 {expected[index]}" for index in (0, 1, 0)]


def test_a_tool_that_needs_the_episode_says_so() -> None:
    with pytest.raises(EnvContractError, match="'remember' needs the episode"):
        remember.call({"word": "a"})


def test_long_output_is_cut() -> None:
    talk = tool(max_chars=100, name="talk-2")(lambda: "a" * 500 + "z" * 500)
    shown = talk.call({})
    assert talk.name == "talk-2" and len(shown) <= 100 and shown.startswith("aaa") and shown.endswith("zzz")


@given(st.text(max_size=400), st.integers(60, 300))
def test_what_is_cut_is_counted(text: str, limit: int) -> None:
    cut = cut_middle(text, limit)
    if len(text) <= limit:
        assert cut == text
    else:
        head, rest = cut.split("\n… ", 1) if text.count("\n… ") == 0 else ("", "")
        note, tail = rest.split(" characters left out …\n", 1) if rest else ("0", "")
        assert len(cut) <= limit
        assert not rest or int(note) == len(text) - len(head) - len(tail)


class Shelf:
    """Something with a tool of its own."""

    def __init__(self, book: str) -> None:
        self.book = book

    @tool
    def read(self, page: int, ctx: ToolContext) -> str:
        """Read a page."""
        return f"{self.book} {page} {ctx.seed}"

    @tool
    async def later(self, page: int) -> str:
        """Read a page later."""
        return f"{self.book} {page}"


def test_a_method_is_a_tool_of_its_instance() -> None:
    emma, ulysses = Shelf("Emma"), Shelf("Ulysses")
    assert set(emma.read.parameters["properties"]) == {"page"}
    assert emma.read.call({"page": 3}, context(7)) == emma.read(3, ctx=context(7)) == "Emma 3 7"
    assert ulysses.read.call({"page": 3}, context(7)) == "Ulysses 3 7"
    assert ulysses.later.call({"page": 4}) == "Ulysses 4"
    with pytest.raises(EnvContractError, match=r"self\.read"):
        Shelf.read.call({"page": 3}, context())


def test_tools_can_be_sent_to_another_process() -> None:
    sent = cloudpickle.loads(cloudpickle.dumps((add, remember, Shelf("Emma").later)))
    assert sent[0].call({"a": 1}) == "2"
    assert sent[1].call({"word": "a"}, context()) == '["a"]'
    assert sent[2].call({"page": 1}) == "Emma 1"


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": -1.0}, {"timeout": float("nan")}, {"max_chars": 59}])
def test_limits_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tool 'len' has"):
        tool(**options)(len)


@pytest.mark.parametrize("name", ["", "two words", "a" * 65, "7up", "né"])
def test_names_that_no_dialect_could_write_are_refused(name: str) -> None:
    with pytest.raises(EnvContractError, match="can't be called"):
        tool(name=name)(len)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        *(("a: np.ndarray", "JSON can't express"), ("a: Callable[[], int]", "JSON can't express")),
        *((parameters, ".*'a'") for parameters in ("a", "*a: int", "**a: int", "a: int, /")),
        ("one: ToolContext, other: ToolContext", "only one parameter can be a ToolContext"),
        ("query: 'Query'", "a type hint names 'Query'"),  # it was imported for type checkers only
    ],
)
def test_a_function_the_model_could_not_call_is_refused(parameters: str, message: str) -> None:
    names = {**globals(), "Callable": Callable}
    exec(f"def odd({parameters}) -> str: return ''", names)
    with pytest.raises(EnvContractError, match=f"'odd'.*{message}"):
        tool(names["odd"])


@pytest.mark.parametrize(("function", "message"), [(3, "3 is none"), (lambda: "x", "<lambda>")])
def test_what_is_no_function_with_a_name_is_refused(function: Any, message: str) -> None:
    with pytest.raises(EnvContractError, match=message):
        tool(function)
