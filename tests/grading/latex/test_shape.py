"""How answers are taken apart, without any process."""

import time
import tomllib
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.grading.latex import MAX_CHARS, final_box, readable
from agentrl.grading.latex.shape import blankless, collection, named, nesting, number, tidy, words
from agentrl.grading.latex.units import Quantity, quantity

TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("shapes.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("text", "tidied"), TABLES["tidy"])
def test_tidy(text: str, tidied: str) -> None:
    assert tidy(text) == tidied


def test_blanks_and_small_scripts_make_no_difference() -> None:
    assert blankless("x^{2} + y_{1}") == blankless("x^2+y_1")
    assert blankless(r"\frac{1}{23}") != blankless(r"\frac{12}{3}")


@pytest.mark.parametrize(("text", "kind", "items"), TABLES["collections"])
def test_collections(text: str, kind: str, items: list[str]) -> None:
    assert collection(text) == (kind, tuple(items))


@pytest.mark.parametrize(("text", "name", "rest"), TABLES["names"])
def test_names(text: str, name: str, rest: str) -> None:
    assert named(text) == (name, rest)


@pytest.mark.parametrize(("text", "value", "finished"), TABLES["numbers"])
def test_numbers_written_out(text: str, value: str, finished: bool) -> None:
    literal = number(tidy(text))
    assert literal is not None
    assert (literal.value, literal.finished) == (Fraction(value), finished)


@pytest.mark.parametrize(
    "text", ["", "1+1", "2^3", r"\frac{1}{0}", "1/0", "x", "1e9999", "9" * 300, r"1\frac{1}{0}", "--1"]
)
def test_what_is_no_number(text: str) -> None:
    assert number(text) is None


@given(st.fractions(max_denominator=10**6))
def test_fractions_are_read_exactly(value: Fraction) -> None:
    literal = number(rf"\frac{{{value.numerator}}}{{{value.denominator}}}")
    assert literal is not None
    assert literal.value == value
    assert literal.finished == (value.denominator > 1)


@given(st.integers(0, 999), st.integers(0, 9999), st.integers(0, 999))
def test_repeating_decimals_against_their_series(whole: int, digits: int, period: int) -> None:
    literal = number(rf"{whole}.{digits:04d}\overline{{{period:03d}}}")
    assert literal is not None
    # 40 periods written out are off by less than one unit of the last digit.
    written = Fraction(f"{whole}.{digits:04d}" + f"{period:03d}" * 40)
    assert 0 <= literal.value - written <= Fraction(1, 10**123)


@pytest.mark.parametrize(("text", "value", "unit"), TABLES["quantities"])
def test_quantities(text: str, value: str, unit: str) -> None:
    percent = unit == "percent"
    assert quantity(text) == Quantity(value=value, unit="" if percent else unit, percent=percent)


def test_words() -> None:
    assert words(r"\text{ Monday  Morning }") == words("monday morning") == "monday morning"
    assert words("(C)") == words(r"\text{C}") == "c"
    assert words("ab") is words("x") is words("x+1") is words(r"\pi") is None


@pytest.mark.parametrize(("text", "box"), TABLES["boxes"])
def test_only_what_is_said_last_and_aloud_counts(text: str, box: str) -> None:
    assert final_box(text) == (None if box == "none" else box)


def test_expected_answers() -> None:
    assert readable(r"\left\{1,2\right\}")
    for answer in ("", " ", "$", "{", "1}{2", "x" * (MAX_CHARS + 1), r"\boxed{2"):
        assert not readable(answer), answer


def test_nesting() -> None:
    assert nesting("(([{}]))") == 4
    assert nesting("") == nesting("x") == 0


LONG = [
    *("(" * 50_000, "1," * 25_000, "{" * 50_000, r"\text{" * 8000, "$" * 50_000, r"\pm" * 16_000, "1 " * 25_000),
    "a" * 50_000,
]


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_long_texts_take_linear_time(text: str) -> None:
    began = time.process_time()
    for read in (tidy, blankless, named, collection, number, words, nesting):
        read(text)
    assert time.process_time() - began < 1.0


@given(st.text(alphabet=r"{}()[]\$,;=^_0123456789/.%abtexpm ", max_size=60))
def test_nothing_raises(text: str) -> None:
    clean = tidy(text)
    named(clean), collection(clean), number(clean), words(clean), quantity(clean), readable(text), final_box(text)
