"""Which episodes the report shows: one of the first step and, of the last, one that succeeded and one that failed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import TrajectoryError
from agentrl.records import Record, read_episodes
from agentrl.viewer.text import number

SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An episode to show."""

    step: int
    """The training step that it was played at."""
    when: str
    """Its place in the run, for people: ``first step`` or ``last step``."""
    record: Record
    """The episode itself."""


def choose(files: Sequence[tuple[int, Path]], notes: list[str]) -> list[Chosen]:
    """Up to three episodes: the earliest first, then those of the last step, the successful one before the failed one.

    The early episode is, where possible, a failed one of a task that a late episode shows too.

    Args:
        files: episode files with their step, in order of steps.
        notes: gets a sentence for each file that can't be read to its end.
    """
    if not files:
        return []
    (first_step, first), (last_step, last) = files[0], files[-1]
    late = [Chosen(step=last_step, when="last step", record=record) for record in _late(last, notes)]
    early = _early(first, [one.record for one in late], notes)
    when = "first step" if first != last else "same step"
    return [*(Chosen(step=first_step, when=when, record=record) for record in early), *late]


def solved(record: Record) -> bool:
    """Whether the episode succeeded: its part ``correct`` is 1 or, without such a part, its return is above 0."""
    correct = record.trajectory.parts.get("correct")
    return record.trajectory.ret > 0 if correct is None else number(correct) == 1.0


def _late(path: Path, notes: list[str]) -> list[Record]:
    pools: dict[bool, list[Record]] = {True: [], False: []}
    for record in _readable(path, notes):
        pool = pools[solved(record)]
        if len(pool) < SHOWN - 1:
            pool.append(record)
        if all(pools.values()):
            return [pools[True][0], pools[False][0]]
    return pools[True] + pools[False]


def _early(path: Path, late: Sequence[Record], notes: list[str]) -> list[Record]:
    shown = {_key(record) for record in late}
    tasks = {record.trajectory.task_id for record in late}
    best: Record | None = None
    best_rank = -1
    for record in _readable(path, notes):
        rank = 2 * (record.trajectory.task_id in tasks) + (not solved(record))
        if rank > best_rank and _key(record) not in shown:
            best, best_rank = record, rank
        if best_rank == 3:
            break
    return [] if best is None else [best]


def _key(record: Record) -> tuple[str, int, tuple[int, ...]]:
    return record.trajectory.task_id, record.trajectory.seed, record.trajectory.token_ids


def _readable(path: Path, notes: list[str]) -> Iterator[Record]:
    try:
        yield from read_episodes(path)
    except (OSError, TrajectoryError) as error:
        note = f"episodes/{path.name} can't be read to its end: {error!r}"
        if note not in notes:
            notes.append(note)
