"""Tools from typed functions: schema, validation, and errors the model can read."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import EnvContractError, InfrastructureError
from agentrl.tools import FunctionTool, ToolError, tool


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


def test_the_schema_follows_the_signature() -> None:
    assert (add.name, add.description) == ("add", "Add two numbers.")
    schema: Any = add.parameters
    assert {name: value["type"] for name, value in schema["properties"].items()} == {"a": "integer", "b": "integer"}
    assert schema["required"] == ["a"]
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("which", "arguments", "answer"),
    [
        (add, {"a": 2, "b": 3}, "5"),
        (add, {"a": "2"}, "3"),
        (paint, {"color": "red", "spots": [1, "2"]}, "red 3"),
    ],
)
def test_good_arguments(which: FunctionTool, arguments: Mapping[str, object], answer: str) -> None:
    assert which.call(arguments) == answer


@pytest.mark.parametrize(
    ("which", "arguments", "message"),
    [
        (add, {}, "a: Field required"),
        (add, {"a": "two"}, "a: Input should be a valid integer"),
        (add, {"a": 1, "c": 1}, "c: Extra inputs"),
        (paint, {"color": "green", "spots": []}, "color: Input should be 'red' or 'blue'"),
        (paint, {"color": "red", "spots": ["x"]}, "spots.0: "),
    ],
)
def test_bad_arguments_are_explained(which: FunctionTool, arguments: Mapping[str, object], message: str) -> None:
    with pytest.raises(ToolError, match="bad arguments for " + which.name) as caught:
        which.call(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    st.dictionaries(st.text(max_size=3), st.none() | st.booleans() | st.floats() | st.text() | st.lists(st.integers()))
)
def test_arguments_of_any_kind_answer_or_explain(arguments: dict[str, object]) -> None:
    try:
        assert isinstance(add.call(arguments), str)
    except ToolError as error:
        assert str(error)


def test_a_fault_inside_is_told_to_the_model() -> None:
    @tool
    def divide(a: int) -> str:
        return str(1 // a)

    with pytest.raises(ToolError, match="ZeroDivisionError: "):
        divide.call({"a": 0})


def test_an_infrastructure_fault_passes_through() -> None:
    @tool
    def ask() -> str:
        raise InfrastructureError("the daemon is gone")

    with pytest.raises(InfrastructureError, match="daemon"):
        ask.call({})


def test_parameters_may_have_names_that_pydantic_uses() -> None:
    @tool
    def save(copy: bool, json: str, _x: int = 3, model_fields: int = 4) -> str:
        return f"{copy} {json} {_x} {model_fields}"

    assert save.call({"copy": True, "json": "{}", "_x": 5}) == "True {} 5 4"
    assert set(save.parameters["properties"]) == {"copy", "json", "_x", "model_fields"}


def untyped(a) -> str:
    return str(a)


def starred(*a: int) -> str:
    return str(a)


def keywords(**a: int) -> str:
    return str(a)


def positional(a: int, /) -> str:
    return str(a)


@pytest.mark.parametrize("function", [untyped, starred, keywords, positional])
def test_a_function_the_model_could_not_call_is_refused(function: Callable[..., str]) -> None:
    with pytest.raises(EnvContractError, match=f"{function.__name__}.*'a'"):
        tool(function)


def test_a_function_has_nothing_to_open_or_close() -> None:
    add.open(3)
    add.close()
    assert add.call({"a": 1}) == "2"
