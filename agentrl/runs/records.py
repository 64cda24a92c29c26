"""Episodes on disk: one JSON object per line, in a Zstandard stream (``.jsonl.zst``) or plain (``.jsonl``).

Each line holds a complete trajectory, the text of each token, and advantages and other numbers of training if any.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Protocol

import zstandard
from pydantic import AfterValidator, FiniteFloat, TypeAdapter, ValidationError

from agentrl.errors import TrajectoryError
from agentrl.runs.files import NewFile, is_file, is_folder, open_file, replace
from agentrl.segments import turn_order, turn_positions
from agentrl.types import Origin, Trajectory, won

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
_LONGEST = 256 << 20
"""Bytes of a line; an episode of 128k tokens with all numbers of training has some 20 MiB."""
_FREE, _RATIO = 64 << 20, 1000
"""Bytes to which any file may be unpacked, and how many times its size a larger one may be. Equal episodes
shrink some hundred times."""
_UNREADABLE = (ValueError, RecursionError, zstandard.ZstdError)
"""Exceptions that reading a damaged or hostile line can raise."""


class Pieces(Protocol):
    """Decodes token ids one at a time, as a tokenizer can."""

    def decode(self, token_ids: int | list[int], **options: Any) -> Any:
        """Return the text of one token."""
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
    """The text of each token, for each segment of ``trajectory.segments``."""
    advantages: tuple[float, ...] | None = None
    """One advantage per sampled token, turn after turn in time [S]; None where there was no training."""
    training: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    """One number per sampled token, turn after turn in time [S], by a name of ``TRAINING``."""
    evaluation: Mapping[str, object] = field(default_factory=dict[str, object])
    """Weights, seed and settings of the evaluation that played it; empty where none did."""

    def __post_init__(self) -> None:
        if [len(texts) for texts in self.pieces] != [len(segment.token_ids) for segment in self.trajectory.segments]:
            raise TrajectoryError(f"episode of task {self.trajectory.task_id!r} has not one text per token")

    @property
    def won(self) -> bool:
        """True if the episode succeeded."""
        return won(self.trajectory, self.origin.best_return)


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
    nothing = [None] * len(trajectories)
    episodes = zip(trajectories, advantages or nothing, training or nothing, strict=True)
    rows = (_to_json(episode, tokenizer, _of(origin, episode), a, numbers) for episode, a, numbers in episodes)
    data = b"".join(map(_line, rows))
    replace(path, zstandard.compress(data) if path.suffix == ".zst" else data)


class EpisodeWriter:
    """Writes a file one episode at a time; an added episode is readable even if the process is killed next.

    Args:
        path: ends in ``.jsonl.zst``, or in ``.jsonl`` for plain text.
        tokenizer: gives the text of each token.
        lines: lines to begin the file with, a result of ``read_begun``.
        origin: of all the episodes, or of each environment of a mix, by name.
        evaluation: weights, seed and settings of the evaluation that plays them.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Pieces,
        lines: bytes,
        origin: Origin | Mapping[str, Origin],
        evaluation: Mapping[str, object],
    ) -> None:
        self._tokenizer, self._origin, self._evaluation = tokenizer, origin, evaluation
        # A stream that was cut off can't be appended to, so a new one is written. The old file stays until the new one
        # has all of its lines.
        new = NewFile(path)
        plain = new.stream
        try:
            self._stream = zstandard.ZstdCompressor().stream_writer(plain) if path.suffix == ".zst" else plain
            self._write(lines)
            new.commit()
        except BaseException:
            new.discard()
            raise

    def add(self, trajectory: Trajectory) -> None:
        """Write an episode."""
        row = _to_json(trajectory, self._tokenizer, _of(self._origin, trajectory))
        self._write(_line({**row, "evaluation": self._evaluation}))

    def close(self) -> None:
        """End the file."""
        self._stream.close()

    def _write(self, data: bytes) -> None:
        # A flushed block can be decompressed although the stream has no end yet.
        self._stream.write(data)
        self._stream.flush()


