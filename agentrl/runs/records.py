"""Episodes on disk: one JSON object per line, in a Zstandard stream (``.jsonl.zst``) or plain (``.jsonl``).

Each line holds the whole trajectory, the text of each token, and what training made of it where that is known.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast

import zstandard

from agentrl.errors import TrajectoryError
from agentrl.runs.folder import replace
from agentrl.types import Message, Origin, Segment, Stop, ToolRun, Trajectory, won

SCHEMA = 3
EPISODES = "episodes.jsonl.zst"
"""The name of the episodes in an evaluation's folder."""
TRAINING: Mapping[str, str] = {
    "old_logp": "log-prob under the trainer's own policy before any update of the step, in nats",
    "entropy": "entropy of the distribution that it was sampled from, in nats",
    "log_ratio": "its log-prob at the update's first pass, less old_logp, in nats",
    "cumulative_log_ratio": "sum of the episode's log ratios up to this token, over all turns: S_t of CTPO",
    "clipped": "1 where the loss cut its gradient at that pass, else 0",
    "realized_energy": "W_t, the weight of the episode in its group's baseline here: OTB alone",
    "baseline": "B_t, what the reward-to-go is compared with: OTB alone",
}
"""What a segment's ``training`` may hold of each sampled token, to five significant digits, by name."""
_STEP = re.compile(r"(?:[A-Za-z_]+-)?(\d{1,15})\.jsonl(?:\.zst)?")
"""The name of a file in a run's folder of episodes, with its step."""
_SUFFIXES = (".jsonl", ".jsonl.zst")
_NO_EPISODES = ("metrics.jsonl", "evals.jsonl")
T = TypeVar("T")
_UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, RecursionError, zstandard.ZstdError)
"""Exceptions that reading a damaged or hostile line can raise."""
_ORIGIN: Mapping[str, type[Any]] = {
    **{"env_id": str, "env_args": dict, "split": str, "best_return": float, "dialect": str},
    **{"temperature": float, "turn_tokens": int, "versions": dict},
}
"""The type of each field of an episode's origin."""
_TOOL_RUN: Mapping[str, type[Any]] = {"name": str, "ok": bool, "wall_s": float, "arguments": dict}
"""The type of each field of a tool run."""


class Pieces(Protocol):
    """Decodes token ids one at a time, as a tokenizer can."""

    def decode(self, token_ids: int | list[int], **options: Any) -> Any:
        """Give the text of one token."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of an episodes file.

    Raises:
        TrajectoryError: the number of texts differs from that of tokens.
    """

    trajectory: Trajectory
    """The episode."""
    origin: Origin
    """Environment and sampling settings of the episode."""
    pieces: tuple[tuple[str, ...], ...]
    """The text of each token, per segment."""
    advantages: tuple[float, ...] | None = None
    """One advantage per sampled token, over all policy segments end to end [S]; None where there was no training."""
    training: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    """One number per sampled token, over all policy segments end to end [S], by a name of ``TRAINING``."""
    evaluation: Mapping[str, object] = field(default_factory=dict[str, object])
    """Weights, seed and settings of the evaluation that played it; empty where none did."""

    def __post_init__(self) -> None:
        if [len(texts) for texts in self.pieces] != [len(segment.token_ids) for segment in self.trajectory.segments]:
            raise TrajectoryError(f"episode of task {self.trajectory.task_id!r} has not one text per token")

    @property
    def won(self) -> bool:
        """True if the episode succeeded."""
        return won(self.trajectory, self.origin.best_return)

    @property
    def attempt(self) -> int | None:
        """Which attempt at its task it is in an evaluation; None elsewhere."""
        return self.trajectory.attempt


def write_episodes(
    path: Path,
    trajectories: Sequence[Trajectory],
    tokenizer: Pieces,
    origin: Origin | Mapping[str, Origin],
    advantages: Sequence[Sequence[float]] | None = None,
    training: Sequence[Mapping[str, Sequence[float]]] | None = None,
) -> None:
    """Write ``trajectories`` to ``path`` atomically.

    Args:
        path: ends in ``.jsonl.zst``, or in ``.jsonl`` for plain text.
        trajectories: the episodes, in order.
        tokenizer: gives the text of each token.
        origin: of all the episodes, or of each environment of a mix, by name.
        advantages: for each episode, one number per sampled token.
        training: for each episode, one number per sampled token by a name of ``TRAINING``.
    """
    rows = (
        _to_json(
            trajectory,
            tokenizer,
            _of(origin, trajectory),
            None if advantages is None else advantages[number],
            None if training is None else training[number],
        )
        for number, trajectory in enumerate(trajectories)
    )
    data = b"".join(map(_line, rows))
    replace(path, zstandard.compress(data) if path.suffix == ".zst" else data)


