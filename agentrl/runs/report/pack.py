"""Pack episodes for a page: a row each for the list, and two blocks each, which the browser opens when it shows them.

A block is JSON, deflated, in base64. One holds the texts, which a search reads; the other one holds the numbers.
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
from agentrl.runs.folder import number
from agentrl.runs.records import Record, read_episodes
from agentrl.segments import turn_positions
from agentrl.types import Stop, Trajectory

_STOPS = {
    Stop.TERMINATED: "the environment ended it: a final answer was given",
    Stop.TURN_LIMIT: "cut off: all turns were used up",
    Stop.TOKEN_LIMIT: "cut off: the token budget was used up",
    Stop.TURN_CUT: "cut off: the last turn ran into its limit of tokens",
    Stop.TIME_LIMIT: "cut off: the agent's time was used up",
    Stop.CRASHED: "the agent's program failed",
}
_DIGITS: Mapping[str, str] = {
    **{"logp": ".4g", "entropy": ".3g", "advantage": ".4g", "log_ratio": ".5f", "cumulative_log_ratio": ".5f"},
    **{"clipped": ".0f", "realized_energy": ".4g", "baseline": ".4g", "mismatch": ".4f"},
}
"""Format of each number of a token. Fixed digits turn noise around 0 into equal texts, which compress to nothing."""


@dataclass(slots=True, kw_only=True)
class Packed:
    """The episodes of a page."""

    rows: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    """The fields that the list shows and filters by, one row an episode."""
    blocks: list[str] = field(default_factory=list[str])
    """The elements that hold them: ``text-0``, ``numbers-0``, ``text-1`` …"""
    notes: list[str] = field(default_factory=list[str])
    """Files that could not be read, a sentence each."""

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
            source: index of the page's source that they belong to.
            files: each with its name in the list.
            limit: most episodes of each file.
            strict: raise an error where a file can't be read, instead of adding a note.
            added: called after each file.

        Raises:
            TrajectoryError: a file holds something else than episodes, or can't be read.
        """
        for index, (label, path) in enumerate(files):
            try:
                for record in islice(read_episodes(path), limit):
                    self._add(record, {"source": source, "file": index, "step": label})
            except (OSError, TrajectoryError) as error:
                if strict:
                    raise TrajectoryError(f"{path} can't be read to its end: {error}") from error
                self.notes.append(f"{path.parent.name}/{path.name} can't be read to its end: {error!r}")
            added()

    def pair(self) -> None:
        """Pair the episodes of two sources by task and attempt, or without attempts by their order in the file."""
        seen = Counter[tuple[object, ...]]()
        partners: dict[tuple[object, ...], int] = {}
        for index, row in enumerate(self.rows):
            task = row["file"], row["env"], row["task"]
            attempt = row["attempt"] if row["attempt"] is not None else seen[row["source"], *task]
            seen[row["source"], *task] += 1
            other = partners.setdefault((*task, attempt), index)
            if self.rows[other]["source"] != row["source"]:
                self.rows[other]["pair"], row["pair"] = index, other

    def _add(self, record: Record, row: dict[str, object]) -> None:
        episode, number = record.trajectory, len(self.rows)
        # The seed as text: JavaScript rounds integers beyond 2^53.
        row |= {"env": episode.env, "task": episode.task_id, "seed": str(episode.seed), "attempt": episode.attempt}
        row |= {"tags": episode.tags, "won": record.won, "return": episode.ret, "turns": len(episode.sampled)}
        row |= {"errors": sum(not run.ok for run in episode.tool_runs)}
        row |= {"cut": episode.cut_turns or episode.stop.truncated, "stop": episode.stop.value, "why": why(episode)}
        self.rows.append(row | {"sampled": episode.n_sampled, "tokens": len(episode.token_ids)})
        self.blocks += [block(f"text-{number}", _texts(record)), block(f"numbers-{number}", _numbers(record))]


def why(trajectory: Trajectory) -> str:
    """Return in words why an episode ended."""
    if trajectory.stop is Stop.TERMINATED and trajectory.sampled and trajectory.sampled[-1].cut:
        return "the environment ended it: a turn that was cut off was taken as the final answer"
    return _STOPS[trajectory.stop]


def block(name: str, content: object) -> str:
    """Return an element that the browser neither shows nor runs; no character of base64 could end it."""
    text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"))
    packed = base64.b64encode(zlib.compress(text.encode("ascii"))).decode("ascii")
    return f'<script type="text/plain" id="{name}">{packed}</script>\n'


def _texts(record: Record) -> Mapping[str, object]:
    episode, all_pieces = record.trajectory, iter(record.pieces)
    turns, rows = iter(turn_positions(episode.segments)), list[Mapping[str, object]]()
    for row in episode.rows:
        segments: list[Mapping[str, object]] = []
        for segment, pieces in zip(row.segments, all_pieces, strict=False):
            held: dict[str, object] = {"source": segment.source, "text": "".join(pieces), "count": len(pieces)}
            if segment.trained:
                turn, positions = next(turns)
                held |= {"turn": turn, "sampled": positions.start, "reward": episode.rewards[turn]}
                held |= {"version": segment.version, "swaps": segment.swaps, "cut": segment.cut}
            segments.append(held)
        rows.append({"parent": row.parent, "fork": row.fork, "segments": segments})
    tools = [(run.name, bool(run.ok), number(run.wall_s), _as_texts(run.arguments)) for run in episode.tool_runs]
    answers = {"expected": episode.expected, "answer": episode.answer}
    return {"rows": rows, "tools": tools, "parts": dict(episode.parts), **answers}


def _as_texts(arguments: Mapping[str, object]) -> Mapping[str, str]:
    # JavaScript reads neither NaN nor infinities.
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}


def _numbers(record: Record) -> str:
    """Return JSON, written by hand: ``json`` would write several times as many digits as are shown."""
    logp = [value for segment in record.trajectory.sampled for value in segment.logprobs or ()]
    columns: dict[str, Iterable[float]] = {"logp": logp, **record.training}
    if record.advantages is not None:
        columns["advantage"] = record.advantages
    if old := record.training.get("old_logp"):
        columns["mismatch"] = (a - b for a, b in zip(old, logp, strict=True))
    written = [f'"{name}":{_column(columns[name], digits)}' for name, digits in _DIGITS.items() if name in columns]
    # Sizes of tokens are here since texts without them are read much faster. JavaScript counts in UTF-16.
    sizes = [len(piece.encode("utf-16-le", "surrogatepass")) // 2 for pieces in record.pieces for piece in pieces]
    lists = {"sizes": sizes, "ids": record.trajectory.token_ids}
    written += [f'"{name}":{json.dumps(values, separators=(",", ":"))}' for name, values in lists.items()]
    return "{" + ",".join(written) + "}"


def _column(values: Iterable[float], digits: str) -> str:
    return "[" + ",".join(f"{value:{digits}}" if abs(value) < 1e300 else "null" for value in values) + "]"
