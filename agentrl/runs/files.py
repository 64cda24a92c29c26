"""Read and write the files of a run, which may come from a stranger: nothing outside its folder is touched.

No link is followed, no device or pipe is opened, and reads are limited in size. Everything in ``runs``, ``eval`` and
``cli`` opens files through this module; a house test checks that.

Not covered: hard links, and a folder in which somebody else writes at the same moment.
"""

import errno
import fcntl
import os
import re
import secrets
import stat
from contextlib import suppress
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, BinaryIO

from agentrl.errors import RunFolderError

MAX_TEXT = 64 << 20
"""Most bytes of a file of settings or a summary, which is read into memory at once."""
MAX_ROWS = 2 << 30
"""Most bytes of a file that grows by a line a step, which is read into memory at once."""
_LEFT = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_file(path: Path) -> BufferedReader:
    """Open a file to read its bytes.

    Raises:
        OSError: it is not there, can't be read, or is a link or no regular file.
    """
    return open(path, "rb", opener=partial(_opened, path, os.O_RDONLY))


def read(path: Path, limit: int = MAX_TEXT) -> bytes:
    """Read all of a file.

    Args:
        path: the file.
        limit: most bytes that it may have.

    Raises:
        OSError: as :func:`open_file`, or the file is larger.
    """
    with open_file(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit >> 20} MiB", str(path))
    return data


def lock_folder(path: Path, kind: str = "run folder", option: str = "--name") -> IO[bytes]:
    """Lock a folder against other processes until the returned file is closed; create it where it is missing.

    Unfinished files that a killed process has left in it are deleted.

    Args:
        path: of the folder.
        kind: name of such a folder, for the error.
        option: command-line option that chooses another one, for the error.

    Raises:
        RunFolderError: it can't be written, or another process is using it.
    """
    # Opened to append, since the holder's process id in it must survive until the lock is ours. The kernel releases the
    # lock of a process that dies, so no stale lock is ever left.
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open_to_append(path / ".lock")
    except OSError as error:
        raise RunFolderError(f"the {kind} {str(path)!r} can't be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().decode(errors="replace").strip() or "unknown"
        lock.close()
        raise RunFolderError(
            f"the {kind} {str(path)!r} is in use by process {holder}: wait for it, or choose another {option}"
        ) from error
    lock.truncate(0)
    with suppress(OSError):  # a full disk: the lock holds without the number
        os.write(lock.fileno(), str(os.getpid()).encode())
    delete_unfinished(path)
    return lock


def open_to_append(path: Path) -> FileIO:
    """Open a file to read it and to append to it, without a buffer; create it where it is missing.

    Raises:
        OSError: it can't be written, or is a link or no regular file.
    """
    return open(path, "ab+", buffering=0, opener=partial(_opened, path, os.O_RDWR | os.O_APPEND | os.O_CREAT))


class NewFile:
    """A file that replaces ``path`` at :meth:`commit`; until then it has a random name.

    Raises:
        OSError: its folder can't be written.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._draft = path, path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE
        self.stream: BinaryIO = os.fdopen(os.open(self._draft, flags, 0o666), "wb")

    def commit(self) -> None:
        """Rename it to ``path``; the stream stays open."""
        self.stream.flush()
        os.fsync(self.stream.fileno())  # else the rename may survive a power failure that the contents don't
        self._draft.rename(self._path)

    def discard(self) -> None:
        """Close and delete it, which frees room on a full disk."""
        with suppress(OSError):
            self.stream.close()
        with suppress(OSError):
            self._draft.unlink()


def replace(path: Path, data: bytes) -> None:
    """Replace a file's contents atomically; nothing changes where that fails.

    Raises:
        OSError: it can't be written.
    """
    new = NewFile(path)
    try:
        with new.stream:
            new.stream.write(data)
            new.commit()
    except BaseException:
        new.discard()
        raise


def delete_unfinished(folder: Path) -> None:
    """Delete unfinished files of a killed process in ``folder``; nobody else may be writing there."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _LEFT.fullmatch(path.name):
            path.unlink()


def is_folder(path: Path) -> bool:
    """Return True if ``path`` is a folder and no link to one."""
    return path.is_dir() and not path.is_symlink()


def is_file(path: Path) -> bool:
    """Return True if ``path`` is a regular file and no link to one."""
    return path.is_file() and not path.is_symlink()


def sync(path: Path) -> None:
    """Flush a file or folder to disk.

    Raises:
        OSError: it can't be flushed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _opened(path: Path, flags: int, *_: object) -> int:
    # The other arguments are the flags that ``open`` would use.
    try:
        descriptor = os.open(path, flags | _SAFE, 0o666)
    except OSError as error:
        words = "it is a link, and may lead out of its folder" if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, words, str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor
