"""Reads, reopens and locks the program's files, in its own process and with its rights."""

import base64
import errno
import fcntl
import os
import stat
import struct
from contextlib import suppress
from typing import Final, Protocol

from agentrl.sandboxes.inside import wire

HOME: Final = "/tmp"
"""The working folder of every program."""
_LOCKS: Final = {fcntl.LOCK_SH: fcntl.F_RDLCK, fcntl.LOCK_EX: fcntl.F_WRLCK, fcntl.LOCK_UN: fcntl.F_UNLCK}


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def read(path: str, offset: int, size: int) -> wire.Message:
    """Read a part of a regular file and return it as an answer to pid 1."""
    try:
        descriptor = _open_regular(os.path.join(HOME, path))
        with open(descriptor, "rb") as file:
            file.seek(offset)
            data = file.read(size)
    except OSError as error:
        return {"t": "read", "data": None, "errno": error.errno or errno.EIO}
    return {"t": "read", "data": base64.b64encode(data).decode(), "errno": None}


def _open_regular(path: str) -> int:
    """Open a regular file whose path holds no symbolic link, without blocking on a pipe or device."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    current = os.open("/", os.O_PATH | os.O_CLOEXEC)
    *folders, name = [part for part in path.split("/") if part not in ("", ".")] or ["."]
    try:
        for folder in folders:
            inner = os.open(folder, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=current)
            os.close(current)
            current = inner
            if stat.S_ISLNK(os.fstat(current).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        opened = os.open(name, flags, dir_fd=current)
    finally:
        os.close(current)
    mode = os.fstat(opened).st_mode
    if not stat.S_ISREG(mode):
        os.close(opened)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, os.strerror(number))
    return opened


def left_open() -> tuple[str, list[tuple[int, str]]]:
    """Return the working folder, and the descriptors of regular files in the scratch folders with their paths."""
    files: list[tuple[int, str]] = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        # The descriptor of the listing itself is gone by now.
        with suppress(FileNotFoundError):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if path.startswith(("/tmp/", "/dev/shm/")) and stat.S_ISREG(os.fstat(descriptor).st_mode):
                files.append((descriptor, path))
    return os.getcwd(), files


def reopen(folder: str, files: list[tuple[int, str]]) -> None:
    """Replace the original's open files by the copies of them; one that has lost its name stays shared."""
    # The working folder too is the original's, and may not have been copied.
    try:
        os.chdir(folder)
    except OSError:
        os.chdir(HOME)
    for descriptor, path in files:
        flags, offset = fcntl.fcntl(descriptor, fcntl.F_GETFL), os.lseek(descriptor, 0, os.SEEK_CUR)
        with suppress(OSError):
            copy = os.open(path, (flags & (os.O_ACCMODE | os.O_APPEND)) | os.O_NOFOLLOW)
            os.lseek(copy, offset, os.SEEK_SET)
            os.dup2(copy, descriptor, inheritable=os.get_inheritable(descriptor))
            os.close(copy)


def flock(file: int | _HasDescriptor, operation: int, /) -> None:
    """Lock all bytes of a file in place of ``fcntl.flock``, as the kernel itself does on NFS.

    The filter refuses that call, since a program could lock what it shares with other sessions. This lock needs the
    right to write where it is exclusive, which there is on files of the program's own only.

    Raises:
        BlockingIOError: Another holds it, and the operation is not to wait.
        OSError: There is no such operation, or the file is not open for it.
    """
    kind = _LOCKS.get(operation & ~fcntl.LOCK_NB)
    if kind is None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    command = fcntl.F_OFD_SETLK if operation & fcntl.LOCK_NB else fcntl.F_OFD_SETLKW
    # struct flock: type, whence, start, length (0 is all), process (0 is the open file), and what aligns it.
    fcntl.fcntl(file, command, struct.pack("hhqqi0q", kind, os.SEEK_SET, 0, 0, 0))
