"""Which of an agent's files a fresh container gets: pure functions over the engine's list of changes and a tar stream.

A verifier's own programs, their settings and its tests must be the image's. So only files under the paths that the task
declares are carried, never those of the system, of the verifier or of a home's hidden files. A link that leads out of
these paths is left behind, unless it leads to programs of the system.
"""

import io
import itertools
import posixpath
import re
import tarfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Final

from agentrl.sandboxes.docker.task_engine import CountedStream

MOST_BYTES: Final = 64 << 20
"""Most bytes that are carried over; the tar headers count."""
MOST_PATHS: Final = 2000
"""Most separate changes that are carried over; a new folder is one of them, whatever it holds."""
_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt")
_PRIVATE: Final = re.compile(
    r"/(?:etc|usr|bin|sbin|lib|lib32|lib64|boot|proc|sys|dev|run|tests|logs|solution)(?:/.*)?"
    r"|/(?:root|home/[^/]+)/\.[^/]+(?:/.*)?",
    re.DOTALL,
)


_SEARCHED: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What an agent changed under the paths that are carried over; no path lies below another of its list."""

    deleted: tuple[str, ...]
    """Paths of the image to delete; where the agent made them anew, they are among ``copied`` too."""
    copied: tuple[str, ...]
    """Files and folders to copy with all that they hold."""
    modified: tuple[str, ...]
    """Files to copy; of a folder, nothing but its rights changed."""


def is_private(path: str) -> bool:
    """Return whether a path belongs to the system, to the verifier, or to a home's hidden files."""
    return _PRIVATE.fullmatch(path) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The paths that are carried over."""

    tops: tuple[str, ...]
    """The declared files and folders."""
    guarded: tuple[str, ...] = ()
    """Folders below them that the image's own search paths name: what the verifier runs comes from there."""

    def has(self, path: str) -> bool:
        """Return whether a path may be carried over."""
        return is_under(path, self.tops) and not is_private(path) and not is_under(path, self.guarded)


def scope_of(tops: Sequence[str], variables: Sequence[str]) -> Scope:
    """Return the scope of declared paths in an image with these variables, each as ``NAME=value``.

    A virtual environment in the work folder is often the first entry of ``PATH``. An agent's Python there would be the
    verifier's, so it is not carried over.
    """
    named = {name: value for name, _, value in (text.partition("=") for text in variables)}
    paths = [p.rstrip("/") for key in _SEARCHED for p in named.get(key, "").split(":") if p.startswith("/")]
    paths += [posixpath.dirname(path) for path in paths if posixpath.basename(path) == "bin"]
    # A search path that is itself declared, or holds what is, is the task's own decision.
    inner = {path for path in paths if path and is_under(path, tops) and path not in tops}
    return Scope(tops=tuple(tops), guarded=tuple(sorted(inner)))


def is_under(path: str, tops: Collection[str]) -> bool:
    """Return whether a normal absolute path is one of ``tops`` or lies below one."""
    return any(path == top or path.startswith(f"{top}/") for top in tops)


def select(changes: Mapping[str, int], scope: Scope) -> Changes:
    """Select what to carry over from the engine's list of changes, whose kinds are 0, 1 and 2.

    Args:
        changes: each path's kind: 0 modified, 1 added, 2 deleted and perhaps made anew.
        scope: the paths that may be carried over.
    """
    wanted = {path: kind for path, kind in changes.items() if scope.has(path)}
    complete = _tops({path for path, kind in wanted.items() if kind})
    # The engine lists a folder as modified where something in it changed: then the folder itself need not be copied.
    parents = {str(parent) for path in wanted for parent in PurePosixPath(path).parents}
    modified = [path for path in wanted if path not in parents and not is_under(path, complete)]
    deleted = _tops({path for path, kind in wanted.items() if kind == 2})
    return Changes(deleted=tuple(deleted), copied=tuple(complete), modified=tuple(sorted(modified)))


def _tops(paths: Collection[str]) -> list[str]:
    return sorted(path for path in paths if not any(str(parent) in paths for parent in PurePosixPath(path).parents))


class Parcel:
    """The files that are carried over, as one tar to unpack at the root; made from the engine's tar streams.

    Args:
        scope: the paths that may be carried over.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._is_folder: dict[str, bool] = {}
        self._buffer = io.BytesIO()
        self._out = tarfile.open(fileobj=self._buffer, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115

    def add(self, top: str, stream: CountedStream | IO[bytes], *, alone: bool = False) -> None:
        """Add the members of a tar stream of the path ``top``; of a folder no more than itself with ``alone``.

        Raises:
            tarfile.TarError: It is no tar.
        """
        base = posixpath.dirname(top)
        with tarfile.open(fileobj=stream, mode="r|") as members:  # pyright: ignore[reportArgumentType, reportCallIssue]
            for member in members:
                path = posixpath.join(base, posixpath.normpath(member.name))
                entry = self._entry(path, member, base) if is_under(path, [top]) else None
                if entry is not None:
                    self._is_folder[path] = entry.isdir()
                    self._out.addfile(entry, members.extractfile(member) if entry.isreg() else None)
                if alone and member.isdir():
                    return

    def finish(self) -> bytes:
        """Return the tar; nothing can be added afterwards."""
        self._out.close()
        return self._buffer.getvalue()

    def _entry(self, path: str, member: tarfile.TarInfo, base: str) -> tarfile.TarInfo | None:
        """Return what to write for a member; None to leave it behind."""
        # A program of the agent may change a folder to a link while the engine packs it: what came through that link
        # would land outside.
        through_link = any(self._is_folder.get(str(parent)) is False for parent in PurePosixPath(path).parents)
        if not self._scope.has(path) or through_link or self._is_folder.get(path) is False:
            return None
        entry = tarfile.TarInfo(path.lstrip("/"))
        entry.mode, entry.mtime, entry.uid, entry.gid = member.mode & 0o1777, int(member.mtime), member.uid, member.gid
        if member.isreg():
            entry.size = member.size
        elif member.isdir():
            entry.type = tarfile.DIRTYPE
        elif member.issym() and _leads_inside(path, member.linkname, self._scope):
            entry.type, entry.linkname = tarfile.SYMTYPE, member.linkname
        elif member.islnk():
            target = posixpath.join(base, posixpath.normpath(member.linkname))
            if self._is_folder.get(target) is not False:
                return None
            entry.type, entry.linkname = tarfile.LNKTYPE, target.lstrip("/")
        else:
            return None
        return entry


def _leads_inside(path: str, target: str, scope: Scope) -> bool:
    """Return whether a link leads to what is carried over or to the system; the answer key is neither."""
    names = [name for name in target.split("/") if name not in ("", ".")]
    upward = 0 if target.startswith("/") else len(list(itertools.takewhile("..".__eq__, names)))
    # After a name, '..' goes up from wherever that name leads, which may be another link.
    if ".." in names[upward:]:
        return False
    full = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return is_under(full, (*_SYSTEM, *scope.guarded)) or scope.has(full)
