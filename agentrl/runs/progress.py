"""Output for people: colours and bars at a terminal, plain lines elsewhere, and never control characters."""

import errno
import importlib.util
import shlex
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress


def visible(text: str) -> str:
    r"""Escape every invisible character in ``text`` but line ends and tabs.

    Texts of tools, tasks and models may hold characters that move the cursor, change colours or reverse the direction
    of writing; a terminal would obey them.

    Example:
        >>> visible("a\x1b[2Jb")
        'a\\x1b[2Jb'
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )


def as_argument(path: Path) -> str:
    """Return a path quoted for a shell, relative where it lies inside the current folder."""
    absolute, here = path.resolve(), Path.cwd()
    return shlex.quote(str(absolute.relative_to(here) if absolute.is_relative_to(here) else path))


def _nothing(*_: object, **_changes: object) -> None:
    """Show nothing."""


class Display:
    """Shows lines that stay, and phases: with colours and bars where ``out`` is a terminal and rich is installed.

    While something is being done it is never silent for more than ten seconds.

    Args:
        out: the stream; standard error by default, so that standard output stays usable in pipes.
    """

    _EVERY_S = 10.0

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._bars: Progress | None = None
        self._doing: list[tuple[Callable[[], str], float]] = []
        """What is being done, the outermost first: makes a text for people, and when it began."""
        self._spoke = time.monotonic()
        if self._out.isatty() and importlib.util.find_spec("rich") is not None:
            from agentrl.runs.bars import make_bars

            self._bars = make_bars(self._out)

    def say(self, text: str, style: str = "") -> None:
        """Print one line that stays.

        Args:
            text: any text; invisible characters and those that can't be encoded are escaped.
            style: a style of rich, such as ``"bold red"``.
        """
        self._spoke = time.monotonic()
        encoding = self._out.encoding or "utf-8"
        shown = visible(text).encode(encoding, "backslashreplace").decode(encoding)
        if self._bars is None:
            try:
                print(shown, file=self._out, flush=True)
            except OSError as error:  # a full disk must not end a run whose own files lie elsewhere
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
        else:  # rich must not parse the text as markup
            self._bars.console.print(shown, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def doing(self, what: str | Callable[[], str]) -> AbstractContextManager[None]:
        """While the block runs, say what it does whenever nothing else was said for ten seconds."""
        return self._beating(what if callable(what) else lambda: what)

    @contextmanager
    def _beating(self, what: Callable[[], str]) -> Generator[None]:
        self._doing.append((what, time.monotonic()))
        if len(self._doing) > 1:  # the outermost block's thread speaks of the innermost
            try:
                yield
            finally:
                self._doing.pop()
            return
        # A thread, since the block may be one long call.
        ended, self._spoke = threading.Event(), time.monotonic()
        thread = threading.Thread(target=self._beat, args=(ended,), name="agentrl-display", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._doing.pop()

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(max(0.0, self._spoke + self._EVERY_S - time.monotonic())):
            now, (what, began) = time.monotonic(), self._doing[-1]
            if self._bars and self._bars.tasks:  # they move by themselves
                self._spoke = now
            elif now >= self._spoke + self._EVERY_S:
                self.say(f"{what()} … for {now - began:.0f} s")

    @contextmanager
    def phase(self, name: str, total: int) -> Generator["Bar"]:
        """Show a bar while the block runs; where there is none, a line every ten seconds."""
        if self._bars is None:
            bar = Bar(name, total, say=self.say)
            with self._beating(bar.text):
                yield bar
            return
        self._bars.start()
        task = self._bars.add_task(name, total=total, note="")
        try:
            yield Bar(name, total, draw=partial(self._bars.update, task))
        finally:
            self._bars.remove_task(task)
            if not self._bars.tasks:  # phases nest, such as evaluation within training
                self._bars.stop()


class Bar:
    """The progress of a phase of a :class:`Display`.

    Args:
        name: of the phase.
        total: how many units it has.
        draw: draws the bar with what has changed.
        say: prints a line.
    """

    _EVERY_S = 9.0  # before the display says so itself

    def __init__(
        self,
        name: str,
        total: int,
        *,
        draw: Callable[..., None] = _nothing,
        say: Callable[[str], None] = _nothing,
    ) -> None:
        self._name, self._total, self._draw, self._say = name, total, draw, say
        self._done = self._before = 0
        self._began = self._reported = time.monotonic()

    def text(self) -> str:
        """Return the name and how much is done."""
        return f"{self._name} {self._done}/{self._total}"

    def advance(self, note: str = "") -> None:
        """Count one more unit as done; without a note it was done in an earlier process."""
        self._done += 1
        # Units of an earlier process took no time here, so they must not shorten the estimate.
        if not note:
            self._before += 1
            self._draw(advance=1)
            return
        self._draw(advance=1, note=note)
        now = time.monotonic()
        if now - self._reported > self._EVERY_S:
            self._reported = now
            seconds = (now - self._began) / (self._done - self._before) * (self._total - self._done)
            left = f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"
            self._say(f"{self.text()}: {note}, {left}")