def read_begun(path: Path) -> tuple[bytes, list[Record]]:
    """Read the complete lines of a file that may be cut off, and parse the records in them.

    Raises:
        TrajectoryError: the file holds anything else; the message names it.
    """
    try:
        with open_file(path) as raw:
            data = b"".join(_chunks(path, raw, complete=False))
        lines = data[: data.rfind(b"\n") + 1]
        return lines, [_parsed(line) for line in lines.split(b"\n")[:-1]]
    except FileNotFoundError:
        return b"", []
    except OSError as error:
        raise TrajectoryError(f"{path} can't be read: {error.strerror}") from error
    except _UNREADABLE as error:
        raise TrajectoryError(f"{path} holds something else than episodes: {_reason(error)}") from error


def step_files(run: Path) -> list[tuple[int, Path]]:
    """List the files of episodes in a run's folder, each with its step, in order of steps."""
    folder = run / "episodes"
    matches = ((_STEP.fullmatch(path.name), path) for path in (folder.iterdir() if is_folder(folder) else ()))
    return sorted((int(match[1]), path) for match, path in matches if match)


def episode_files(path: Path) -> list[Path]:
    """List the files of episodes that ``path`` stands for: itself, a run's last step, or all that lie in a folder."""
    if not path.is_dir():
        return [path]
    if is_folder(path / "episodes"):
        return [file for _, file in step_files(path)[-1:]]
    files = (file for file in sorted(path.iterdir()) if is_file(file) and not file.name.startswith("."))
    return [file for file in files if file.name.endswith(_SUFFIXES) and file.name not in _NO_EPISODES]


def read_episodes(path: str | Path) -> Iterator[Record]:
    """Iterate over the records of an episodes file, or of an evaluation's folder.

    Raises:
        TrajectoryError: a line is not an episode of a schema that this version reads, and the message names the line.
            Or the stream is damaged or cut off, or the file is a link or no regular file.
        FileNotFoundError: there is no such file.
    """
    path = Path(path) / EPISODES if Path(path).is_dir() else Path(path)
    number = 1
    try:
        with open_file(path) as raw:
            for line in _lines(_chunks(path, raw)):
                yield _parsed(line)
                number += 1
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TrajectoryError(f"{path} can't be read: {error.strerror}") from error
    except _UNREADABLE as error:
        raise TrajectoryError(f"line {number} of {path} is no episode: {_reason(error)}") from error


def _chunks(path: Path, raw: BinaryIO, *, complete: bool = True) -> Iterator[bytes]:
    return _unpacked(raw, complete=complete) if path.suffix == ".zst" else iter(partial(raw.read, 1 << 20), b"")


def _unpacked(raw: BinaryIO, *, complete: bool) -> Iterator[bytes]:
    # Unlike decompress(), a decompressobj returns the readable part of a stream that was cut off.
    stream, packed, unpacked = zstandard.ZstdDecompressor().decompressobj(), 0, 0
    # Little at a time: in a file that was made to use up the memory, each byte may unpack to 32 thousand.
    while chunk := raw.read(1 << 12):
        yield (data := stream.decompress(chunk))
        packed, unpacked = packed + len(chunk), unpacked + len(data)
        if unpacked > max(_FREE, packed * _RATIO):
            raise ValueError(f"it is packed {_RATIO} times, which no episodes are")
    if complete and not stream.eof:
        raise ValueError("the stream was cut off")


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    begun, size = list[bytes](), 0
    for chunk in chunks:
        head, *rest = chunk.split(b"\n")
        begun.append(head)
        size += len(head)
        if rest:
            yield b"".join(begun)
            yield from rest[:-1]
            begun, size = rest[-1:], len(rest[-1])
        if size > _LONGEST:
            raise ValueError(f"it is longer than {_LONGEST >> 20} MiB")
    if size:
        yield b"".join(begun)


def _line(row: Mapping[str, object]) -> bytes:
    # A text may hold lone surrogates, which UTF-8 can't encode.
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")


def _of(origin: Origin | Mapping[str, Origin], trajectory: Trajectory) -> Origin:
    return origin if isinstance(origin, Origin) else origin[trajectory.env]


@lru_cache(maxsize=1 << 16)
def _piece(tokenizer: Pieces, token: int) -> str:
    return tokenizer.decode([token])


