"""When a returned value or an output counts as right."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.envs.code.inside import Claim, describe
from agentrl.envs.code.values import MAX_VALUE_CHARS, Tolerance, described, read_claim, same_output, same_value

from .published import tables

INF, NAN = float("inf"), float("nan")
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


def returned(value: object) -> object:
    """What the host reads of a returned value."""
    return read_claim(repr(Claim(json.dumps(describe(value)))))


EQUAL: list[tuple[object, object]] = [
    *((value, value) for value in (None, True, 0, -7, 2**63, -(10**40), 1.5, INF, "", "é\ud800", [], {}, set())),
    *(([1, [2]], (1, [2])), ((1, 2), [1, 2]), (2, 2.0), (2.0, 2), (0.3, 0.1 + 0.2), (0.0, 1e-13), (1e300, 1e300)),
    *(({"a": 1, "b": [2.0]}, {"b": [2], "a": 1}), ({1: 2}, {"1": 2}), ({(1, 2): 3}, {(1, 2): 3}), ({3, 4}, {4.0, 3})),
    *((frozenset("ab"), {"b", "a"}), ({None: 1}, {None: 1})),
]
DIFFERENT: list[tuple[object, object]] = [
    *((1, True), (True, 1), (False, 0), (0, False), (None, 0), ("1", 1), (1, "1"), (1, 2), (2, 2.0000001)),
    *((0.3, 0.3001), (INF, -INF), (1.0, NAN), (1.0, INF), (1.0, 10**400), (2**70, 2**70 + 1), (2**70, "x")),
    *(([1, 2], [1, 2, 3]), ([1, 2], [2, 1]), ([], {}), ([], None), ([1], {1}), ({1}, [1])),
    *(({1, 2}, {1}), ({"a": 1}, {"a": 2}), ({"a": 1}, {"a": 1, "b": 2}), ({"a": 1}, [["a", 1]]), ({}, set())),
    *(([1], [True]), ({"a": 1}, {"a": True}), ("a", b"a"), (1, 1j), (1, object()), ([1], iter([1])), ("x", None)),
    *(({"1": 2}, {1: 2, "1": 2}), ("a", ["a"]), ({"int": "0x1"}, 1), ({"set": [1]}, {1}), ({1}, {"set": [1]})),
]


@pytest.mark.parametrize(
    ("expected", "value", "same"), [(*pair, same) for same in (True, False) for pair in (EQUAL if same else DIFFERENT)]
)
def test_same_value(expected: object, value: object, same: bool) -> None:
    assert same_value(described(expected), returned(value)) is same


def plainly_equal(left: Any, right: Any) -> bool:
    """An independent reading: Python's own equality, once kinds agree."""
    if isinstance(left, dict) or isinstance(right, dict):
        if not (isinstance(left, dict) and isinstance(right, dict)):
            return False
        pairs = [{str(key): item for key, item in side.items()} for side in (left, right)]
        keys = pairs[0].keys() == pairs[1].keys() and len(pairs[0]) == len(left) and len(pairs[1]) == len(right)
        return keys and all(plainly_equal(item, pairs[1][key]) for key, item in pairs[0].items())
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(plainly_equal, left, right))
    number = [isinstance(side, int | float) and not isinstance(side, bool) for side in (left, right)]
    if all(number) and isinstance(left, float) and abs(right) < 2**63:
        return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
    if all(number) and max(abs(left), abs(right)) >= 2**63 and type(left) is not type(right):
        return False
    return left == right if all(number) or type(left) is type(right) else False


def distinct_keys(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(distinct_keys, value))
    if isinstance(value, dict):
        return len({str(key) for key in value}) == len(value) and all(map(distinct_keys, value.values()))
    return True


@given(values.filter(distinct_keys), values)
def test_as_a_plain_comparison_says(expected: object, value: object) -> None:
    assert same_value(described(expected), returned(expected))
    assert same_value(described(expected), returned(value)) == plainly_equal(expected, value)


json_values = st.recursive(
    scalars | st.just(NAN),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["int", "set", "dict", "other", "x"]), inner, max_size=2)
    ),
    max_leaves=10,
)


@given(values.filter(distinct_keys), json_values)
def test_no_claim_makes_the_comparison_raise(expected: object, claim: object) -> None:
    claimed = read_claim(json.dumps(claim))
    assert same_value(described(expected), claimed) in (True, False)
    for kind in ("set", "dict", "int", "other"):
        assert same_value(described({1: 2}), {kind: claimed}) is False
        assert same_value(described({7, 8}), {kind: claimed}) in (True, False)


CLAIMS = [
    *(None, "", "nan", "[1", "[" * 9000, "{" * 9000, "9" * 9000, '"\\ud', "\x00", "1" + " " * 10**6, "1 2"),
    '{"set": 1}',
]


@pytest.mark.parametrize("text", CLAIMS)
def test_unreadable_claims_equal_nothing(text: str | None) -> None:
    for expected in (None, 1, 1.0, "", [], {}, set()):
        assert not same_value(described(expected), read_claim(text))


@pytest.mark.parametrize("value", [NAN, [NAN], {"a": object()}, b"a", 1j, "x" * MAX_VALUE_CHARS, [0] * MAX_VALUE_CHARS])
def test_values_that_nothing_can_equal_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="an expected value"):
        described(value)


@pytest.mark.parametrize(
    ("expected", "value", "near"), [(1.0, 1.09, True), (1.0, 1, True), (1.0, 1.11, False), (1, 1.01, False)]
)
def test_tolerance(expected: float, value: float, near: bool) -> None:
    assert same_value(expected, value, Tolerance(relative=0.0, absolute=0.1)) is near


def test_subclasses_are_described_by_what_they_hold() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert describe(Liar(3)) == 3
    assert type(describe(Liar(3))) is int
    assert describe(range(2)) == {"other": "range"}


OUTPUTS = tables("code_graded")["outputs"]


@pytest.mark.parametrize(("expected", "written", "right"), OUTPUTS)
def test_outputs(expected: str, written: str, right: bool) -> None:
    assert same_output(expected, written) == right


@given(st.text("ab \t\n", max_size=12), st.text("ab \t\n", max_size=12))
def test_outputs_line_by_line(expected: str, written: str) -> None:
    def reference(text: str) -> list[str]:
        lines = [line.rstrip() for line in text.split("\n")]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    assert same_output(expected, written) == (reference(expected) == reference(written))
