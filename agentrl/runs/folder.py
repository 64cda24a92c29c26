"""The run folder: created once, locked while in use, never overwritten."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from agentrl.config import Config, with_overrides
from agentrl.errors import ConfigError, InfrastructureError, RunFolderError, UsageError
from agentrl.runs.files import MAX_ROWS, delete_unfinished, is_folder, lock_folder, open_to_append, read
from agentrl.runs.settings import MAY_CHANGE, kept_settings, read_config, write_config

_RECORDS = ("metrics.jsonl", "evals.jsonl")
_LARGEST = 1e200
"""Larger numbers of a file count as infinite: their sums overflow, and integers may fit no float."""
_LAST_STEP = 1e12
"""A larger step is damage; far beyond it, neighbouring steps are the same float."""


class RunFolder(AbstractContextManager["RunFolder"]):
    """One run's folder, locked for this process until closed.

    Use :meth:`create` or :meth:`resume`.
    """

    def __init__(self, path: Path, lock: IO[bytes], *, new: bool = False) -> None:
        self.path = path
        self._lock, self._new = lock, new

    @classmethod
    def create(
        cls, config: Config, *, numbered: bool, made_by: Mapping[str, str] = MappingProxyType({})
    ) -> "RunFolder":
        """Create the folder of a new run and write its config.

        Args:
            config: names the run.
            numbered: if the name is taken, use the next free ``name-2``, ``name-3`` …
            made_by: as of :func:`agentrl.runs.settings.write_config`.

        Raises:
            RunFolderError: the folder exists or can't be written.
        """
        path = Path(config.run.dir) / config.run.name
        number = 1
        try:
            while numbered and path.exists():
                number += 1
                path = Path(config.run.dir) / f"{config.run.name}-{number}"
            # mkdir refuses a folder that exists, so of two runs that start at once only one gets the name.
            path.mkdir(parents=True, exist_ok=_holds_nothing(path))
            lock = lock_folder(path)
            write_config(path, config, made_by)
            (path / "episodes").mkdir()
        except FileExistsError as error:
            raise _taken(path) from error
        except OSError as error:
            raise RunFolderError(f"the run folder {str(path)!r} can't be made: {error.strerror}") from error
        return cls(path, lock, new=True)

    @classmethod
    def resume(cls, path: Path) -> tuple["RunFolder", Config]:
        """Open the folder of a run that ended or was stopped.

        Raises:
            RunFolderError: there is no run at ``path``, or another process is using it.
        """
        config = read_config(path)
        for name in ("episodes", "checkpoints"):
            if (path / name).is_symlink():
                raise RunFolderError(f"{path / name} is a link: put the folder itself in its place")
        lock = lock_folder(path)
        delete_unfinished(path / "episodes")
        return cls(path, lock), config

    def append(self, file: str, row: Mapping[str, object]) -> None:
        """Append a line to a JSONL file: all of it, which is on disk when this returns, or nothing.

        Raises:
            OSError: the line can't be written.
        """
        # Unbuffered: after a failed write, a buffer would be written when the stream is closed.
        with open_to_append(self.path / file) as stream:
            size, rest = stream.tell(), memoryview(json.dumps(row).encode() + b"\n")
            try:
                while rest:
                    rest = rest[stream.write(rest) :]
                os.fsync(stream.fileno())
            except OSError:
                stream.truncate(size)
                raise

    @contextmanager
    def writing(self) -> Generator[None]:
        """Turn a failed write into an error that names the disk.

        Raises:
            InfrastructureError: a write failed.
        """
        try:
            yield
        except Exception as error:
            if not (reason := _failed_write(error)):
                raise
            path = self.path.resolve()
            disk = next(folder for folder in (path, *path.parents) if folder.is_mount())
            room = f"{shutil.disk_usage(disk).free / 1e6:.1f} MB left"
            raise InfrastructureError(f"the disk at {disk}, with {room}, refuses a write ({reason})") from error

    def seal(self) -> dict[str, tuple[int, str]]:
        """Return length and checksum of each JSONL file as it is; a checkpoint stores them for :meth:`rows_until`."""
        return {file: _sealed(_bytes(self.path / file)) for file in _RECORDS}

    def rows_until(self, step: int, sealed: Mapping[str, Sequence[Any]]) -> dict[str, bytes]:
        """Select the rows of each JSONL file up to ``step``: the run that is resumed there writes the later ones again.

        Args:
            step: of its checkpoint; -1 where it has none and begins again.
            sealed: result of :meth:`seal` for the checkpoint; empty where there is none.

        Returns:
            The bytes that each file keeps.

        Raises:
            RunFolderError: a file does not begin with what it held then, or can't be read.
        """
        complete: dict[str, bytes] = {}
        for file in _RECORDS:
            path, (size, digest) = self.path / file, sealed.get(file, _sealed(b""))
            data = _bytes(path)
            if step < 0 and data:
                raise RunFolderError(f"{path} has rows, and the run no checkpoint: put its folder checkpoints back")
            if _sealed(data[:size]) != (size, digest):
                raise RunFolderError(
                    f"{path} is damaged or gone: its first {size} bytes are not those that it had when step-{step:06d} "
                    "was saved; put a copy back, or move that checkpoint away to resume from the one before it"
                )
            # After the seal come rows that were written after the checkpoint. Its own evaluation has the same step and
            # stays; the last piece is empty, or a line that was cut off.
            rows = ((line + b"\n", read_row(line)) for line in data[size:].split(b"\n")[:-1])
            complete[file] = data[:size] + b"".join(line for line, row in rows if row and row["step"] <= step)
        return complete

    def episodes(self, step: int) -> Path:
        """Return the path of a step's episodes."""
        return self.path / "episodes" / f"step-{step:06d}.jsonl.zst"

    def checkpoint(self, step: int) -> Path:
        """Return the path of a step's checkpoint."""
        return self.path / "checkpoints" / f"step-{step:06d}"

    def close(self) -> None:
        """Release the lock, so that other processes can use the folder."""
        self._lock.close()

    def was_refused(self, error: BaseException | None) -> bool:
        """Return True if a run that ends with ``error`` was refused as it began, and so has nothing to resume from."""
        return self._new and isinstance(error, UsageError) and not (self.path / "checkpoints").exists()

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if self.was_refused(error):
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()


