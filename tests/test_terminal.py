"""What a terminal is given: no control characters, colour where it is one, and no failure over what it can't encode."""

import builtins
import importlib.util
import io
import re
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.terminal import Terminal, visible


class Screen(io.StringIO):
    """A terminal, as far as anybody asks."""

    def isatty(self) -> bool:
        return True


@given(st.text(st.characters()))
def test_nothing_that_a_terminal_obeys_gets_through(text: str) -> None:
    shown = visible(text)
    assert all(unicodedata.category(char)[0] not in "CZ" or char in "\n\t " for char in shown)
    shown.encode()
    assert visible(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("naïve 漢字 🙂\n\ttext", "naïve 漢字 🙂\n\ttext"),
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("a\r\nb\b\x7f\x9b", "a\\r\nb\\x08\\x7f\\x9b"),
        ("\u202eevil\u200b\ud800", "\\u202eevil\\u200b\\ud800"),
        (r"a \x1b that was written", r"a \x1b that was written"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_plain_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    Terminal(out).write("[bold]hi[/bold] \x1b[31m", "red")
    assert out.getvalue() == "[bold]hi[/bold] \\x1b[31m\n"


def test_colour_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Screen()
    Terminal(out).write("[bold]:smile: \x1b[2J" + "long " * 60, "red")
    assert out.getvalue().startswith("\x1b[31m[bold]:smile: \\x1b[2J")
    assert out.getvalue().count("\n") == 1, "lines are the terminal's to break"
    assert set(re.findall("\x1b.*?m", out.getvalue())) == {"\x1b[31m", "\x1b[0m"}


def test_plain_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = builtins.__import__
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(builtins, "__import__", lambda name, *rest: real("no_such_" + name if "rich" in name else name))
    out = Screen()
    Terminal(out).write("hi", "red")
    assert out.getvalue() == "hi\n"


def test_what_can_not_be_encoded_is_escaped() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Terminal(out).write("é漢\ud800")
    assert raw.getvalue() == rb"\xe9\u6f22\ud800" + b"\n"
