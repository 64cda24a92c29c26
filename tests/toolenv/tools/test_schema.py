"""Signatures: what docstrings and type hints become."""

import enum
import json
from typing import Annotated, Literal

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.toolenv.tools.schema import Signature, argument_docs, read_signature


class Hidden:
    """A type hint that no model sees."""


class Color(enum.Enum):
    RED = "red"


def everything(
    city: str,
    days: int = 3,
    color: Color = Color.RED,
    unit: Literal["C", "F"] = "C",
    limits: tuple[float, float] | None = None,
    size: Annotated[int, pydantic.Field(ge=1, description="From 1.")] = 1,
    *,
    here: Hidden,
) -> str:
    """Report the weather
    of a city.

    It is made up.

    Args:
        city: its name,
            in English: no
            translation.
        days (int, optional): how many days: at most 7.
        unit: Celsius

            or Fahrenheit
        limits:
            least and most
        here: the episode

    Returns:
        city: not this one.

    Raises:
        days: nor this one.
    """
    return ""


@pytest.fixture
def signature() -> Signature:
    return read_signature(everything, Hidden)


def test_the_docstring_describes_function_and_arguments(signature: Signature) -> None:
    assert signature.description == "Report the weather of a city."
    assert signature.hidden == "here" and not signature.is_method
    properties = json.loads(json.dumps(signature.schema))["properties"]
    assert {name: schema.get("description") for name, schema in properties.items()} == {
        "city": "its name, in English: no translation.",
        "days": "how many days: at most 7.",
        "color": None,
        "unit": "Celsius or Fahrenheit",
        "limits": "least and most",
        "size": "From 1.",
    }
    assert properties["city"] == {"type": "string", "description": "its name, in English: no translation."}
    assert signature.schema["required"] == ["city"] and signature.schema["additionalProperties"] is False
    assert "title" not in signature.schema


def test_arguments_become_what_the_hints_say(signature: Signature) -> None:
    arguments = {"city": "Rome", "days": "2", "color": "red", "limits": [1, 2.5]}
    read = {"city": "Rome", "days": 2, "color": Color.RED, "limits": (1.0, 2.5), "unit": "C", "size": 1}
    assert signature.values(arguments) == read


def test_what_is_expected_is_told(signature: Signature) -> None:
    with pytest.raises(ValueError, match="size: input should be greater than or equal to 1, not 0") as caught:
        signature.values({"city": "Rome", "size": 0})
    assert str(caught.value).endswith(
        "Expected: city (string), days (integer, optional), color (object, optional), unit ('C' or 'F', optional), "
        "limits (array or null, optional), size (integer, optional)"
    )


def test_a_number_too_long_to_write_is_told(signature: Signature) -> None:
    with pytest.raises(ValueError, match="city: input should be a valid string, not so large a number"):
        signature.values({"city": 10**5000})


def test_a_default_is_nobody_elses() -> None:
    def gather(items: list[int] = []) -> str:  # noqa: B006 (the fault to be borne)
        return ""

    signature = read_signature(gather, Hidden)
    signature.values({})["items"].append(1)  # pyright: ignore
    assert signature.values({}) == {"items": []}


@pytest.mark.parametrize("docstring", ["", "One line.", "Args:", "Args:\n\n    no colon\n", "Args: a: b"])
def test_docstrings_that_describe_no_argument(docstring: str) -> None:
    assert argument_docs(docstring) == {}


@given(st.text(alphabet="Args:\n ab(*", max_size=80))
def test_any_docstring_can_be_read(docstring: str) -> None:
    docs = argument_docs(docstring + "\n\nArgs:\n    a: b")
    assert all("\n" not in text for text in docs.values())


def test_stars_and_types_are_no_part_of_a_name() -> None:
    assert argument_docs("X.\n\nArguments:\n  *a (int): one\n  `b`: two") == {"a": "one", "b": "two"}
