"""Read a run folder as far as it goes: a run that was interrupted is still worth looking at."""

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from agentrl.errors import RunFolderError
from agentrl.runs.files import MAX_ROWS, MAX_TEXT, read
from agentrl.runs.folder import number, read_row
from agentrl.runs.records import step_files

RunRow: TypeAlias = Mapping[str, object]
"""One line of ``metrics.jsonl`` or ``evals.jsonl``; ``step`` is a number, all else may be missing."""
_MARKS = ("config.toml", "metrics.jsonl", "evals.jsonl", "episodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The contents of a run folder that the report shows."""

    name: str
    """The folder's name."""
    config: str
    """``config.toml`` as text; empty where there is none."""
    steps: tuple[RunRow, ...]
    """One row per training step, in order; of a step that was trained twice, the later row."""
    evals: tuple[RunRow, ...]
    """One row per step, split and environment, in order of steps."""
    episodes: tuple[tuple[int, Path], ...]
    """Episode files with their step, in order of steps."""
    notes: tuple[str, ...]
    """Files and lines that could not be read, a sentence each."""


def read_folder(run: Path) -> RunData:
    """Read the files of a run that exist.

    Raises:
        RunFolderError: ``run`` is no folder, or holds nothing that a run writes.
    """
    if not run.is_dir():
        raise RunFolderError(f"{run} is no folder: name the folder of a run")
    if not holds_run(run):
        raise RunFolderError(f"{run} is no run: it has none of {', '.join(_MARKS)}")
    notes: list[str] = []
    steps = {row["step"]: row for row in _read_rows(run / "metrics.jsonl", notes)}
    evals = {(row["step"], str(row.get("split")), env_of(row)): row for row in _read_rows(run / "evals.jsonl", notes)}
    return RunData(
        name=run.resolve().name,
        config=_read_noted(run / "config.toml", notes, MAX_TEXT).decode(errors="replace"),
        steps=tuple(sorted(steps.values(), key=step_of)),
        evals=tuple(sorted(evals.values(), key=step_of)),
        episodes=tuple(step_files(run)),
        notes=tuple(notes),
    )


def holds_run(folder: Path) -> bool:
    """Return True if a folder holds anything that a run writes."""
    return any((folder / mark).exists() for mark in _MARKS)


def step_of(row: RunRow) -> float:
    """Return the training step of a row."""
    step = number(row["step"])
    assert step is not None, "rows without a step are not kept"
    return step


def env_of(row: RunRow) -> str:
    """Return the environment of an evaluation in a mix; empty where there is no mix."""
    return str(row.get("env", ""))


def series(rows: Sequence[RunRow], key: str) -> list[tuple[float, float]]:
    """Return the points ``(step, value)`` of ``key``, without rows where it is missing or not finite."""
    points = ((step_of(row), number(row.get(key))) for row in rows)
    return [(step, value) for step, value in points if value is not None]


def _read_noted(path: Path, notes: list[str], limit: int) -> bytes:
    """Read a file that may be missing; note one that can't be read, and return nothing."""
    try:
        return read(path, limit)
    except OSError as error:
        if error.errno != errno.ENOENT:
            notes.append(f"{path.name} can't be read: {error.strerror}.")
        return b""


def _read_rows(path: Path, notes: list[str]) -> list[RunRow]:
    lines = _read_noted(path, notes, MAX_ROWS).split(b"\n")
    rows: list[RunRow] = []
    for at, line in enumerate(lines, start=1):
        if (row := read_row(line)) is not None:
            rows.append(row)
        elif at == len(lines) and line:
            notes.append(f"{path.name} ends in an unfinished line, which is skipped.")
        elif line.strip():
            notes.append(f"Line {at} of {path.name} is no JSON object with a step and is skipped.")
    return rows
