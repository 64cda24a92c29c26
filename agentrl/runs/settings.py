"""The settings of a run in its folder's config.toml, with the versions of what runs it."""

import importlib.metadata
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from agentrl.config import Config, RunSettings, parse_config, parse_toml
from agentrl.errors import RunFolderError, nearest
from agentrl.runs.files import read, replace

MAY_CHANGE = (
    *("run.threads", "run.ranks", "model.device", "rollout.concurrency"),
    "rollout.max_fault_rate",
    *("optim.steps", "optim.max_sampled_tokens", "optim.max_tokens", "optim.gradient_checkpointing"),
    *("fleet.*", "eval.*", "save.*", "log.*"),
)
"""Settings that may change when a run is resumed: length, hardware, speed and evaluation. The others decide what it
learns."""
_PACKAGES = ("agentrl", "torch", "transformers", "tokenizers", "gymnasium", "numpy", "sympy")


def write_config(path: Path, config: Config, made_by: Mapping[str, str]) -> None:
    """Write every setting, and the versions of the software, into ``config.toml`` of the folder at ``path``.

    Args:
        path: the run's folder.
        config: the settings.
        made_by: ``dialect``, its name and hash, ``decode_step``, what samples the tokens, and ``update``, what learns
            from them, where they are known.
    """
    # Python's version comes last: where it is missing, ``read_config`` knows that the file was cut off.
    versions = {name: value for name, value in made_by.items() if value and name != "python"}
    versions |= versions_of(_PACKAGES) | {"python": platform.python_version()}
    # The file names only the environments that are played.
    unused = {"env": {"id", "args"}} if config.env.mix else {}
    text = tomli_w.dumps({**config.model_dump(mode="json", exclude=unused), "versions": versions})
    replace(path / "config.toml", text.encode())


def read_config(path: Path) -> Config:
    """Read the config of the run at ``path``.

    Raises:
        RunFolderError: there is no run, and the message names the nearest folder that holds one; or the file was cut
            off.
    """
    file = path / "config.toml"
    if not file.is_file():
        folders = {folder for folder in (path.parent, Path(RunSettings().dir)) if folder.is_dir()}
        runs = {str(other) for folder in folders for other in folder.iterdir() if (other / "config.toml").is_file()}
        raise RunFolderError(f"there is no run in {str(path)!r}; {nearest(str(path), runs)}")
    data = _read_toml(file)
    if "python" not in data.pop("versions", {}):
        raise RunFolderError(f"{file} was cut off: a run's ends with the versions that ran it; put an intact copy back")
    return parse_config(data)


def kept_settings(config: Config) -> dict[str, Any]:
    """Select the settings that can't change when a run is resumed, as plain data by ``section.key``."""
    changing = set(MAY_CHANGE)
    return {
        name: value
        for name, value in settings_of(config).items()
        if not {name, f"{name.partition('.')[0]}.*"} & changing
    }


def settings_of(config: Config) -> dict[str, Any]:
    """Flatten all settings to plain data by ``section.key``, those of a table by ``section.table.key``."""
    return dict(_named(config, config.model_dump(mode="json")))


def _named(settings: BaseModel, data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings:
        if isinstance(value, BaseModel):
            yield from _named(value, data[key], f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", data[key]


def differing(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """List the settings in which two runs differ, with both values, but for name and folder, which only locate them."""
    left, right = settings_of(a), settings_of(b)
    keys = [key for key in left if left[key] != right[key] and key not in ("run.name", "run.dir")]
    return [(key, left[key], right[key]) for key in keys]


def read_versions(path: Path) -> dict[str, str]:
    """Read the versions of the software that made the run at ``path``, as ``write_config`` wrote them."""
    return {name: str(value) for name, value in _read_toml(path / "config.toml").get("versions", {}).items()}


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Look up the installed versions of ``packages``, without importing them."""
    versions: dict[str, str] = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(read(path), str(path))
    except OSError as error:
        raise RunFolderError(f"{path} can't be read: {error.strerror}") from error