class EpisodeWriter:
    """Writes a file one episode at a time; an added episode is readable even if the process is killed next.

    Args:
        path: ends in ``.jsonl.zst``, or in ``.jsonl`` for plain text.
        tokenizer: gives the text of each token.
        kept: lines to begin the file with, as ``read_begun`` gives them.
        origin: of all the episodes, or of each environment of a mix, by name.
        evaluation: weights, seed and settings of the evaluation that plays them.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Pieces,
        kept: bytes,
        origin: Origin | Mapping[str, Origin],
        evaluation: Mapping[str, object],
    ) -> None:
        self._tokenizer, self._origin, self._evaluation = tokenizer, origin, evaluation
        self._packer = zstandard.ZstdCompressor().compressobj() if path.suffix == ".zst" else None
        # A stream that was cut off can't be appended to, so it is begun anew; the old file stays until the new one has
        # all of its lines.
        temporary = path.with_name(f".{path.name}.tmp")
        self._stream = temporary.open("wb")
        self._write(kept)
        temporary.replace(path)

    def add(self, trajectory: Trajectory) -> None:
        """Write an episode."""
        row = _to_json(trajectory, self._tokenizer, _of(self._origin, trajectory))
        self._write(_line({**row, "evaluation": self._evaluation}))

    def close(self) -> None:
        """End the file."""
        if self._packer:
            self._stream.write(self._packer.flush())
        self._stream.close()

    def _write(self, data: bytes) -> None:
        # A flushed block can be decompressed although the stream has no end yet.
        if self._packer:
            data = self._packer.compress(data) + self._packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        self._stream.write(data)
        self._stream.flush()


def read_begun(path: Path) -> tuple[bytes, list[Record]]:
    """Read the complete lines of a file that may be cut off, and parse the records in them.

    Raises:
        TrajectoryError: the file holds anything else; the message names it.
    """
    data = path.read_bytes() if path.exists() else b""
    try:
        # Unlike decompress(), a decompressobj gives what is there of a stream that was cut off.
        if data and path.suffix == ".zst":
            data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        kept = data[: data.rfind(b"\n") + 1]
        return kept, [_from_json(json.loads(line.decode("utf-8"))) for line in kept.split(b"\n")[:-1]]
    except _UNREADABLE as error:
        raise TrajectoryError(f"{path} holds something else than episodes: {error!r}") from error


def step_files(run: Path) -> list[tuple[int, Path]]:
    """List the files of episodes in a run's folder, each with its step, in order of steps."""
    folder = run / "episodes"
    matches = ((_STEP.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ()))
    return sorted((int(match[1]), path) for match, path in matches if match)


def episode_files(path: Path) -> list[Path]:
    """List the files of episodes that ``path`` stands for: itself, a run's last step, or all that lie in a folder."""
    if not path.is_dir():
        return [path]
    if (path / "episodes").is_dir():
        return [file for _, file in step_files(path)[-1:]]
    files = (file for file in sorted(path.iterdir()) if file.is_file() and not file.name.startswith("."))
    return [file for file in files if file.name.endswith(_SUFFIXES) and file.name not in _NO_EPISODES]


def count_episodes(path: Path) -> int:
    """Count the lines of a file of episodes, as far as it can be read: much sooner than they can be parsed."""
    count = 0
    with suppress(OSError, *_UNREADABLE), path.open("rb") as raw:
        for chunk in _unpacked(raw) if path.suffix == ".zst" else iter(partial(raw.read, 1 << 20), b""):
            count += chunk.count(b"\n")
    return count


def read_episodes(path: str | Path) -> Iterator[Record]:
    """Iterate over the records of an episodes file, or of an evaluation's folder.

    Raises:
        TrajectoryError: a line is not an episode of a schema that this version reads, or the stream is damaged or cut
            off; the message names the line.
    """
    path = Path(path) / EPISODES if Path(path).is_dir() else Path(path)
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
    # A text may hold lone surrogates, which UTF-8 can't encode.
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")


def _of(origin: Origin | Mapping[str, Origin], trajectory: Trajectory) -> Origin:
    return origin if isinstance(origin, Origin) else origin[trajectory.env]


