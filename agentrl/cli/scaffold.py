"""``agentrl new``: write a package with a working environment as a starting point."""

import importlib.util
import keyword
import os
import re
import shutil
import sys
from pathlib import Path
from string import Template

from agentrl.errors import UsageError
from agentrl.runs.files import read, replace

_FILES = {
    "pyproject.toml.in": "pyproject.toml",
    "README.md.in": "README.md",
    "gitignore.in": ".gitignore",
    "train.toml.in": "train.toml",
    "init.py.in": "$name/__init__.py",
    "env.py.in": "$name/env.py",
    "test.py.in": "tests/test_$name.py",
}
"""Maps each template to its path in the new folder."""
_MAX_NAME = 50
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_TAKEN = ("agentrl", "test", "tests")


def create(name: str, folder: Path, namespace: str = "me") -> str:
    """Write a package whose environment can be played, checked and trained on as it is.

    Args:
        name: the package's name: lower-case letters, digits and underscores.
        folder: a new or an empty folder to write to.
        namespace: the beginning of the environment's id.

    Returns:
        The id of the environment.

    Raises:
        UsageError: a name is not allowed, or the folder can't be written; nothing was written then.
    """
    kind = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    _check_name(name, kind)
    if len(namespace) > _MAX_NAME or not _NAMESPACE.fullmatch(namespace) or namespace == "agentrl":
        raise UsageError(
            f"the namespace {namespace[:_MAX_NAME]!r} won't do: use letters, digits, - and _, and not agentrl's own"
        )
    words = {"name": name, "kind": kind, "id": f"{namespace}/{kind}-v0", "project": name.replace("_", "-")}
    templates = Path(__file__).parents[1] / "templates" / "new"
    texts = {
        Template(target).substitute(words): Template(read(templates / source).decode()).substitute(words)
        for source, target in _FILES.items()
    }
    _write(folder, texts)
    return words["id"]


def _check_name(name: str, kind: str) -> None:
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:_MAX_NAME]!r} can't be a package's name: use up to {_MAX_NAME} lower-case letters, digits and "
            "underscores, beginning with a letter, such as my_env"
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or keyword.iskeyword(kind):
        raise UsageError(f"{name!r} is a word of the Python language: choose another name")
    if name in _TAKEN or name in sys.stdlib_module_names or _installed(name):
        raise UsageError(f"there is a module called {name!r} already, which would be hidden: choose another name")


def _installed(name: str) -> bool:
    # A folder without __init__.py is found too, but has no origin: it may be the empty one to write to.
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _write(folder: Path, texts: dict[str, str]) -> None:
    """Write all files to a draft beside ``folder`` and rename it, so that no half-written package is left."""
    shown = repr(str(folder))
    if not str(folder).isprintable():
        raise UsageError(f"the folder {shown} holds a character that can't be printed: choose another")
    try:
        if folder.is_symlink() or folder.exists():
            if not folder.is_dir() or folder.is_symlink() or any(folder.iterdir()):
                raise UsageError(f"{shown} exists already and is no empty folder: choose another --dir")
            # A folder given as "." has no name to build the draft's from.
            folder = folder.resolve()
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        try:
            for file, text in texts.items():
                path = draft / file
                path.parent.mkdir(parents=True, exist_ok=True)
                replace(path, text.encode())
            draft.replace(folder)  # takes the place of an empty folder too
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"the folder {shown} can't be written: {error.strerror}") from error
