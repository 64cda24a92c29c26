"""Versions of what plays and grades an episode: two episodes with equal ones were played by the same code."""

import functools
import hashlib
import importlib.metadata
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from agentrl.toolenv.base import ToolEnv

_GRADERS = ("sympy", "math-verify")


@functools.cache
def versions_of(kind: type[ToolEnv]) -> Mapping[str, str]:
    """Say which code plays and grades the episodes of an environment's class.

    The hashes are of source files. ``environment`` covers the class and its bases: the folder of each that belongs to a
    package, else its file. Not covered: what these import from elsewhere, and data files.

    Returns:
        ``agentrl``, ``python``, ``environment``, ``grader`` and ``sandbox``.
    """
    ours = Path(__file__).parents[1]
    modules = {base.__module__ for base in kind.__mro__ if issubclass(base, ToolEnv) and base is not ToolEnv}
    return {
        "agentrl": _installed("agentrl"),
        "python": platform.python_version(),
        "environment": _hash(file for module in modules for file in _files(module)),
        "grader": " ".join([_hash((ours / "grading").rglob("*.py")), *(f"{it} {_installed(it)}" for it in _GRADERS)]),
        "sandbox": _hash((ours / "sandboxes").rglob("*.py")),
    }


def _files(module: str) -> Iterable[Path]:
    place = getattr(sys.modules.get(module), "__file__", None)
    if place is None:  # typed into an interpreter
        return ()
    return Path(place).parent.glob("*.py") if "." in module else (Path(place),)


def _hash(files: Iterable[Path]) -> str:
    # By their contents alone: the same code has the same hash wherever it is installed.
    digests = sorted(hashlib.blake2b(file.read_bytes(), digest_size=16).digest() for file in files)
    return hashlib.blake2b(b"".join(digests), digest_size=6).hexdigest()


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
