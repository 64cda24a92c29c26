"""Mounts the folders that a session may write to, and copies them for its forks.

The processes of a session and its forks share one mount namespace, in which one session is active at a time: the
scratch folders of the others are moved to where no program can enter. A program made what is copied, so the copy trusts
none of it: it copies symbolic links and never follows them, uses names one at a time, and needs no memory for depth.
"""

import os
import stat
from typing import Final

from agentrl.sandboxes.inside import kernel, rootfs
from agentrl.sandboxes.inside.limits import Limits

MAX_SESSIONS: Final = 32
"""Sessions that may live at once in one mount namespace."""
_FOLDERS: Final = ("/tmp", "/dev/shm")
_SHM_INODES: Final = 256
_CHUNK: Final = 1 << 20


def mount(limits: Limits, folders: tuple[str, str] = _FOLDERS) -> None:
    """Mount fresh scratch folders.

    Raises:
        OSError: The kernel refused.
    """
    safe = kernel.MS_NOSUID | kernel.MS_NODEV
    sizes = ((limits.tmp_bytes, limits.tmp_inodes), (limits.shm_bytes, _SHM_INODES))
    for folder, (size, inodes) in zip(folders, sizes, strict=True):
        kernel.mount("tmpfs", folder, "tmpfs", safe, f"size={size},nr_inodes={inodes},mode=1777")


class ScratchStore:
    """Holds the scratch folders of suspended sessions; index 0 belongs to the first session."""

    def __init__(self, limits: Limits) -> None:
        """Make the folders to mount on, for all sessions that there may be."""
        self._limits = limits
        self._free = list(range(MAX_SESSIONS - 1, 0, -1))
        # Programs have no right to enter the folder above, and can't change its mode, since it is mounted read-only.
        safe = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("none", rootfs.RUNNER, "tmpfs", safe, f"size=64k,nr_inodes={4 * MAX_SESSIONS},mode=000")
        for index in range(MAX_SESSIONS):
            for folder in self._folders(index):
                os.makedirs(folder)
        kernel.set_mount_attributes(rootfs.RUNNER, kernel.ATTR_RDONLY, recursive=False)

    def copy(self) -> int:
        """Copy the active session's scratch folders to a free index, and return it.

        Raises:
            OSError: There is no free index, or the copy does not fit.
        """
        if not self._free:
            raise OSError(f"more than {MAX_SESSIONS} sessions live already")
        index = self._free.pop()
        mount(self._limits, self._folders(index))
        try:
            for source, target in zip(_FOLDERS, self._folders(index), strict=True):
                copy_tree(source, target)
        except OSError:
            for folder in self._folders(index):
                kernel.unmount(folder)
            self._free.append(index)
            raise
        return index

    def swap_out(self, index: int) -> None:
        """Move the active scratch folders to their index."""
        for source, target in zip(_FOLDERS, self._folders(index), strict=True):
            kernel.mount(source, target, None, kernel.MS_MOVE)

    def swap_in(self, index: int) -> None:
        """Move the scratch folders of an index to where programs see them."""
        for source, target in zip(self._folders(index), _FOLDERS, strict=True):
            kernel.mount(source, target, None, kernel.MS_MOVE)

    def drop(self, index: int) -> None:
        """Unmount the active scratch folders, whose index becomes free."""
        for folder in _FOLDERS:
            kernel.unmount(folder)
        self._free.append(index)

    def _folders(self, index: int) -> tuple[str, str]:
        return f"{rootfs.RUNNER}/{index}/tmp", f"{rootfs.RUNNER}/{index}/shm"


def copy_tree(source: str, target: str) -> None:
    """Copy the content of one folder into another, while nobody else changes either.

    Copies files with their holes, folders, symbolic links, pipes, modes, times, and hard links; leaves out sockets,
    devices and extended attributes. Two descriptors are open however deep it goes.

    Raises:
        OSError: The copy does not fit.
    """
    walk = _TreeCopier(*(os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in (source, target)))
    try:
        walk.run()
    finally:
        walk.close()


class _TreeCopier:
    """A depth-first walk that steps down and, by ``..``, up again."""

    def __init__(self, source: int, target: int) -> None:
        self._source, self._target = source, target
        self._left: list[list[str]] = [os.listdir(source)]
        self._entered: list[os.stat_result] = []
        self._linked: dict[int, int] = {}

    def run(self) -> None:
        while True:
            if self._left[-1]:
                self._copy(self._left[-1].pop())
                continue
            self._left.pop()
            if not self._entered:
                return
            # After its content, which changes a folder's time; and a mode may forbid to write.
            _copy_metadata(self._target, self._entered.pop())
            self._step("..")

    def close(self) -> None:
        for descriptor in (self._source, self._target, *self._linked.values()):
            os.close(descriptor)

    def _step(self, name: str) -> None:
        # Relative to the folder it is in: a path from the top could be longer than the kernel takes.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        source = os.open(name, flags, dir_fd=self._source)
        os.close(self._source)
        self._source = source
        target = os.open(name, flags, dir_fd=self._target)
        os.close(self._target)
        self._target = target

    def _copy(self, name: str) -> None:
        status = os.stat(name, dir_fd=self._source, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            os.mkdir(name, 0o700, dir_fd=self._target)
            self._step(name)
            self._entered.append(status)
            self._left.append(os.listdir(self._source))
        elif stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=self._source), name, dir_fd=self._target)
        elif stat.S_ISFIFO(status.st_mode):
            os.mkfifo(name, stat.S_IMODE(status.st_mode), dir_fd=self._target)
        elif stat.S_ISREG(status.st_mode):
            self._copy_file(name, status)

    def _copy_file(self, name: str, status: os.stat_result) -> None:
        if status.st_ino in self._linked:
            # Through /proc: the name that it got first may lie too deep to be named.
            os.link(f"/proc/self/fd/{self._linked[status.st_ino]}", name, dst_dir_fd=self._target)
            return
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._source)
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._target)
        try:
            _copy_data(source, target, status.st_size)
            _copy_metadata(target, status)
            # Kept open, so that the other names of the file become links to this copy.
            if status.st_nlink > 1:
                self._linked[status.st_ino] = os.dup(target)
        finally:
            os.close(source)
            os.close(target)


def _copy_data(source: int, target: int, size: int) -> None:
    # Holes cost no room: a file larger than the folder may have been made of them.
    os.ftruncate(target, size)
    end = 0
    while end < size:
        try:
            start = os.lseek(source, end, os.SEEK_DATA)
        except OSError:
            return  # ENXIO: only a hole is left
        end = os.lseek(source, start, os.SEEK_HOLE)
        os.lseek(source, start, os.SEEK_SET)
        os.lseek(target, start, os.SEEK_SET)
        while start < end:
            start += os.write(target, os.read(source, min(_CHUNK, end - start)))


def _copy_metadata(descriptor: int, status: os.stat_result) -> None:
    os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
    os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
