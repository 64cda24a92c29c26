"""The folders that a session may write to, and copies of them for its forks.

The processes of a session and its forks share one mount namespace, in which one session is active at a time: the
scratch folders of the others are moved to a place that no program can enter. What is copied was made by a program, so
nothing is believed of it: symbolic links are copied and never followed, names are used one at a time, and depth costs
nothing.
"""

import os
import stat
from typing import Final

from agentrl.sandboxes import kernel, rootfs
from agentrl.sandboxes.base import Limits

MOST: Final = 32
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


class Shelf:
    """Where the scratch folders of resting sessions lie; place 0 belongs to the first session."""

    def __init__(self, limits: Limits) -> None:
        """Make the places, below a folder that programs have no right to enter and, being read-only, can't change."""
        self._limits = limits
        self._free = list(range(MOST - 1, 0, -1))
        safe = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        kernel.mount("none", rootfs.RUNNER, "tmpfs", safe, f"size=64k,nr_inodes={4 * MOST},mode=000")
        for place in range(MOST):
            for folder in self._at(place):
                os.makedirs(folder)
        kernel.set_mount_attributes(rootfs.RUNNER, kernel.ATTR_RDONLY, recursive=False)

    def copy(self) -> int:
        """Copy the active session's scratch folders to a free place.

        Returns:
            The place.

        Raises:
            OSError: There is no free place, or the copy does not fit.
        """
        if not self._free:
            raise OSError(f"more than {MOST} sessions live already")
        place = self._free.pop()
        mount(self._limits, self._at(place))
        try:
            for source, target in zip(_FOLDERS, self._at(place), strict=True):
                copy_tree(source, target)
        except OSError:
            for folder in self._at(place):
                kernel.unmount(folder)
            self._free.append(place)
            raise
        return place

    def store(self, place: int) -> None:
        """Move the active scratch folders to their place."""
        for source, target in zip(_FOLDERS, self._at(place), strict=True):
            kernel.mount(source, target, None, kernel.MS_MOVE)

    def fetch(self, place: int) -> None:
        """Make the scratch folders of a place the active ones."""
        for source, target in zip(self._at(place), _FOLDERS, strict=True):
            kernel.mount(source, target, None, kernel.MS_MOVE)

    def drop(self, place: int) -> None:
        """Let go of the active scratch folders, whose place becomes free."""
        for folder in _FOLDERS:
            kernel.unmount(folder)
        self._free.append(place)

    def _at(self, place: int) -> tuple[str, str]:
        return f"{rootfs.RUNNER}/{place}/tmp", f"{rootfs.RUNNER}/{place}/shm"


def copy_tree(source: str, target: str) -> None:
    """Copy what is in one folder into another, both of which nobody else changes meanwhile.

    Files with their holes, folders, symbolic links, pipes, modes, times, and hard links are copied; sockets and devices
    are left out, and extended attributes as well. Two descriptors are open however deep it goes.

    Raises:
        OSError: The copy does not fit.
    """
    here, there = (os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in (source, target))
    walk = _Walk(here, there)
    try:
        walk.run()
    finally:
        walk.close()


class _Walk:
    """A depth-first walk that steps down and, by ``..``, up again."""

    def __init__(self, here: int, there: int) -> None:
        self._here, self._there = here, there
        self._left: list[list[str]] = [os.listdir(here)]
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
            _dress(self._there, self._entered.pop())
            self._step("..")

    def close(self) -> None:
        for descriptor in (self._here, self._there, *self._linked.values()):
            os.close(descriptor)

    def _step(self, name: str) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        here = os.open(name, flags, dir_fd=self._here)
        os.close(self._here)
        self._here = here
        there = os.open(name, flags, dir_fd=self._there)
        os.close(self._there)
        self._there = there

    def _copy(self, name: str) -> None:
        found = os.stat(name, dir_fd=self._here, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            os.mkdir(name, 0o700, dir_fd=self._there)
            self._step(name)
            self._entered.append(found)
            self._left.append(os.listdir(self._here))
        elif stat.S_ISLNK(found.st_mode):
            os.symlink(os.readlink(name, dir_fd=self._here), name, dir_fd=self._there)
        elif stat.S_ISFIFO(found.st_mode):
            os.mkfifo(name, stat.S_IMODE(found.st_mode), dir_fd=self._there)
        elif stat.S_ISREG(found.st_mode):
            self._copy_file(name, found)

    def _copy_file(self, name: str, found: os.stat_result) -> None:
        if found.st_ino in self._linked:
            # Through /proc: the name that it got first may lie too deep to be named.
            os.link(f"/proc/self/fd/{self._linked[found.st_ino]}", name, dst_dir_fd=self._there)
            return
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._here)
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._there)
        try:
            _copy_data(source, target, found.st_size)
            _dress(target, found)
            if found.st_nlink > 1:
                self._linked[found.st_ino] = os.dup(target)
        finally:
            os.close(source)
            os.close(target)


def _copy_data(source: int, target: int, size: int) -> None:
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


def _dress(descriptor: int, found: os.stat_result) -> None:
    os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
    os.utime(descriptor, ns=(found.st_atime_ns, found.st_mtime_ns))
