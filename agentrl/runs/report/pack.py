"""Episodes as the page holds them: one row each for the list, and two blocks each that the browser opens when shown.

A block is JSON, deflated, in base64: that of the texts is what a search reads, the other one holds the numbers.
"""

import base64
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from agentrl.errors import TrajectoryError
from agentrl.runs.records import Record, read_episodes
from agentrl.runs.report.text import number
from agentrl.types import Stop, Trajectory

_STOPS = {
    Stop.TERMINATED: "the environment ended it: a final answer was given",
    Stop.TURN_LIMIT: "cut off: all turns were used up",
    Stop.TOKEN_LIMIT: "cut off: the token budget was used up",
    Stop.TURN_CUT: "cut off: the last turn ran into its limit of tokens",
}
_DIGITS: Mapping[str, str] = {
    **{"logp": ".4g", "entropy": ".3g", "advantage": ".4g", "log_ratio": ".5f", "cumulative_log_ratio": ".5f"},
    **{"clipped": ".0f", "realized_energy": ".4g", "baseline": ".4g", "mismatch": ".4f"},
}
"""How each number of a token is written; fixed digits where most are noise around 0, which then packs to nothing."""


@dataclass(slots=True, kw_only=True)
class Packed:
    """The episodes of a page."""

    rows: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    """What the list shows and filters by, one row an episode."""
    blocks: list[str] = field(default_factory=list[str])
    """The elements that hold them: ``text-0``, ``numbers-0``, ``text-1`` …"""
    notes: list[str] = field(default_factory=list[str])
    """What could not be read, a sentence each."""

    def add(
        self,
        source: int,
        files: Sequence[tuple[str, Path]],
        limit: int | None = None,
        *,
        strict: bool,
        added: Callable[[], None] = lambda: None,
    ) -> None:
        """Add the episodes of a run's files, or of one file.

        Args:
            source: which of the page's sources they belong to.
            files: each with what the list calls it.
            limit: most episodes of each file.
            strict: raise where a file can't be read, instead of leaving a note.
            added: is called after each episode.

        Raises:
            TrajectoryError: a file holds something else than episodes, or can't be read.
        """
        for place, (label, path) in enumerate(files):
            try:
                for record in islice(read_episodes(path), limit):
                    self._add(record, {"source": source, "file": place, "step": label})
                    added()
            except (OSError, TrajectoryError) as error:
                if strict:
                    raise TrajectoryError(f"{path} can't be read to its end: {error}") from error
                self.notes.append(f"{path.parent.name}/{path.name} can't be read to its end: {error!r}")

    def pair(self) -> None:
        """Give each episode of two sources that of the same task and attempt; without attempts, at the same place."""
        seen = Counter[tuple[object, ...]]()
        places: dict[tuple[object, ...], int] = {}
        for at, row in enumerate(self.rows):
            task = row["file"], row["env"], row["task"]
            which = row["attempt"] if row["attempt"] is not None else seen[row["source"], *task]
            seen[row["source"], *task] += 1
            other = places.setdefault((*task, which), at)
            if self.rows[other]["source"] != row["source"]:
                self.rows[other]["pair"], row["pair"] = at, other

    def _add(self, record: Record, row: dict[str, object]) -> None:
        one, at = record.trajectory, len(self.rows)
        errors = sum(not run.ok for run in one.tool_runs)
        # The seed as text: JavaScript rounds integers beyond 2^53.
        row |= {"env": one.env, "task": one.task_id, "seed": str(one.seed), "attempt": one.attempt, "tags": one.tags}
        row |= {"won": record.won, "return": one.ret, "turns": len(one.sampled)}
        row |= {"errors": errors, "cut": one.cut_turns or one.stop.truncated, "stop": one.stop.value, "why": why(one)}
        self.rows.append(row | {"sampled": one.n_sampled, "tokens": len(one.token_ids)})
        self.blocks += [block(f"text-{at}", _texts(record)), block(f"numbers-{at}", _numbers(record))]


def why(trajectory: Trajectory) -> str:
    """Why an episode ended, in words."""
    if trajectory.stop is Stop.TERMINATED and trajectory.sampled and trajectory.sampled[-1].cut:
        return "the environment ended it: a turn that was cut off was taken as the final answer"
    return _STOPS[trajectory.stop]


def block(name: str, content: object) -> str:
    """An element that the browser neither shows nor runs; base64 has no character that could end it."""
    text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"))
    packed = base64.b64encode(zlib.compress(text.encode("ascii"))).decode("ascii")
    return f'<script type="text/plain" id="{name}">{packed}</script>\n'


def _texts(record: Record) -> Mapping[str, object]:
    one, rewards = record.trajectory, iter(record.trajectory.rewards)
    segments: list[Mapping[str, object]] = []
    for segment, pieces in zip(one.segments, record.pieces, strict=True):
        row: dict[str, object] = {"source": segment.source, "text": "".join(pieces), "count": len(pieces)}
        if segment.trained:
            row |= {"reward": next(rewards), "version": segment.version, "swaps": segment.swaps, "cut": segment.cut}
        segments.append(row)
    tools = [(run.name, bool(run.ok), number(run.wall_s), _given(run.arguments)) for run in one.tool_runs]
    answers = {"expected": one.expected, "answer": one.answer}
    return {"segments": segments, "tools": tools, "parts": dict(one.parts), **answers}


def _given(arguments: Mapping[str, object]) -> Mapping[str, str]:
    # JavaScript reads neither NaN nor infinities.
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}


def _numbers(record: Record) -> str:
    """JSON, written by hand: ``json`` would write all digits of every number, several times as many as are shown."""
    one = record.trajectory
    logp = [value for segment in one.sampled for value in segment.logprobs or ()]
    columns: dict[str, Iterable[float]] = {"logp": logp, **record.training}
    if record.advantages is not None:
        columns["advantage"] = record.advantages
    if old := record.training.get("old_logp"):
        columns["mismatch"] = (a - b for a, b in zip(old, logp, strict=True))
    written = [f'"{name}":{_column(columns[name], digits)}' for name, digits in _DIGITS.items() if name in columns]
    # The texts are read much sooner without them; JavaScript counts in UTF-16.
    sizes = [len(piece.encode("utf-16-le", "surrogatepass")) // 2 for pieces in record.pieces for piece in pieces]
    lists = {"sizes": sizes, "ids": one.token_ids}
    written += [f'"{name}":{json.dumps(values, separators=(",", ":"))}' for name, values in lists.items()]
    return "{" + ",".join(written) + "}"


def _column(values: Iterable[float], digits: str) -> str:
    return "[" + ",".join(f"{value:{digits}}" if abs(value) < 1e300 else "null" for value in values) + "]"
