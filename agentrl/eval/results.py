"""What an evaluation found, as a table, as data, and as a page."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.eval.pages import Section, write_page
from agentrl.eval.table import Evaluation, Played, by_tag, summarise
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
    """What was found on one set of tasks."""

    name: str
    """The set's name; empty for the environment of a run that has one."""
    origin: Origin
    """What its episodes say of themselves."""
    played: Played
    """Its episodes."""
    seconds: float
    """Wall time in this process."""
    new: int
    """Episodes that were played in this process."""
    new_tokens: int
    """Tokens that the agent wrote in them."""

    @property
    def whole(self) -> Evaluation:
        """All tasks."""
        return summarise(self.played.groups, best_return=self.origin.best_return, lost=self.played.lost)

    @property
    def tags(self) -> dict[str, Evaluation]:
        """The tasks of each tag."""
        return by_tag(self.played.groups, best_return=self.origin.best_return)

    def row(self) -> dict[str, object]:
        """Give plain data, for ``summary.json``."""
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
            "result": self.whole.row(),
            "tags": {tag: found.row() for tag, found in self.tags.items()},
            "refused": list(self.played.refused),
            "usage": {"read": sum(one for one, _ in usages), "written": sum(one for _, one in usages)},
            "tasks": [
                {
                    "task_id": group.task_id,
                    "tags": group.trajectories[0].tags,
                    "wins": sum(won(episode, origin.best_return) for episode in group),
                    "returns": [episode.ret for episode in group],
                }
                for group in groups
            ],
            "this_process": {
                "seconds": self.seconds,
                "episodes": self.new,
                "faults": self.played.faults,
                "tokens_per_second": self.new_tokens / self.seconds if self.new else 0.0,
            },
        }


def table(results: Sequence[SetResult]) -> list[tuple[str, ...]]:
    """Give the lines of a table below ``HEAD``: a set's, then those of its tags."""
    lines: list[tuple[str, ...]] = []
    for result in results:
        lines.append(_line(result.name or result.origin.env_id, result.whole))
        lines += [_line(f"  {tag}", found) for tag, found in result.tags.items()]
    return lines


def as_text(results: Sequence[SetResult]) -> str:
    """Give the table as text, without columns that say nothing."""
    lines = [HEAD, *table(results)]
    kept = [column for column in zip(*lines, strict=True) if {*column[1:]} - {"", "0"} or column[0] == "success"]
    widths = [max(map(len, column)) for column in kept]
    rows = [[text.rjust(width) for text, width in zip(row, widths, strict=True)] for row in zip(*kept, strict=True)]
    names = [name.ljust(widths[0]) for name in kept[0]]
    return "\n".join("  ".join([name, *row[1:]]) for name, row in zip(names, rows, strict=True))


def _line(name: str, found: Evaluation) -> tuple[str, ...]:
    n = found.attempts
    many = n > 1
    means = (found.turns_mean, found.tokens_mean, found.tool_calls_mean, found.tool_errors_mean)
    return (
        name,
        str(found.tasks),
        str(n),
        _rate(found.success, (found.low, found.high)),
        _rate(found.pass_at[n], found.pass_interval[n]) if many else "",
        _rate(found.majority, found.majority_interval) if many else "",
        *(f"{mean:.2f}" for mean in means),
        *(str(count) for count in (found.cut_turns, found.truncated, found.lost)),
    )


def _rate(rate: float | None, interval: tuple[float, float] | None) -> str:
    return "" if rate is None or interval is None else f"{rate:.1%} ({interval[0]:.1%} to {interval[1]:.1%})"


def write_results(folder: Path, results: Sequence[SetResult], about: dict[str, object]) -> None:
    """Write ``summary.json`` and ``report.html``.

    Args:
        folder: the evaluation's.
        results: of its sets.
        about: what is the same for all sets: target, engine, seed, versions.
    """
    summary = {"schema": SUMMARY, **about, "sets": [result.row() for result in results]}
    replace(folder / "summary.json", json.dumps(summary, indent=1).encode(errors="replace"))
    rates = "Rates with their 95% intervals, clustered by task; n attempts a task. Means are per episode."
    faults = "Episodes that a fault of the infrastructure ended are played again; tasks lost to it are left out."
    tables = Section(title="Results", text=[rates, faults], head=HEAD, rows=table(results))
    how = Section(title="How it was played", head=["", ""], rows=list(about.items()))
    write_page(folder / "report.html", str(about["target"]), [tables, how])