def _to_json(
    trajectory: Trajectory,
    tokenizer: Pieces,
    origin: Origin,
    advantages: Sequence[float] | None = None,
    training: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, object]:
    done = 0
    segments: list[dict[str, object]] = []
    for segment in trajectory.segments:
        row: dict[str, object] = {"source": segment.source, "token_ids": segment.token_ids}
        row["pieces"] = [tokenizer.decode([token]) for token in segment.token_ids]
        if segment.trained:
            row |= {"logprobs": segment.logprobs, "version": segment.version} | ({"cut": True} if segment.cut else {})
            row |= {"swaps": segment.swaps} if segment.swaps else {}
            mine = slice(done, done := done + len(segment.token_ids))
            row |= {} if advantages is None else {"advantages": advantages[mine]}
            # More digits would say nothing and treble the file.
            told = {
                name: [float(f"{value:.5g}") for value in values[mine]] for name, values in (training or {}).items()
            }
            row |= {"training": told} if told else {}
        segments.append(row)
    return {
        "schema": SCHEMA,
        "origin": asdict(origin),
        **({"env": trajectory.env} if trajectory.env else {}),
        "task_id": trajectory.task_id,
        "attempt": trajectory.attempt,
        "tags": trajectory.tags,
        "seed": trajectory.seed,
        "stop": trajectory.stop.value,
        "return": trajectory.ret,
        "success": won(trajectory, origin.best_return),
        "answer": trajectory.answer,
        "usage": trajectory.usage,
        "rewards": trajectory.rewards,
        "parts": dict(trajectory.parts),
        "tool_runs": [asdict(run) for run in trajectory.tool_runs],
        "messages": trajectory.messages,
        "segments": segments,
    }


def _from_json(row: dict[str, Any]) -> Record:
    if row["schema"] != SCHEMA:
        raise ValueError(f"it has schema {row['schema']!r} and this version reads {SCHEMA}: play it again with it")
    segments = [
        Segment(
            one["source"],
            tuple(_typed(int, token) for token in one["token_ids"]),
            one.get("logprobs"),
            one.get("version"),
            _typed(bool, one.get("cut", False)),
            tuple((_typed(int, start), _typed(int, version)) for start, version in one.get("swaps", ())),
        )
        for one in row["segments"]
    ]
    advantages = [float(a) for one in row["segments"] for a in one.get("advantages", ())]
    told = [_typed(dict, one.get("training", {})) for one in row["segments"]]
    training = {name: tuple(_finite(value) for one in told for value in one.get(name, ())) for name in TRAINING}
    trajectory = Trajectory(
        task_id=_typed(str, row["task_id"]),
        seed=_typed(int, row["seed"]),
        segments=tuple(segments),
        rewards=tuple(row["rewards"]),
        stop=Stop(row["stop"]),
        messages=tuple(_message(one) for one in row["messages"]),
        parts=_typed(dict, row["parts"]),
        tool_runs=tuple(ToolRun(**_fields(_TOOL_RUN, run)) for run in row["tool_runs"]),
        env=_typed(str, row.get("env", "")),
        attempt=_optional(int, row.get("attempt")),
        tags=tuple(_typed(str, tag) for tag in row.get("tags", ())),
        answer=_optional(str, row.get("answer")),
        usage=_usage(row.get("usage")),
    )
    # What is told of tokens is known for all sampled ones or for none: a file that has some is read as having none.
    known = len(advantages) == trajectory.n_sampled > 0
    return Record(
        trajectory=trajectory,
        origin=Origin(**_fields(_ORIGIN, row["origin"])),
        pieces=tuple(tuple(_typed(str, piece) for piece in one["pieces"]) for one in row["segments"]),
        advantages=tuple(advantages) if known else None,
        training={name: values for name, values in training.items() if len(values) == trajectory.n_sampled > 0},
        evaluation=_typed(dict, row.get("evaluation", {})),
    )


def _fields(kinds: Mapping[str, type[Any]], row: dict[str, Any]) -> dict[str, Any]:
    if unknown := _typed(dict, row).keys() - kinds.keys():
        raise ValueError(f"there is no field {min(unknown)!r}")
    return {name: _typed(kind, row[name]) for name, kind in kinds.items()}


def _message(row: dict[str, Any]) -> Message:
    for text in ("role", "content", *(_typed(dict, row).keys() & {"name", "tool_call_id"})):
        _typed(str, row[text])
    return cast(Message, row)


def _usage(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    read, wrote = _typed(list, value)
    return _typed(int, read), _typed(int, wrote)


def _optional(kind: type[T], value: object) -> T | None:
    return None if value is None else _typed(kind, value)


def _finite(value: object) -> float:
    number = float(_typed(int if isinstance(value, int) else float, value))
    if not math.isfinite(number):
        raise ValueError(f"{number} where a finite number belongs")
    return number


def _typed(kind: type[T], value: object) -> T:
    # Refused here and not where it is used: the file may come from anyone.
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} where {kind.__name__} belongs")
    return value
