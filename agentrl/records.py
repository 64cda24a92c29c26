"""Episodes on disk: one JSON object a line, in a Zstandard stream (``.jsonl.zst``) or plain (``.jsonl``).

Each line holds the whole trajectory, the text of each token, and the advantages where they are known.
"""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import zstandard

from agentrl.errors import TrajectoryError
from agentrl.types import Segment, Stop, ToolRun, Trajectory

SCHEMA = 1
T = TypeVar("T")
_UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, RecursionError, zstandard.ZstdError)
"""What a damaged or hostile line can raise while it is read."""


class Pieces(Protocol):
    """What turns token ids into the text of each; a tokenizer can."""

    def decode(self, token_ids: int | list[int], **options: Any) -> Any:
        """The text of one token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of an episodes file.

    Raises:
        TrajectoryError: there is not one text per token.
    """

    trajectory: Trajectory
    """The episode."""
    pieces: tuple[tuple[str, ...], ...]
    """The text of each token, per segment."""
    advantages: tuple[float, ...] | None = None
    """One advantage per sampled token, over all policy segments end to end [S]; None where there was no training."""
    dialect: str = ""
    """Name and hash of the dialect that the episode was played in; empty where it is not recorded."""

    def __post_init__(self) -> None:
        if [len(texts) for texts in self.pieces] != [len(segment.token_ids) for segment in self.trajectory.segments]:
            raise TrajectoryError(f"episode of task {self.trajectory.task_id!r} has not one text per token")


def write_episodes(
    path: Path,
    trajectories: Sequence[Trajectory],
    tokenizer: Pieces,
    advantages: Sequence[Sequence[float]] | None = None,
    *,
    dialect: str = "",
) -> None:
    """Write ``trajectories`` to ``path``, all or nothing.

    Args:
        path: ends in ``.jsonl.zst``, or in ``.jsonl`` for plain text.
        trajectories: the episodes, in order.
        tokenizer: gives the text of each token.
        advantages: for each episode, one number per sampled token.
        dialect: name and hash of the dialect that the episodes were played in.
    """
    lines = io.StringIO()
    for number, trajectory in enumerate(trajectories):
        row = _to_json(trajectory, tokenizer, None if advantages is None else advantages[number])
        row["dialect"] = dialect
        lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    data = lines.getvalue().encode("utf-8", errors="replace")
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(zstandard.compress(data) if path.suffix == ".zst" else data)
    temporary.replace(path)


def read_episodes(path: Path) -> Iterator[Record]:
    """The records of an episodes file, one at a time.

    Raises:
        TrajectoryError: a line is not an episode of a schema that this version reads, or the stream is damaged or cut
            off; the message names the line.
    """
    number = 1
    try:
        with path.open("rb") as raw:
            for line in _lines(_unpacked(raw) if path.suffix == ".zst" else raw):
                yield _from_json(json.loads(line.decode("utf-8")))
                number += 1
    except _UNREADABLE as error:
        raise TrajectoryError(f"line {number} of {path} is no episode: {error!r}") from error


def _unpacked(raw: BinaryIO) -> Iterator[bytes]:
    stream = zstandard.ZstdDecompressor().decompressobj()
    while chunk := raw.read(1 << 16):
        yield stream.decompress(chunk)
    if not stream.eof:
        raise ValueError("the stream was cut off")


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _to_json(trajectory: Trajectory, tokenizer: Pieces, advantages: Sequence[float] | None) -> dict[str, object]:
    rest = None if advantages is None else list(advantages)
    segments: list[dict[str, object]] = []
    for segment in trajectory.segments:
        row: dict[str, object] = {"source": segment.source, "token_ids": segment.token_ids}
        row["pieces"] = [tokenizer.decode([token]) for token in segment.token_ids]
        if segment.trained:
            row |= {"logprobs": segment.logprobs, "version": segment.version}
            if rest is not None:
                row["advantages"], rest = rest[: len(segment.token_ids)], rest[len(segment.token_ids) :]
        segments.append(row)
    return {
        "schema": SCHEMA,
        "task_id": trajectory.task_id,
        "seed": trajectory.seed,
        "stop": trajectory.stop.value,
        "return": trajectory.ret,
        "rewards": trajectory.rewards,
        "parts": dict(trajectory.parts),
        "tool_runs": [asdict(run) for run in trajectory.tool_runs],
        "messages": trajectory.messages,
        "segments": segments,
    }


def _from_json(row: dict[str, Any]) -> Record:
    if row["schema"] != SCHEMA:
        raise ValueError(f"schema {row['schema']!r}, expected {SCHEMA}")
    segments = [
        Segment(
            one["source"],
            tuple(_typed(int, token) for token in one["token_ids"]),
            _tuple(one.get("logprobs")),
            one.get("version"),
        )
        for one in row["segments"]
    ]
    advantages = [float(a) for one in row["segments"] for a in one.get("advantages", ())]
    trajectory = Trajectory(
        task_id=_typed(str, row["task_id"]),
        seed=_typed(int, row["seed"]),
        segments=tuple(segments),
        rewards=tuple(row["rewards"]),
        stop=Stop(row["stop"]),
        messages=tuple(row["messages"]),
        parts=_typed(dict, row["parts"]),
        tool_runs=tuple(ToolRun(**run) for run in row["tool_runs"]),
    )
    known = len(advantages) == trajectory.n_sampled > 0
    return Record(
        trajectory=trajectory,
        pieces=tuple(tuple(_typed(str, piece) for piece in one["pieces"]) for one in row["segments"]),
        advantages=tuple(advantages) if known else None,
        dialect=_typed(str, row.get("dialect", "")),
    )


def _tuple(values: list[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(values)


def _typed(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} where {kind.__name__} belongs")
    return value
