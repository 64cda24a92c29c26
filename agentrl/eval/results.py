"""The results of an evaluation: a table, JSON, and a page."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from agentrl.eval.episodes import env_call
from agentrl.eval.pages import Section, shorten, write_page
from agentrl.eval.sets import short_name
from agentrl.eval.table import Evaluation, PlayedTasks, by_tag, summarise
from agentrl.runs.files import replace
from agentrl.runs.progress import as_argument
from agentrl.types import Group, Origin, won

SUMMARY = 1
"""Version of ``summary.json``."""
HEAD = (
    *("set", "tasks", "n", "success", "pass@n", "maj@n", "turns", "tokens"),
    *("calls", "errors", "cut", "truncated", "lost"),
)
_TASKS = ("set", "task", "tags", "success", "mean return", "expected answer", "given answers")
_MOST_ROWS = 1000
"""Rows of a table on the page, which has to stay quick."""
_MOST_SIGNS = 120
"""Characters of an answer there."""


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

    def wins(self, group: Group) -> int:
        """Count a task's episodes that succeeded."""
        return sum(won(episode, self.origin.best_return) for episode in group)

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
                    "wins": self.wins(group),
                    "returns": [episode.ret for episode in group],
                }
                for group in groups
            ],
        }


def _rows(results: Sequence[SetResult]) -> list[tuple[str, ...]]:
    """Return the rows of a table below ``HEAD``: a set's, then those of its tags."""
    rows: list[tuple[str, ...]] = []
    for result in results:
        rows.append(_row(result.name or short_name(result.origin.env_id), result.overall))
        rows += [_row(f"  {tag}", evaluation) for tag, evaluation in result.tags.items()]
    return rows


def as_text(results: Sequence[SetResult]) -> str:
    """Return the table as text, without columns that hold nothing."""
    lines = _without_empty([HEAD, *_rows(results)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [[text.rjust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *row[1:]]) for line, row in zip(lines, rows, strict=True))


def _without_empty(lines: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Drop columns in which every cell below the head is empty or 0."""
    columns = [column for column in zip(*lines, strict=True) if {*column[1:]} - {"", "0"} or column[0] == "success"]
    return list(zip(*columns, strict=True))


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


def write_results(folder: Path, results: Sequence[SetResult], about: Mapping[str, object]) -> None:
    """Write ``summary.json`` and ``report.html``.

    Args:
        folder: the evaluation's.
        results: of its sets.
        about: facts about all sets: target, engine, seed, versions.
    """
    summary = {"schema": SUMMARY, **about, "sets": [result.row() for result in results]}
    replace(folder / "summary.json", json.dumps(summary, indent=1).encode(errors="replace"))
    rates = "Rates with their 95% intervals, clustered by task; n attempts a task. Means are per episode."
    faults = "Episodes that an infrastructure fault ended are retried; tasks lost to faults are skipped."
    refused = [sentence for result in results for sentence in result.played.refused]
    tasks = [row for result in results for row in _tasks(result)]
    view = f"All episodes, token by token: agentrl view {as_argument(folder)}"
    sections = [
        _section("Results", [rates, faults, *refused], HEAD, _rows(results)),
        _section("Tasks", [*_cut(tasks), view], _TASKS, tasks[:_MOST_ROWS]),
        Section(title="How it was played", head=["", ""], rows=_how(results, about)),
    ]
    write_page(folder / "report.html", str(about["target"]), sections)


def _section(title: str, text: Sequence[str], names: Sequence[str], lines: Sequence[Sequence[str]]) -> Section:
    """Return a section whose table has no empty columns."""
    head, *rows = _without_empty([names, *lines])
    return Section(title=title, text=text, head=head, rows=rows)


def _cut(rows: Sequence[object]) -> list[str]:
    """Return a note about a table that is too long for the page."""
    return [f"These are the first {_MOST_ROWS:,} of {len(rows):,}."] if len(rows) > _MOST_ROWS else []


def _tasks(result: SetResult) -> list[tuple[str, ...]]:
    """Return a row for each task, those that were solved least often before the others."""
    rows: list[tuple[str, ...]] = []
    for group in sorted(result.played.groups, key=result.wins):
        counts = Counter(episode.answer for episode in group if episode.answer)
        answers = [f"{answer} ({count} times)" if count > 1 else answer for answer, count in counts.most_common()]
        wins = f"{result.wins(group)} of {len(group)}"
        mean = sum(episode.ret for episode in group) / len(group)
        tags = ", ".join(group.trajectories[0].tags)
        expected = shorten(group.trajectories[0].expected, _MOST_SIGNS)
        answer = shorten(", ".join(answers), _MOST_SIGNS)
        rows.append((result.name, group.task_id, tags, wins, f"{mean:.3g}", expected, answer))
    return rows


def _how(results: Sequence[SetResult], about: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return the facts that decide how episodes are played, a row each."""
    facts = {
        f"set {result.name}".rstrip(): f"{env_call(result.origin)}, {_sampling(result.origin)}" for result in results
    }
    settings = cast(Mapping[str, object], about["settings"])
    flat = {name: value for name, value in about.items() if name != "settings"} | dict(settings)
    return [*facts.items(), *((name, _plain(value)) for name, value in flat.items())]


def _sampling(origin: Origin) -> str:
    how = "greedy" if origin.temperature == 0 else f"temperature {origin.temperature:g}"
    return f"dialect {origin.dialect}, {how}, turns of {origin.turn_tokens} tokens"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {part}" for name, part in cast(Mapping[str, object], value).items()) or "none"
    return ", ".join(map(str, cast(list[object], value))) if isinstance(value, list) else str(value)
