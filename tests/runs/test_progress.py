"""What is shown: colours and bars in a terminal, plain lines elsewhere, and never what a terminal would obey."""

import builtins
import errno
import importlib.util
import io
import re
import threading
import time
import unicodedata
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from agentrl.runs.progress import Display, visible


class Screen(io.StringIO):
    """A terminal, as far as anybody asks."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)


@given(st.text(st.characters()))
def test_nothing_that_a_terminal_obeys_gets_through(text: str) -> None:
    shown = visible(text)
    assert all(unicodedata.category(char)[0] not in "CZ" or char in "\n\t " for char in shown)
    shown.encode()
    assert visible(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *(("", ""), ("naïve 漢字 🙂\n\ttext", "naïve 漢字 🙂\n\ttext"), ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07")),
        *(("a\r\nb\b\x7f\x9b", "a\\r\nb\\x08\\x7f\\x9b"), ("\u202eevil\u200b\ud800", "\\u202eevil\\u200b\\ud800")),
        (r"a \x1b that was written", r"a \x1b that was written"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_plain_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    Display(out).say("[bold]hi[/bold] \x1b[31m" + "x" * 200, "red")
    assert out.getvalue() == "[bold]hi[/bold] \\x1b[31m" + "x" * 200 + "\n"


def test_colour_where_there_is_one() -> None:
    out = Screen()
    Display(out).say("[bold]:smile: \x1b[2J" + "long " * 60, "red")
    assert out.getvalue().startswith("\x1b[31m[bold]:smile: \\x1b[2J")
    assert out.getvalue().count("\n") == 1, "lines are the terminal's to break"
    assert set(re.findall("\x1b.*?m", out.getvalue())) == {"\x1b[31m", "\x1b[0m"}


def test_plain_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = builtins.__import__
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(builtins, "__import__", lambda name, *rest: real("no_such_" + name if "rich" in name else name))
    out = Screen()
    Display(out).say("hi", "red")
    assert out.getvalue() == "hi\n"


def test_what_can_not_be_encoded_is_escaped() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Display(out).say("é漢\ud800")
    assert raw.getvalue() == rb"\xe9\u6f22\ud800" + b"\n"


def test_a_log_on_a_full_disk_ends_nothing() -> None:
    out = Mock(encoding="utf-8", isatty=lambda: False)
    out.write.side_effect = [OSError(errno.ENOSPC, "full"), OSError(errno.EPIPE, "closed")]
    Display(out).say("hi")
    with pytest.raises(BrokenPipeError):
        Display(out).say("hi")


def shown(out: io.StringIO) -> list[str]:
    text = Text.from_ansi(out.getvalue().replace("\r", "\n")).plain
    return [line.rstrip() for line in text.splitlines()]


def await_bar(out: io.StringIO, *parts: str) -> None:
    """Wait until a bar with these parts is drawn."""
    while not any(all(part in line for part in parts) for line in shown(out)):
        time.sleep(0.01)


def test_without_a_terminal_there_are_plain_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One every nine seconds; what was done before a resumption took no time and says nothing about what is left."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("agentrl.runs.progress.time", SimpleNamespace(monotonic=lambda: clock.now))
    display = Display(out := io.StringIO())
    with display.phase("training", 10) as bar:
        for now, note in ((0, ""), (0, ""), (8, "reward 0.25"), (10, "reward [0.50]"), (18, "reward 0.60")):
            clock.now = now
            bar.advance(note)
        with display.phase("evaluating", 2) as inner:
            clock.now = 28
            inner.advance("held-out :smile: tasks")
        clock.now = 300
        bar.advance("reward 0.75")
    assert out.getvalue() == (
        "training 4/10: reward [0.50], about 30 s left\nevaluating 1/2: held-out :smile: tasks, about 10 s left\n"
        "training 6/10: reward 0.75, about 5 min left\n"
    )


def test_whatever_takes_long_says_so_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Display, "_EVERY_S", 0.01)
    display, names = Display(out := io.StringIO()), iter(["generate", "update"])
    name = next(names)

    def await_line(text: str) -> None:
        while not re.search(rf"^{text} … for \d+ s$", out.getvalue(), re.M):
            time.sleep(0.01)

    with display.doing("loading the model"):
        await_line("loading the model")
        with display.phase("training", 7) as bar:
            await_line("training 0/7")
            bar.advance()
            await_line("training 1/7")
            with display.doing(lambda: f"step 2: {name}"):
                await_line("step 2: generate")
                name = next(names)
                await_line("step 2: update")
    before = out.getvalue()
    time.sleep(0.05)
    assert out.getvalue() == before, "nothing is done any more"
    with pytest.raises(KeyError), display.doing("failing"):
        raise KeyError
    assert not [thread for thread in threading.enumerate() if thread.name == "agentrl-display"]


def test_phases_nest_in_a_terminal_and_leave_what_was_said() -> None:
    display = Display(out := Screen())
    with display.phase("training", 2) as bar:
        bar.advance("reward 0.50")
        with display.phase("evaluating after step 1", 4) as inner:
            inner.advance("held-out tasks")
            await_bar(out, "evaluating after step 1", "1/4")
            display.say("step 1: half of them")
        bar.advance("reward 0.75")
        await_bar(out, "training", "2/2")
    display.say("done")
    lines = shown(out)
    assert any("training" in line and "1/2" in line for line in lines)
    assert "step 1: half of them" in lines and lines[-1] == "done"
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1, "the cursor comes back"


@pytest.mark.parametrize("width", [80, 120])
def test_bars_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    display = Display(out := Screen())
    with display.phase("evaluating after step 1000", 2000) as bar:
        for _ in range(3):
            bar.advance("reward 0.55, cut turns 3, tokens clipped 12.3%, engine and trainer 1e-06 apart")
        await_bar(out, "3/2000 reward 0.55, cu")
    lines = shown(out)
    assert lines and all(len(line) <= width for line in lines)
    assert not any(line.strip().startswith(("cut", "tokens", "engine")) for line in lines), "one line per bar"


def test_error_within_a_phase_gives_the_terminal_back() -> None:
    display = Display(out := Screen())
    with pytest.raises(KeyboardInterrupt), display.phase("training", 2), display.phase("evaluating", 2):
        raise KeyboardInterrupt
    display.say("after")
    assert shown(out)[-1] == "after" and out.getvalue().endswith("after\n")
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h")