def check_free(path: Path) -> None:
    """Check that a new run can have the folder at ``path``.

    Raises:
        RunFolderError: another run, or something else, has it.
    """
    if path.exists() and not _holds_nothing(path):
        raise _taken(path)


def check_begun(path: Path) -> None:
    """Check that ``path`` is no run without a checkpoint.

    Raises:
        RunFolderError: it is one.
    """
    if is_run(path) and not checkpoints(path):
        raise RunFolderError(f"the run {str(path)!r} has no checkpoint yet")


def is_run(path: Path) -> bool:
    """Return True for a run's folder, and False for a model in Hugging Face's form, which has a config.json."""
    return (path / "config.toml").is_file() and not (path / "config.json").is_file()


def _taken(path: Path) -> RunFolderError:
    return RunFolderError(
        f"the run folder {str(path)!r} exists already: choose another --name, resume with --resume {path}, or delete it"
    )


def _holds_nothing(path: Path) -> bool:
    """Return True if all that is there is what a process has left that was killed while it made the folder."""
    return path.is_dir() and all(entry.name.startswith((".lock", ".config.toml.")) for entry in path.iterdir())


def changed(config: Config, overrides: Sequence[str], path: Path) -> Config:
    """Override settings, ``section.key=value`` each, of a run at ``path`` that is resumed.

    Raises:
        ConfigError: a key is unknown, a value is invalid, the setting can't change in a resumed run, or the run has
            done more steps already.
    """
    new = with_overrides(config, overrides)
    done = int(saved[-1].name.removeprefix("step-")) if (saved := checkpoints(path)) else 0
    if new.optim.steps < min(done, config.optim.steps):
        raise ConfigError(f"optim.steps={new.optim.steps} is too few: the run has done {done} already")
    before, after = kept_settings(config), kept_settings(new)
    for name in (override.partition("=")[0] for override in overrides):
        # An override may reach into a setting, as env.args.dialect does, or set a table, as rollout.overlap does. One
        # that changes nothing is allowed.
        reached = [key for key in before if f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.")]
        if any(before[key] != after[key] for key in reached):
            raise ConfigError(
                f"{name} can't change in a resumed run, only {', '.join(MAY_CHANGE)}; a new run can begin with "
                f"this one's model: --set model.path={path}"
            )
    return new


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSONL file, except a last line that was cut off while it was written.

    Raises:
        RunFolderError: a line is no row, or the file can't be read.
    """
    rows: list[dict[str, Any]] = []
    for at, line in enumerate(_bytes(path).split(b"\n")[:-1], start=1):
        if (row := read_row(line)) is None:
            raise RunFolderError(
                f"line {at} of {path} is no JSON object with a step: put a copy of the file back, or take the line out"
            )
        rows.append(row)
    return rows


def read_row(line: bytes) -> dict[str, Any] | None:
    """Parse a line of a JSONL file; None where it is no JSON object whose ``step`` is the number of a step."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    if not isinstance(step, int | float) or isinstance(step, bool):
        return None
    return row if abs(step) < _LAST_STEP else None


def number(value: object) -> float | None:
    """Return ``value`` as a finite number; None for anything else, such as booleans, texts, NaN and infinities."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return None
    return float(value)


def checkpoints(path: Path) -> list[Path]:
    """List the checkpoints of the run at ``path``, oldest first."""
    return [entry for entry in numbered(path) if is_folder(entry)]


def numbered(path: Path) -> list[Path]:
    """List all entries named like checkpoints of the run at ``path``, oldest first; they may include a stray file."""
    folder = path / "checkpoints"
    if not is_folder(folder):
        return []
    steps = ((re.fullmatch(r"step-(\d+)", entry.name), entry) for entry in folder.iterdir())
    return [entry for _, entry in sorted((int(step[1]), entry) for step, entry in steps if step)]


def _failed_write(error: BaseException | None) -> str:
    """Return the system's message about the failed write that led to ``error``; empty where none did."""
    # Libraries in Rust only mention it in their message, and those in C++ raise another error afterwards.
    while error is not None:
        if isinstance(error, OSError) or "(os error " in str(error):
            return str(error)
        error = error.__cause__ or error.__context__
    return ""


def _sealed(data: bytes) -> tuple[int, str]:
    return len(data), hashlib.sha256(data).hexdigest()


def _bytes(path: Path) -> bytes:
    try:
        return read(path, MAX_ROWS)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    except OSError as error:
        raise RunFolderError(f"{path} can't be read: {error.strerror}: put a copy of the file back") from error
