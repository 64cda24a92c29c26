import html
import math
import re
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.runs.folder import number
from agentrl.runs.report.text import brief, duration, marked, percent, visible

TEXTS = st.text(st.characters(), max_size=30)
MINUS = "\N{MINUS SIGN}"


@given(TEXTS)
def test_nothing_invisible_is_left(text: str) -> None:
    hidden = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert not [char for char in visible(text) if unicodedata.category(char) in hidden]
    left = marked(text).replace("</i>\n", "").replace("</i>\t", "")
    assert not [char for char in left if unicodedata.category(char) in hidden]


@given(TEXTS)
def test_escaped_text_can_end_no_element_and_no_attribute(text: str) -> None:
    escaped = re.sub(r'<i class="sign">[\w+↵⇥]+</i>[\n\t]?', "", marked(text))
    assert not {*escaped} & {*"<>\"'"} and html.unescape(escaped) == "".join(filter(str.isprintable, text))


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
    assert marked("<script>&\n<") == '&lt;script&gt;&amp;<i class="sign">↵</i>\n&lt;'


def test_only_finite_numbers_are_numbers() -> None:
    hostile = [None, "3", True, math.nan, math.inf, -math.inf, 10**400, [1.0]]
    assert [number(value) for value in [*hostile, 0, -2.5, 7, 1e12]] == [None] * 8 + [0, -2.5, 7, 1e12]


@pytest.mark.parametrize(
    ("show", "value", "shown"),
    [
        *((brief, 0, "0"), (brief, 0.0125, "0.0125"), (brief, 1500, "1500"), (brief, 45678, "45.7k")),
        *((brief, 2.5e6, "2.5M"), (brief, 3e9, "3G"), (brief, -0.5, f"{MINUS}0.5"), (brief, -2e-6, f"{MINUS}2e-06")),
        *((percent, 0.475, "47.5%"), (percent, -0.1, f"{MINUS}10.0%"), (duration, 0.00234, "0.0023 s")),
        *((duration, 4.14, "4.1 s"), (duration, 200, "3 min 20 s"), (duration, 4320, "1 h 12 min")),
        (duration, 3.6e7, "10k h"),
    ],
)
def test_numbers_for_people(show: Callable[[float], str], value: float, shown: str) -> None:
    assert show(value) == shown
