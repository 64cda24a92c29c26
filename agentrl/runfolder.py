"""The run folder: made once, locked while in use, never overwritten."""

import fcntl
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from agentrl.config import Config, RunSettings, parse_config, read_toml, to_toml, with_overrides
from agentrl.errors import ConfigError, RunFolderError, nearest

_MAY_CHANGE = (
    *("run.threads", "model.device", "rollout.concurrency", "rollout.max_fault_rate"),
    *("optim.steps", "optim.max_sampled_tokens", "optim.max_tokens", "eval.*", "save.*"),
)
"""Settings of a run that goes on: how long, where, how fast and how closely watched. The rest says what is learned."""
_PACKAGES = ("agentrl", "torch", "transformers", "tokenizers", "gymnasium", "numpy", "sympy")


class RunFolder:
    """One run's folder, locked for this process until closed.

    Use :meth:`create` or :meth:`resume`.
    """

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, config: Config, *, numbered: bool, dialect: str = "") -> "RunFolder":
        """Make the folder of a new run and write its config.

        Args:
            config: names the run.
            numbered: where the name is taken, take the next free ``name-2``, ``name-3`` …
            dialect: name and hash of the dialect that the run is trained in.

        Raises:
            RunFolderError: the folder exists or can't be written.
        """
        path = Path(config.run.dir) / config.run.name
        number = 1
        try:
            while numbered and path.exists():
                number += 1
                path = Path(config.run.dir) / f"{config.run.name}-{number}"
            path.mkdir(parents=True)
            (path / "episodes").mkdir()
        except FileExistsError as error:
            raise RunFolderError(
                f"the run folder {str(path)!r} exists already: choose another --name, or go on with --resume {path}"
            ) from error
        except OSError as error:
            raise RunFolderError(f"the run folder {str(path)!r} can't be made: {error.strerror}") from error
        folder = cls(path, _locked(path))
        folder.write_config(config, dialect)
        return folder

    @classmethod
    def resume(cls, path: Path) -> tuple["RunFolder", Config]:
        """Take up the folder of a run that ended or was stopped.

        Raises:
            RunFolderError: there is no run at ``path``, or another process is using it.
        """
        config = read_config(path)
        return cls(path, _locked(path)), config

    def append(self, file: str, row: Mapping[str, object]) -> None:
        """Add a line to a JSONL file; it is on disk when this returns."""
        with (self.path / file).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def truncate(self, file: str, *, after: int) -> None:
        """Drop the lines whose step comes after ``after``: a resumed run writes them again."""
        path = self.path / file
        if path.exists():
            kept = [row for row in read_jsonl(path) if row["step"] <= after]
            _replace(path, "".join(json.dumps(row) + "\n" for row in kept))

    def episodes(self, step: int) -> Path:
        """Where the episodes of a step are kept."""
        return self.path / "episodes" / f"step-{step:06d}.jsonl.zst"

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step is kept."""
        return self.path / "checkpoints" / f"step-{step:06d}"

    def close(self) -> None:
        """Let other processes use the folder."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write_config(self, config: Config, dialect: str) -> None:
        """Write every setting, the versions of what runs it, and the dialect."""
        versions = {"python": platform.python_version()} | _versions() | ({"dialect": dialect} if dialect else {})
        text = to_toml(config.model_dump(mode="json")) + "\n" + to_toml({"versions": versions})
        _replace(self.path / "config.toml", text)


def read_config(path: Path) -> Config:
    """The config of the run at ``path``.

    Raises:
        RunFolderError: there is no run; the message names the nearest folder that holds one.
    """
    file = path / "config.toml"
    if not file.is_file():
        folders = {folder for folder in (path.parent, Path(RunSettings().dir)) if folder.is_dir()}
        runs = {str(other) for folder in folders for other in folder.iterdir() if (other / "config.toml").is_file()}
        raise RunFolderError(f"there is no run in {str(path)!r}; {nearest(str(path), runs)}")
    data = read_toml(file)
    data.pop("versions", None)
    return parse_config(data)


def changed(config: Config, overrides: Sequence[str], path: Path) -> Config:
    """The settings of a run at ``path`` that goes on with ``section.key=value`` each laid over them.

    Raises:
        ConfigError: a key is unknown, a value is invalid, or the setting is of those that a run keeps.
    """
    new = with_overrides(config, overrides)
    before, after = config.model_dump(), new.model_dump()
    for name in (override.partition("=")[0] for override in overrides):
        section, key = name.split(".")[:2]
        if after[section][key] != before[section][key] and not {f"{section}.{key}", f"{section}.*"} & set(_MAY_CHANGE):
            raise ConfigError(
                f"{name} can't change in a run that goes on, only {', '.join(_MAY_CHANGE)}; a new run can begin with "
                f"this one's model: --set model.path={path}"
            )
    return new


def model_at(path: str) -> str:
    """Where the model is that ``path`` names: the last checkpoint where it is a run, else ``path`` itself.

    Raises:
        RunFolderError: the run has no checkpoint yet.
    """
    if not path or not (Path(path) / "config.toml").is_file() or (Path(path) / "config.json").is_file():
        return path
    if not (saved := checkpoints(Path(path))):
        raise RunFolderError(f"the run {path!r} has no checkpoint yet")
    return str(saved[-1])


def read_dialect(path: Path) -> str:
    """Name and hash of the dialect that the run at ``path`` was trained in; empty where it is not recorded."""
    return str(read_toml(path / "config.toml").get("versions", {}).get("dialect", ""))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file; a last line that was cut off while it was written is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def checkpoints(path: Path) -> list[Path]:
    """The whole checkpoints of the run at ``path``, oldest first."""
    folder = path / "checkpoints"
    if not folder.is_dir():
        return []
    steps = ((re.fullmatch(r"step-(\d+)", entry.name), entry) for entry in folder.iterdir())
    return [entry for _, entry in sorted((int(step[1]), entry) for step, entry in steps if step)]


def _locked(path: Path) -> IO[str]:
    try:
        lock = (path / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"the run folder {str(path)!r} can't be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise RunFolderError(
            f"the run folder {str(path)!r} is in use by process {holder}: wait for it, or choose another --name"
        ) from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _replace(path: Path, text: str) -> None:
    """Write a file that is whole at any instant."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
