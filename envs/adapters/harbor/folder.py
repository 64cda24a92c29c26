"""Read a task folder: ``task.toml`` by its keys, whatever version it names, and the files beside it.

What this reader plays it understands completely. A task that needs more, or has a key that is not known here, is
refused by name. Task folders come from strangers: no link is followed, and no variable of this process gets into a
container unless the user names it.
"""

import io
import itertools
import os
import re
import stat
import tarfile
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_MOST_TEXT: Final = 1 << 20
_MOST_FILES: Final = 256 << 20
"""Most bytes of a folder that goes into a container."""
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SIZE: Final = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)([MGT])i?B?", re.IGNORECASE)
_MIB: Final = {"M": 1, "G": 1 << 10, "T": 1 << 20}
_PATH: Final = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[^/\0]+)+/?")
_FROM: Final = re.compile(r"^(\s*FROM\s+(?:--platform=\S+\s+)?)(\S+)", re.IGNORECASE | re.MULTILINE)

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Network = Literal["public", "no-network", "allowlist"]


class TaskFault(Exception):
    """A task that can't be played; the message says why."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class _Agent(_Table):
    timeout_sec: Seconds | None = None
    user: str | int = ""
    network_mode: Network | None = None
    allowed_hosts: list[str] = []


class _Verifier(_Table):
    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}
    user: str | int = ""
    environment_mode: Literal["shared", "separate"] = "shared"
    environment: dict[str, Any] | None = None
    collect: list[Any] = []


class Healthcheck(_Table):
    """A command that must succeed before the agent begins."""

    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Annotated[float, Field(ge=0, le=3600)] = 0.0
    retries: Annotated[int, Field(ge=1, le=1000)] = 3


class _Environment(_Table):
    build_timeout_sec: Seconds = 600.0
    docker_image: str = ""
    workdir: str = ""
    env: dict[str, str] = {}
    cpus: Annotated[float, Field(gt=0, le=1024)] = 1.0
    memory_mb: Annotated[int, Field(ge=16, le=1 << 24)] | None = None
    memory: str | None = None
    storage_mb: Annotated[int, Field(ge=0)] | None = None
    storage: str | None = None
    gpus: Annotated[int, Field(ge=0)] = 0
    gpu_types: list[str] | None = None
    tpu: Any = None
    network_mode: Network | None = None
    allowed_hosts: list[str] = []
    allow_internet: bool = True
    healthcheck: Healthcheck | None = None
    mcp_servers: list[Any] = []
    skills_dir: str | None = None
    os: str = "linux"


class _Solution(_Table):
    env: dict[str, str] = {}


class _Artifact(_Table):
    source: str
    destination: str = ""
    exclude: list[str] = []
    service: str = ""


class Settings(_Table):
    """The keys of ``task.toml`` of every published version."""

    version: str | float = ""
    schema_version: str | float = ""
    source: str = ""
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    artifacts: list[str | _Artifact] = []
    steps: list[Any] = []
    multi_step_reward_strategy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """A task folder that can be played."""

    folder: Path
    """Where it is."""
    settings: Settings
    """Its ``task.toml``."""
    instruction: str
    """What the agent is asked."""
    memory_mb: int
    """Memory of a container [MiB]."""
    public: bool
    """It asks for a network."""
    artifacts: tuple[str, ...]
    """Absolute paths of files and folders that the tests read; empty for the work folder."""
    env: Mapping[str, str]
    """Variables of every program in its containers."""
    verifier_env: Mapping[str, str]
    """Further variables of the tests."""
    solution_env: Mapping[str, str]
    """Further variables of the solution."""


def read_task(folder: Path, variables: Mapping[str, str]) -> HarborTask:
    """Read a task folder.

    Args:
        folder: holds ``task.toml``.
        variables: what ``${NAME}`` in the task's tables of variables stands for.

    Raises:
        TaskFault: it can't be played; the message says why.
    """
    try:
        settings = Settings.model_validate(tomllib.loads(read_text(folder / "task.toml")))
    except ValidationError as error:
        fault = error.errors()[0]
        raise TaskFault(f"task.toml: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TaskFault(f"task.toml is no TOML: {error}") from error
    for wanted, need in _needs(folder, settings).items():
        if need:
            raise TaskFault(f"it needs {wanted}, which is not played here")
    environment = settings.environment
    for name in ("environment", "tests", "solution"):
        if (folder / name).is_symlink():
            raise TaskFault(f"{name} is a link")
    if not environment.docker_image:
        read_text(folder / "environment" / "Dockerfile")
    read_text(folder / "tests" / "test.sh")
    if environment.workdir:
        _check_path("environment.workdir", environment.workdir)
    return HarborTask(
        folder=folder,
        settings=settings,
        instruction=read_text(folder / "instruction.md"),
        memory_mb=_size("memory", environment.memory_mb, environment.memory) or 2048,
        public=_is_public(settings),
        artifacts=_artifacts(settings),
        env=expanded(environment.env, variables),
        verifier_env=expanded(settings.verifier.env, variables),
        solution_env=expanded(settings.solution.env, variables),
    )


def _needs(folder: Path, settings: Settings) -> dict[str, bool]:
    environment, verifier = settings.environment, settings.verifier
    objects = [artifact for artifact in settings.artifacts if not isinstance(artifact, str)]
    compose = [name for suffix in ("yaml", "yml") for name in (f"docker-compose.{suffix}", f"compose.{suffix}")]
    hosts = bool(environment.allowed_hosts or settings.agent.allowed_hosts)
    modes = {environment.network_mode, settings.agent.network_mode}
    return {
        "several steps": bool(settings.steps or settings.multi_step_reward_strategy) or (folder / "steps").exists(),
        "several containers (compose)": any((folder / "environment" / name).exists() for name in compose),
        "an earlier conversation (trajectory.json)": (folder / "trajectory.json").exists(),
        "MCP servers": bool(environment.mcp_servers),
        "skills": environment.skills_dir is not None,
        "another system than Linux": environment.os.lower() != "linux",
        "a GPU or TPU": bool(environment.gpus or environment.gpu_types or environment.tpu),
        "a list of allowed hosts": hosts or "allowlist" in modes,
        "an image of its own for the tests": verifier.environment is not None
        or (folder / "tests" / "Dockerfile").exists(),
        "commands that collect files for the tests": bool(verifier.collect),
        "artifacts of a service": any(artifact.service for artifact in objects),
        "artifacts with exceptions": any(artifact.exclude for artifact in objects),
    }


def _is_public(settings: Settings) -> bool:
    environment = settings.environment
    mode = environment.network_mode or ("public" if environment.allow_internet else "no-network")
    return mode == "public" and settings.agent.network_mode != "no-network"


def _size(name: str, mib: int | None, text: str | None) -> int | None:
    if text is None:
        return mib
    match = _SIZE.fullmatch(text)
    if match is None:
        raise TaskFault(f"environment.{name} is {text!r}: no size such as '2G'")
    size = int(float(match[1]) * _MIB[match[2].upper()])
    if mib not in (None, size):
        raise TaskFault(f"environment.{name} is {text!r} and environment.{name}_mb is {mib}: they differ")
    if not 16 <= size <= 1 << 24:
        raise TaskFault(f"environment.{name} is {text!r}: no size for a container")
    return size


def _artifacts(settings: Settings) -> tuple[str, ...]:
    paths = [artifact if isinstance(artifact, str) else artifact.source for artifact in settings.artifacts]
    for path in paths:
        _check_path("an artifact", path)
    return tuple(path.rstrip("/") for path in paths)


def _check_path(name: str, path: str) -> None:
    if not _PATH.fullmatch(path):
        raise TaskFault(f"{name} is {path!r}: no absolute path below / without '..'")


def expanded(table: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return a table of variables with ``${NAME}`` and ``${NAME:-default}`` replaced.

    Raises:
        TaskFault: A name is not among ``variables`` and has no default.
    """

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name not in variables and default is None:
            raise TaskFault(f"it asks for the variable {name}: set it in variables")
        return variables.get(name, default or "")

    return {name: _VARIABLE.sub(value, text) for name, text in table.items()}


