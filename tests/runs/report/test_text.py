import html
import math
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.runs.report.text import brief, duration, marked, number, percent, tag, visible

TEXTS = st.text(st.characters(), max_size=30)


@given(TEXTS)
def test_nothing_invisible_is_left(text: str) -> None:
    hidden = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert not [char for char in visible(text) if unicodedata.category(char) in hidden]
    left = marked(text).replace("</i>\n", "").replace("</i>\t", "")
    assert not [char for char in left if unicodedata.category(char) in hidden]


@given(TEXTS)
def test_escaped_text_can_end_no_element_and_no_attribute(text: str) -> None:
    element = re.fullmatch(r"""<i title="([^<>"']*)">([^<>"']*)</i>""", tag("i", text, title=text))
    assert element is not None and [html.unescape(part) for part in element.groups()] == [visible(text)] * 2


@given(TEXTS)
def test_escaped_text_can_be_written_as_utf8(text: str) -> None:
    (tag("i", text) + marked(text)).encode("utf-8")


def test_line_breaks_and_tabs_stay() -> None:
    assert marked("a\n\tb") == 'a<i class="sign">↵</i>\n<i class="sign">⇥</i>\tb'


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        *(("\x00", "U+0000"), ("\x1b[31m", "U+001B[31m"), ("\x7f", "U+007F"), ("\r", "U+000D"), ("\u202e", "U+202E")),
        *(("\u2067", "U+2067"), ("\u200b", "U+200B"), ("\ufeff", "U+FEFF"), ("\u2028", "U+2028"), ("\ud800", "U+D800")),
        *(("\xa0", "U+00A0"), ("\U000e0041", "U+E0041")),
    ],
)
def test_what_shows_nothing_gets_a_sign(hostile: str, shown: str) -> None:
    assert visible(hostile) == shown
    assert shown.split("[")[0] in marked(hostile)


def test_markup_is_text() -> None:
    assert marked("<script>&") == "&lt;script&gt;&amp;"
    assert tag("i", '"<', tag("b", "&"), class_="'") == '<i class="&#39;">&#34;&lt;<b>&amp;</b></i>'


@pytest.mark.parametrize("value", [None, "3", True, math.nan, math.inf, -math.inf, 10**400, [1.0]])
def test_what_is_no_finite_number(value: object) -> None:
    assert number(value) is None


@pytest.mark.parametrize("value", [0, -2.5, 7, 1e12])
def test_numbers(value: float) -> None:
    assert number(value) == value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0, "0"), (0.0125, "0.0125"), (1500, "1500"), (45678, "45.7k"), (2.5e6, "2.5M"), (3e9, "3G")),
        (-0.5, "\N{MINUS SIGN}0.5"),
    ],
)
def test_brief(value: float, shown: str) -> None:
    assert brief(value) == shown


def test_a_minus_in_an_exponent_stays_ascii() -> None:
    assert brief(-2e-6) == "\N{MINUS SIGN}2e-06"


def test_percent() -> None:
    assert (percent(0.475), percent(-0.1)) == ("47.5%", "\N{MINUS SIGN}10.0%")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.00234, "0.0023 s"), (4.14, "4.1 s"), (200, "3 min 20 s"), (4320, "1 h 12 min"), (3.6e7, "10k h")],
)
def test_duration(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
