"""Grading: what counts as equal, what never does, and that hostile text does no harm."""

import time
import tomllib
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.grading.formulas import MAX_CHARS
from agentrl.grading.numbers import equal, last_boxed, plain_number

TABLES: dict[str, list[list[str]]] = tomllib.loads(Path(__file__).with_name("answers.toml").read_text())


@pytest.mark.parametrize(("text", "box"), TABLES["boxes"])
def test_the_last_box_counts(text: str, box: str) -> None:
    assert last_boxed(text) == (None if box == "none" else box)


@pytest.mark.parametrize(("answer", "expected"), TABLES["plain"])
def test_plain_numbers_that_are_equal(answer: str, expected: str) -> None:
    assert equal(answer, expected)
    assert equal(answer, expected, plain=True)
    assert equal(expected, answer)


@pytest.mark.parametrize(("answer", "expected"), TABLES["calculated"])
def test_calculations_that_are_equal(answer: str, expected: str) -> None:
    assert equal(answer, expected)
    assert equal(expected, answer)
    assert not equal(answer, "17")
    assert plain_number(answer) is None
    assert not equal(answer, expected, plain=True)


@pytest.mark.parametrize(("answer", "expected"), TABLES["different"])
def test_what_is_not_equal(answer: str, expected: str) -> None:
    assert not equal(answer, expected)


NEVER = [*TABLES["never"], "\x00", "\ud800", "9" * (MAX_CHARS + 1), "(" * 150, "(" * 99 + "x" + ")" * 99]


@pytest.mark.parametrize("text", NEVER, ids=ascii)
def test_what_is_no_number_equals_nothing_not_even_itself(text: str) -> None:
    assert not equal(text, text)
    assert not equal(text, "1")
    assert not equal("1", text)
    assert not equal(text, text, plain=True)


def test_no_answer_is_never_right() -> None:
    assert not equal(None, "5")
    assert not equal(None, "")


def test_long_texts_take_linear_time() -> None:
    began = time.process_time()
    assert last_boxed(r"\boxed{" * 300_000) is None
    assert last_boxed(r"\boxed{5}" * 300_000) == "5"
    assert last_boxed(r"\boxed{" + "{" * 1_000_000) is None
    assert not equal("1" * 10_000_000, "1")
    assert time.process_time() - began < 5


PIECES = st.sampled_from(
    [*"0123456789+-*/^().,{}$ ", "**", "sqrt", "pi", r"\frac", r"\sqrt", r"\pi", r"\left(", r"\cdot", "\\"]
)


@given(st.lists(PIECES, max_size=40).map("".join) | st.text(), st.text() | st.just("5"))
def test_grading_never_raises(answer: str, expected: str) -> None:
    assert equal(answer, expected) in (True, False)
    assert equal(answer, answer, plain=True) in (True, False)
    assert last_boxed(answer) is None or r"\boxed{" in answer
    assert last_boxed(rf"\boxed{{{answer}") is None or "}" in answer


@given(st.fractions(max_denominator=10**9), st.fractions(max_denominator=10**9))
def test_fractions_are_compared_exactly(left: Fraction, right: Fraction) -> None:
    latex = rf"\frac{{{left.numerator}}}{{{left.denominator}}}"
    assert equal(str(left), latex)
    assert equal(latex, str(right)) == (left == right)
    assert equal(f"{left.numerator}/{left.denominator} + ({right})", str(left + right))
    assert equal(f"({left})*({right})", str(left * right))


@given(st.integers(-(10**30), 10**30))
def test_integers_with_commas(number: int) -> None:
    assert plain_number(f"{number:,}") == number
    assert equal(f"{number:,}", str(number), plain=True)
