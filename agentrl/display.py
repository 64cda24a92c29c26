"""What a person sees while a run goes on: progress bars in a terminal, plain lines elsewhere."""

import time
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from agentrl.evaluate import Evaluation


class _NoteColumn(ProgressColumn):
    """The column that gives way where the terminal is narrow: it is cut, and no other one is."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")


class Display:
    """Shows phases with a bar each, and what came of them.

    Args:
        console: where to; the terminal's standard error by default, so that output stays usable in pipes.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=10, table_column=Column(no_wrap=True)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            _NoteColumn(),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )

    def say(self, text: str) -> None:
        """Write one line that stays."""
        self.console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    @contextmanager
    def phase(self, name: str, total: int) -> Generator["Bar"]:
        """Show a bar while something long goes on."""
        self._progress.start()
        task = self._progress.add_task(name, total=total, note="")
        try:
            yield Bar(self, self._progress, task, name, total)
        finally:
            self._progress.remove_task(task)
            if not self._progress.tasks:  # phases nest: evaluation within training
                self._progress.stop()

    def evaluation(self, name: str, result: Evaluation) -> None:
        """Say how an evaluation came out, in one line."""
        passes = "".join(f", pass@{k} {value:.1%}" for k, value in result.pass_at.items() if k > 1)
        self.say(
            f"{name}: success {result.success:.1%} (95% CI {result.low:.1%} to {result.high:.1%}) on {result.tasks} "
            f"tasks{passes}, {result.turns_mean:.2f} turns, {result.tool_calls_mean:.2f} tool calls, "
            f"{result.tool_errors_mean:.2f} tool errors, {result.truncated} truncated, {result.cut_turns} cut turns"
        )


class Bar:
    """One bar of a :class:`Display`; where there is no terminal, a line every ten seconds."""

    _EVERY_S = 10.0

    def __init__(self, display: Display, progress: Progress, task: TaskID, name: str, total: int) -> None:
        self._display, self._progress, self._task = display, progress, task
        self._name, self._total, self._done = name, total, 0
        self._before = 0
        self._began = self._told = time.monotonic()

    def expect(self, total: int) -> None:
        """From what is done so far, ``total`` is how many there will be."""
        self._total = total
        self._progress.update(self._task, total=total)

    def advance(self, note: str = "") -> None:
        """One more is done; without a note it was done before, and in no time."""
        self._done += 1
        if not note:
            self._before += 1
            self._progress.advance(self._task)
            return
        self._progress.update(self._task, advance=1, note=note)
        now = time.monotonic()
        if self._progress.disable and now - self._told > self._EVERY_S:
            self._told = now
            each = (now - self._began) / (self._done - self._before)
            self._display.say(
                f"{self._name} {self._done}/{self._total}: {note}, {_left(each, self._total - self._done)}"
            )


def _left(each: float, count: int) -> str:
    """How long ``count`` more will take at ``each`` seconds a piece, in words."""
    seconds = each * count
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"
