"""Whether what came out of the sandbox is what a hidden test expects.

What came out was written by the program under test, so it is hostile: it is read as JSON of bounded size, never as
Python, and nothing of it is ever called or asked for its own opinion.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from agentrl.envs.code_inside import describe

MAX_VALUE_CHARS = 19_000
"""An expected value may take this many characters as JSON; the sandbox hands over little more."""
MAX_OUTPUT_BYTES = 60_000
"""An expected output may take this many bytes; the sandbox cuts a longer one."""
_TRAILING = " \t\r"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a value may be from the expected one."""

    relative: float = 1e-9
    """Share of the larger of the two."""
    absolute: float = 1e-12
    """For numbers around 0."""
    truth: bool = False
    """Whether all that counts is whether the value is true or false, as ``assert f(x)`` asks."""


EXACTLY = Tolerance()
TRUTH = Tolerance(truth=True)


def described(value: object) -> object:
    """The description of an expected value, as it would come back from the sandbox.

    Raises:
        ValueError: nothing can be equal to it, such as an object or NaN, or it is too large.
        RecursionError: it is nested too deeply.
    """
    text = json.dumps(describe(value))
    if len(text) > MAX_VALUE_CHARS:
        raise ValueError(f"an expected value takes more than {MAX_VALUE_CHARS} characters")
    found = json.loads(text)
    if not same(found, found):
        raise ValueError("an expected value is of a kind that nothing is equal to")
    return found


def read_claim(text: str | None) -> object:
    """What the program claims to have returned; a value that equals nothing where the claim can't be read."""
    if text is None or len(text) > 2 * MAX_VALUE_CHARS:
        return {"other": "no claim"}
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"other": "no JSON"}


def same(expected: object, claimed: object, tolerance: Tolerance = EXACTLY) -> bool:
    """Whether two described values are equal; see :func:`agentrl.envs.code_inside.describe`.

    Strict where Python is not: True is not 1, and "1" is not 1. Numbers are compared by value: 2.0 is 2, floats
    within ``tolerance``, and NaN equals nothing. A list is a tuple, but no set. Keys are compared as JSON writes
    them: as keys, 1 and "1" are the same.

    Args:
        expected: what the test says; the recursion is as deep as this is.
        claimed: what the program said: anything that JSON can hold.
        tolerance: how far a float may be off.
    """
    match expected:
        case None | bool() | str():
            return type(claimed) is type(expected) and claimed == expected
        case int() | float():
            return _same_number(expected, claimed, tolerance)
        case list():
            if not isinstance(claimed, list) or len(claimed) != len(expected):
                return False
            return all(same(left, right, tolerance) for left, right in zip(expected, claimed, strict=True))
        case {"int": number}:
            return _holds(claimed, "int") and claimed == {"int": number}
        case {"set": list(items)}:
            return _holds(claimed, "set") and _written(items) == _written(cast(dict[str, object], claimed)["set"])
        case {"dict": list(pairs)}:
            return _holds(claimed, "dict") and _same_pairs(pairs, cast(dict[str, object], claimed)["dict"], tolerance)
        case _:
            return False


def same_output(expected: str, written: str) -> bool:
    """Whether two texts have the same lines, without white space at a line's end and empty lines at the text's end."""
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


def _holds(claimed: object, kind: str) -> bool:
    return isinstance(claimed, dict) and set(cast(dict[str, object], claimed)) == {kind}


def _written(items: object) -> list[str] | None:
    """The members of a set in one order, as JSON; None for what is no list of members."""
    return sorted(json.dumps(item) for item in cast(list[object], items)) if isinstance(items, list) else None


def _same_pairs(expected: list[object], claimed: object, tolerance: Tolerance) -> bool:
    left, right = _by_key(expected), _by_key(claimed)
    if left is None or right is None or set(left) != set(right):
        return False
    return all(same(value, right[key], tolerance) for key, value in left.items())


def _by_key(pairs: object) -> Mapping[str, object] | None:
    """Pairs as a mapping by the keys' JSON; None where they are no pairs or two keys are one."""
    if not isinstance(pairs, list):
        return None
    found: dict[str, object] = {}
    for pair in cast(list[object], pairs):
        if not isinstance(pair, list) or len(cast(list[object], pair)) != 2:
            return None
        key, value = cast(list[object], pair)
        found[key if isinstance(key, str) else json.dumps(key)] = value
    return found if len(found) == len(cast(list[object], pairs)) else None
