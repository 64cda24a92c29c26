"""Episodes on disk: one JSON object a line, in a Zstandard stream (``.jsonl.zst``) or plain (``.jsonl``).

Each line holds the whole trajectory, the text of each token, and the advantages where they are known.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
    evaluation: Mapping[str, object] = field(default_factory=dict[str, object])
    """What it was played with: weights, seed and settings; empty where no evaluation played it."""

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
    rows = (
        _to_json(trajectory, tokenizer, None if advantages is None else advantages[number]) | {"dialect": dialect}
        for number, trajectory in enumerate(trajectories)
    )
    data = b"".join(map(_line, rows))
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(zstandard.compress(data) if path.suffix == ".zst" else data)
    temporary.replace(path)


class EpisodeWriter:
    """Writes a file one episode at a time; each is in the file once it is added, and it may be the last.

    Args:
        path: ends in ``.jsonl.zst``, or in ``.jsonl`` for plain text.
        tokenizer: gives the text of each token.
        kept: lines that the file begins with, as ``read_begun`` gives them.
        about: what each line says beside the episode itself: ``dialect`` and ``evaluation``.
    """

    def __init__(self, path: Path, tokenizer: Pieces, kept: bytes, about: Mapping[str, object]) -> None:
        self._tokenizer, self._about = tokenizer, about
        self._packer = zstandard.ZstdCompressor().compressobj() if path.suffix == ".zst" else None
        temporary = path.with_name(f".{path.name}.tmp")
        self._stream = temporary.open("wb")
        self._write(kept)
        temporary.replace(path)

    def add(self, trajectory: Trajectory) -> None:
        """Write an episode."""
        self._write(_line({**_to_json(trajectory, self._tokenizer, None), **self._about}))

    def close(self) -> None:
        """End the file."""
        if self._packer:
            self._stream.write(self._packer.flush())
        self._stream.close()

    def _write(self, data: bytes) -> None:
        if self._packer:
            data = self._packer.compress(data) + self._packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        self._stream.write(data)
        self._stream.flush()


def read_begun(path: Path) -> tuple[bytes, list[Record]]:
    """The whole lines of a file that may have been cut off while it was written, and the records in them.

    Raises:
        TrajectoryError: the file holds something else; the message names it.
    """
    data = path.read_bytes() if path.exists() else b""
    try:
        if data and path.suffix == ".zst":
            data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        kept = data[: data.rfind(b"\n") + 1]
        return kept, [_from_json(json.loads(line.decode("utf-8"))) for line in kept.split(b"\n")[:-1]]
    except _UNREADABLE as error:
        raise TrajectoryError(f"{path} holds something else than episodes: {error!r}") from error


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


def _line(row: Mapping[str, object]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")


def _to_json(trajectory: Trajectory, tokenizer: Pieces, advantages: Sequence[float] | None) -> dict[str, object]:
    rest = None if advantages is None else list(advantages)
    segments: list[dict[str, object]] = []
    for segment in trajectory.segments:
        row: dict[str, object] = {"source": segment.source, "token_ids": segment.token_ids}
        row["pieces"] = [tokenizer.decode([token]) for token in segment.token_ids]
        if segment.trained:
            row |= {"logprobs": segment.logprobs, "version": segment.version} | ({"cut": True} if segment.cut else {})
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
            _typed(bool, one.get("cut", False)),
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
        evaluation=_typed(dict, row.get("evaluation", {})),
    )


def _tuple(values: list[float] | None) -> tuple[float, ...] | None:
    return None if values is None else tuple(values)


def _typed(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} where {kind.__name__} belongs")
    return value
