"""Versions of what plays and grades an episode: episodes with equal versions were played by the same code."""

import functools
import hashlib
import importlib.metadata
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.tools.function import FunctionTool, Tool

PARTS = {
    "tools": ("toolenv", "toolenv/tools", "toolenv/tools/mcp"),
    "dialects": ("toolenv/dialects",),
    "renderer": ("render",),
    "player": ("rollout",),
    "grader": ("grading", "grading/latex", "processes"),
    "sandbox": (
        *("sandboxes", "sandboxes/host", "sandboxes/inside", "sandboxes/docker", "sandboxes/image"),
        "sandboxes/remote",
    ),
}
"""The folders of this package that each version is a hash of, beside ``environment``; folders inside do not count."""
_GRADERS = ("sympy", "math-verify")
_READ = frozenset({".py", ".toml", ".txt", ".json", ".jsonl", ".jinja", ".yaml", ".csv", ""})
"""Suffixes of the files that can change an episode: code and the tables that it reads."""
_MAX_BYTES = 8 << 20
"""Bytes of a file that are hashed, beside its size: a data set of one's own may be large."""
_OURS = Path(__file__).parents[1]


def code_versions(kind: type[ToolEnv], tools: Iterable[Tool] = ()) -> Mapping[str, str]:
    """Return the versions of all that plays and grades the episodes of an environment.

    ``environment`` covers the class and its bases, and ``tools`` the given tools too: the folder of each module that
    belongs to a package, else its file. Not covered: what these import from elsewhere.

    Args:
        kind: the environment's class.
        tools: its tools.

    Returns:
        ``agentrl``, ``python``, ``environment``, and the keys of ``PARTS``; all hashes are of files' contents.
    """
    bases = {base.__module__ for base in kind.__mro__ if issubclass(base, ToolEnv) and base is not ToolEnv}
    of_tools = {tool.module if isinstance(tool, FunctionTool) else type(tool).__module__ for tool in tools}
    return _versions(frozenset(bases), frozenset(of_tools))


@functools.cache
def _versions(bases: frozenset[str], tools: frozenset[str]) -> Mapping[str, str]:
    files = {part: [file for name in folders for file in _files_in(_OURS / name)] for part, folders in PARTS.items()}
    files["environment"] = [file for module in bases for file in _files_of(module)]
    files["tools"] += [file for module in tools for file in _files_of(module)]
    hashes = {part: _hash(paths) for part, paths in files.items()}
    hashes["grader"] = " ".join([hashes["grader"], *(f"{it} {_installed(it)}" for it in _GRADERS)])
    return {"agentrl": _installed("agentrl"), "python": platform.python_version(), **hashes}


def _files_of(module: str) -> Iterable[Path]:
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:  # typed into an interpreter
        return ()
    if "." not in module:
        return (Path(path),)
    folder = Path(path).parent
    # What several of our families share lies above them.
    return (*_files_in(folder), *(_files_in(folder.parent) if module.startswith("agentrl.envs.") else ()))


def _files_in(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.suffix in _READ and path.is_file())


def _hash(files: Iterable[Path]) -> str:
    # By their contents alone: the same code has the same hash wherever it is installed.
    digests = sorted({_digest(file) for file in files})
    return hashlib.blake2b(b"".join(digests), digest_size=6).hexdigest()


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.blake2b(file.read(_MAX_BYTES) + str(path.stat().st_size).encode(), digest_size=16).digest()


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
