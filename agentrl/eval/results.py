"""The results of an evaluation: a table, and JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.eval.sets import short_name
from agentrl.eval.table import Evaluation, PlayedTasks, by_tag, summarise
from agentrl.runs.files import replace
from agentrl.types import Origin, won

SUMMARY = 1
"""Version of ``summary.json``."""
HEAD = (
    *("set", "tasks", "n", "success", "pass@n", "maj@n", "turns", "tokens"),
    *("calls", "errors", "cut", "truncated", "lost"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """The result on one set of tasks."""

    name: str
    """The set's name; empty for the environment of a run that has one."""
    origin: Origin
    """The origin that its episodes record."""
    played: PlayedTasks
    """Its episodes."""

    @property
    def overall(self) -> Evaluation:
        """All tasks, summarised."""
        return summarise(self.played.groups, best_return=self.origin.best_return, lost=self.played.lost)

    @property
    def tags(self) -> dict[str, Evaluation]:
        """The tasks of each tag, summarised."""
        return by_tag(self.played.groups, best_return=self.origin.best_return)

    def row(self) -> dict[str, object]:
        """Return plain data, for ``summary.json``."""
        origin, groups = self.origin, self.played.groups
        usages = [episode.usage for group in groups for episode in group if episode.usage]
        return {
            "name": self.name,
            "env": origin.env_id,
            "args": origin.env_args,
            "split": origin.split,
            "dialect": origin.dialect,
            "best_return": origin.best_return,
            "sampling": {"temperature": origin.temperature, "turn_tokens": origin.turn_tokens},
            "result": self.overall.row(),
            "tags": {tag: evaluation.row() for tag, evaluation in self.tags.items()},
            "refused": list(self.played.refused),
            "usage": {"read": sum(read for read, _ in usages), "written": sum(written for _, written in usages)},
            "tasks": [
                {
                    "task_id": group.task_id,
                    "tags": group.trajectories[0].tags,
                    "wins": sum(won(episode, origin.best_return) for episode in group),
                    "returns": [episode.ret for episode in group],
                }
                for group in groups
            ],
        }


def as_text(results: Sequence[SetResult]) -> str:
    """Return a table with a line for each set and below it those of its tags, without columns that hold nothing."""
    rows: list[tuple[str, ...]] = [HEAD]
    for result in results:
        rows.append(_row(result.name or short_name(result.origin.env_id), result.overall))
        rows += [_row(f"  {tag}", evaluation) for tag, evaluation in result.tags.items()]
    columns = [cells for cells in zip(*rows, strict=True) if {*cells[1:]} - {"", "0"} or cells[0] == "success"]
    widths = [max(map(len, cells)) for cells in columns]
    # The names stand on the left, and numbers on the right.
    padded = [[cell.rjust(width) for cell in cells] for cells, width in zip(columns, widths, strict=True)]
    padded[0] = [cell.ljust(widths[0]) for cell in columns[0]]
    return "\n".join(map("  ".join, zip(*padded, strict=True)))


def _row(name: str, result: Evaluation) -> tuple[str, ...]:
    n = result.attempts
    many = n > 1
    means = (result.turns_mean, result.tokens_mean, result.tool_calls_mean, result.tool_errors_mean)
    return (
        name,
        str(result.tasks),
        str(n),
        _rate(result.success, (result.low, result.high)),
        _rate(result.pass_at[n], result.pass_interval[n]) if many else "",
        _rate(result.majority, result.majority_interval) if many else "",
        *(f"{mean:.2f}" for mean in means),
        *(str(count) for count in (result.cut_turns, result.truncated, result.lost)),
    )


def _rate(rate: float | None, interval: tuple[float, float] | None) -> str:
    return "" if rate is None or interval is None else f"{rate:.1%} ({interval[0]:.1%} to {interval[1]:.1%})"


def write_summary(folder: Path, results: Sequence[SetResult], about: Mapping[str, object]) -> None:
    """Write ``summary.json``.

    Args:
        folder: the evaluation's.
        results: of its sets.
        about: facts about all sets: target, engine, seed, versions.
    """
    summary = {"schema": SUMMARY, **about, "sets": [result.row() for result in results]}
    replace(folder / "summary.json", json.dumps(summary, indent=1).encode(errors="replace"))
