"""Compare the sandbox's output with a hidden test's expected value.

The output was written by the program under test, so it is hostile. It is parsed as JSON of bounded size, never as
Python, and none of its objects' methods is called.
"""

import json
import math
from dataclasses import dataclass
from typing import cast

from agentrl.envs.code.inside import describe

MAX_VALUE_CHARS = 19_000
"""Limit of an expected value as JSON, in characters; the sandbox hands over little more."""
MAX_OUTPUT_BYTES = 60_000
"""Limit of an expected output; the sandbox truncates longer ones."""
_TRAILING = " \t\r"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest error of a value."""

    relative: float = 1e-9
    """Share of the larger of the two."""
    absolute: float = 1e-12
    """For numbers around 0."""
    truth: bool = False
    """True to compare only the value's truth, as ``assert f(x)`` does."""


EXACTLY = Tolerance()
TRUTH = Tolerance(truth=True)


def described(value: object) -> object:
    """Describe an expected value as it would come back from the sandbox.

    Raises:
        ValueError: nothing can be equal to it, such as an object or NaN, or it is too large.
        RecursionError: it is nested too deeply.
    """
    text = json.dumps(describe(value))
    if len(text) > MAX_VALUE_CHARS:
        raise ValueError(f"an expected value takes more than {MAX_VALUE_CHARS} characters")
    description = json.loads(text)
    # An object, a function or NaN: no submission could ever pass.
    if not same_value(description, description):
        raise ValueError("an expected value is of a kind that nothing is equal to")
    return description


def read_claim(text: str | None) -> object:
    """Parse the program's claim about its value; one that can't be parsed becomes a value that equals nothing."""
    if text is None or len(text) > 2 * MAX_VALUE_CHARS:
        return {"other": "no claim"}
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"other": "no JSON"}


def same_value(expected: object, claimed: object, tolerance: Tolerance = EXACTLY) -> bool:
    """Return True if two described values are equal; see :func:`agentrl.envs.code.inside.describe`.

    Strict where Python is not: True is not 1, and "1" is not 1. Numbers are compared by value: 2.0 is 2, floats
    within ``tolerance``, and NaN equals nothing. A list is a tuple, but no set. Keys are compared as JSON writes
    them: as keys, 1 and "1" are the same.

    Args:
        expected: the test's value; the recursion is as deep as this is.
        claimed: the program's claim: anything that JSON can hold.
        tolerance: largest error of a float.
    """
    match expected:
        case None | bool() | str():
            # The exact type: in Python True == 1.
            return type(claimed) is type(expected) and claimed == expected
        case int() | float():
            return _same_number(expected, claimed, tolerance)
        case list():
            if not isinstance(claimed, list) or len(claimed) != len(expected):
                return False
            return all(same_value(left, right, tolerance) for left, right in zip(expected, claimed, strict=True))
        case {"int": content}:
            return same_value(content, _content(claimed, "int"))
        case {"set": content}:
            return same_value(content, _content(claimed, "set"), tolerance)
        case {"dict": dict(items)}:
            others = _content(claimed, "dict")
            if not isinstance(others, dict) or items.keys() != others.keys():
                return False
            return all(same_value(item, others[key], tolerance) for key, item in items.items())
        case _:
            return False


def same_output(expected: str, written: str) -> bool:
    """Return True if two texts have the same lines, but for white space at their ends and empty last lines."""
    return _lines(expected) == _lines(written)


def _lines(text: str) -> list[str]:
    return [line.rstrip(_TRAILING) for line in text.rstrip(_TRAILING + "\n").split("\n")]


def _same_number(expected: int | float, claimed: object, tolerance: Tolerance) -> bool:
    if isinstance(claimed, bool) or not isinstance(claimed, int | float):
        return False
    if isinstance(expected, int):
        return expected == claimed
    try:
        return math.isclose(expected, claimed, rel_tol=tolerance.relative, abs_tol=tolerance.absolute)
    except OverflowError:  # an integer that no float can hold is no float's neighbour
        return False


def _content(claimed: object, kind: str) -> object:
    """Return what a described value of this kind holds; None where ``claimed`` is none."""
    described = cast(dict[str, object], claimed) if isinstance(claimed, dict) else {}
    return described[kind] if [*described] == [kind] else None