def _to_json(
    trajectory: Trajectory,
    tokenizer: Pieces,
    origin: Origin,
    advantages: Sequence[float] | None = None,
    training: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, object]:
    turns, segments = iter(turn_positions(trajectory.segments)), list[dict[str, object]]()
    for segment in trajectory.segments:
        row: dict[str, object] = {"source": segment.source, "token_ids": segment.token_ids}
        row["pieces"] = [_piece(tokenizer, token) for token in segment.token_ids]
        if segment.trained:
            row |= {"logprobs": segment.logprobs, "version": segment.version} | ({"cut": True} if segment.cut else {})
            row |= {"swaps": segment.swaps} if segment.swaps else {}
            row |= {} if segment.turn is None else {"turn": segment.turn}
            _, positions = next(turns)
            mine = slice(positions.start, positions.stop)
            row |= {} if advantages is None else {"advantages": advantages[mine]}
            # More digits would be noise and treble the file.
            numbers = {
                name: [float(f"{value:.5g}") for value in values[mine]] for name, values in (training or {}).items()
            }
            row |= {"training": numbers} if numbers else {}
        segments.append(row)
    rows, of_row = list[dict[str, object]](), iter(segments)
    for own in trajectory.rows:
        rows.append({"parent": own.parent, "fork": own.fork, "segments": list(islice(of_row, len(own.segments)))})
    return {
        "schema": SCHEMA,
        "origin": asdict(origin),
        **_TRAJECTORY.dump_python(trajectory, exclude={"segments", "rows"}, warnings=False),
        "return": trajectory.ret,
        "success": won(trajectory, origin.best_return),
        **({"segments": segments} if len(rows) == 1 else {"rows": rows}),
    }


def _this_schema(schema: int) -> int:
    if schema != SCHEMA:
        raise ValueError(f"it has schema {schema!r} and this version reads {SCHEMA}: play it again with it")
    return schema


@dataclass(frozen=True, slots=True, kw_only=True)
class _SegmentRow:
    """The fields of a segment's row that are not of the segment itself."""

    pieces: tuple[str, ...]
    advantages: tuple[float, ...] = ()
    training: Mapping[str, tuple[FiniteFloat, ...]] = field(default_factory=dict[str, tuple[float, ...]])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segments:
    """The segments of a row of tokens."""

    segments: tuple[_SegmentRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The fields of a line that are not of the trajectory."""

    schema: Annotated[int, AfterValidator(_this_schema)]
    origin: Origin
    segments: tuple[_SegmentRow, ...] = ()
    """Those of an episode of one row."""
    rows: tuple[_Segments, ...] = ()
    """The rows of an episode that has several."""
    evaluation: Mapping[str, object] = field(default_factory=dict[str, object])


_LINE, _TRAJECTORY = TypeAdapter(_Line), TypeAdapter(Trajectory)


def _parsed(line: bytes) -> Record:
    # Strictly, so that a hostile or damaged line is refused here and not where it is used.
    read, trajectory = _LINE.validate_json(line, strict=True), _TRAJECTORY.validate_json(line, strict=True)
    segments = [*read.segments, *(segment for row in read.rows for segment in row.segments)]
    pairs = zip(segments, trajectory.segments, strict=True)
    sampled = [segment for segment, its_tokens in pairs if its_tokens.trained]
    in_time = [sampled[turn] for turn in turn_order(trajectory.segments)]
    training = {name: tuple(x for part in in_time for x in part.training.get(name, ())) for name in TRAINING}
    advantages = tuple(advantage for part in in_time for advantage in part.advantages)
    # A number is recorded for all sampled tokens or for none: where some lack it, it is dropped.
    count = trajectory.n_sampled
    return Record(
        trajectory=trajectory,
        origin=read.origin,
        pieces=tuple(part.pieces for part in segments),
        advantages=advantages if len(advantages) == count > 0 else None,
        training={name: values for name, values in training.items() if len(values) == count > 0},
        evaluation=read.evaluation,
    )


def _reason(error: Exception) -> str:
    """Return in one line why a line was refused."""
    if isinstance(error, ValidationError):
        fault = error.errors(include_url=False)[0]
        return ": ".join(filter(None, (".".join(map(str, fault["loc"])), fault["msg"])))
    return repr(error)
