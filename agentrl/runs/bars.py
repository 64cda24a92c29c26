"""Progress bars for a terminal, by rich."""

from typing import TextIO

from rich import progress
from rich.console import Console
from rich.table import Column
from rich.text import Text


class _NoteColumn(progress.ProgressColumn):
    """Column with the latest note; only this column is cut off in a narrow terminal."""

    def render(self, task: progress.Task) -> Text:
        return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")


def make_bars(out: TextIO) -> progress.Progress:
    """Make bars, which vanish when they are done; each task has the field ``note``."""
    return progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=10, table_column=Column(no_wrap=True)),
        progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
        _NoteColumn(),
        progress.TimeRemainingColumn(table_column=Column(no_wrap=True)),
        console=Console(file=out),
        transient=True,
    )