def read_text(path: Path) -> str:
    """Read a text file of a task.

    Raises:
        TaskFault: It is no regular file, is too long, or is not UTF-8.
    """
    try:
        if not stat.S_ISREG(path.lstat().st_mode) or path.lstat().st_size > _MOST_TEXT:
            raise TaskFault(f"{path.name} is no regular file of at most {_MOST_TEXT >> 20} MiB")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise TaskFault(f"{path.parent.name}/{path.name} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFault(f"{path.name} can't be read: {error}") from error


def dockerfile(task: HarborTask, image_map: Mapping[str, str]) -> str:
    """Return the Dockerfile with its base images replaced by those of ``image_map``."""
    text = read_text(task.folder / "environment" / "Dockerfile")
    return _FROM.sub(lambda match: match[1] + image_map.get(match[2], match[2]), text)


def base_images(text: str) -> list[str]:
    """List the images that a Dockerfile begins from, names of its own stages included."""
    return [match[2] for match in _FROM.finditer(text)]


def sent(folder: Path) -> Collection[str]:
    """Return the names in a build's context that its .dockerignore leaves, read as Docker reads it."""
    from docker.utils.build import exclude_paths

    path = folder / ".dockerignore"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    names: Collection[str] = exclude_paths(str(folder), patterns)
    return names


def packed(
    folder: Path,
    prefix: str = "",
    replaced: Mapping[str, bytes] | None = None,
    only: Collection[str] | None = None,
) -> bytes:
    """Pack a folder as a tar that depends on names, contents and execute bits alone; root owns everything in it.

    Args:
        folder: what to pack; links are packed as links.
        prefix: where it goes, such as ``"tests/"``.
        replaced: contents of files that differ from the folder's.
        only: the names to pack, relative to the folder; None for all.

    Raises:
        TaskFault: it holds something else than files, folders and links, or too much.
    """
    total, buffer = 0, io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(Path(top) / name for top, *names in os.walk(folder) for name in itertools.chain(*names)):
            name = path.relative_to(folder).as_posix()
            if only is not None and name not in only:
                continue
            entry, status = tarfile.TarInfo(prefix + name), path.lstat()
            entry.mode = 0o755 if path.is_dir() or status.st_mode & 0o111 or name == "test.sh" else 0o644
            data = None
            if path.is_symlink():
                entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
            elif path.is_dir():
                entry.type = tarfile.DIRTYPE
            elif path.is_file():
                total += status.st_size
                if total > _MOST_FILES:
                    raise TaskFault(f"{folder.name} is larger than {_MOST_FILES >> 20} MiB")
                data = (replaced or {}).get(name) or path.read_bytes()
                entry.size = len(data)
            else:
                raise TaskFault(f"{folder.name}/{name} is neither file, folder nor link")
            tar.addfile(entry, None if data is None else io.BytesIO(data))
    return buffer.getvalue()
