"""Measures, stops, continues and kills the processes that a session's pid 1 sees."""

import errno
import functools
import os
import re
import resource
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Final

_TICK: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_END_S: Final = 5.0
_STOP_S: Final = 1.0
_PENDING: Final = re.compile(rb"SigPnd:\t(\w+)\nShdPnd:\t(\w+)")
_LAST_PID: Final = 1 << 22
# Where a container sees its own memory cgroup, of the second and of the first version.
_OOM_COUNTERS: Final = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources that all processes of a session use together."""

    cpu_s: float
    """CPU time, of ended processes as well [seconds]."""
    rss: int
    """Resident memory; pages that processes share count once for each [bytes]."""


def list_pids(keep: Collection[int] = ()) -> list[int]:
    """List every process, zombies as well, but pid 1 and those in ``keep``."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != 1 and pid not in keep]


def usage(keep: Collection[int] = ()) -> Usage:
    """Add up what the session uses now, without the processes in ``keep``."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = pages = 0
    for pid in list_pids(keep):
        # A process that ended since it was listed.
        with suppress(FileNotFoundError, ProcessLookupError):
            # The name in parentheses is the program's own choice and may contain anything.
            fields = _read_proc(pid, "stat").rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15]))
            pages += int(fields[21])
    return Usage(cpu_s=ended.ru_utime + ended.ru_stime + ticks / _TICK, rss=pages * _PAGE)


def _read_proc(pid: int, name: str) -> bytes:
    # Without a file object around it: several are read for each cell.
    descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 14)
    finally:
        os.close(descriptor)


def proportional_bytes(keep: Collection[int], otherwise: int, enough: int, *, copying: bool = False) -> int:
    """Add up resident memory with shared pages divided among their users.

    Args:
        keep: Processes to skip.
        otherwise: The answer where a process forbids to look.
        enough: Stop above this: each process takes milliseconds while the others allocate.
        copying: One of the processes is about to become a snapshot or a fork.
    """
    if not os.path.exists("/proc/self/smaps_rollup"):
        # gVisor: forks share the pages of the interpreter that they were copied from, so those count once.
        shared = _resident(1)
        own = sorted(max(0, _resident(pid) - shared) for pid in list_pids(keep))
        # While a program copies itself, the copy and the process in between hold all of its pages.
        return shared + sum(own[:-2] if copying else own)
    total = 0
    for pid in list_pids(keep):
        if total > enough:
            break
        try:
            lines = _read_proc(pid, "smaps_rollup").splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(b"Pss:"))
        except PermissionError:
            return otherwise
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def _resident(pid: int) -> int:
    try:
        return int(_read_proc(pid, "statm").split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return 0


def cpu_clock(pid: int) -> float:
    """Read the CPU time of one process to the nanosecond, or 0 where it is gone [seconds]."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def run_delays(keep: Collection[int] = ()) -> dict[int, float]:
    """Return how long each thread has waited for a core since it began, where the kernel counts that [seconds].

    The kernel adds a wait when it ends.
    """
    delays: dict[int, float] = {}
    for pid in list_pids(keep):
        # A process, or a thread of it, that ended since it was listed; or a kernel without the figure.
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(f"/proc/{pid}/task"):
                delays[int(task)] = int(_read_proc(pid, f"task/{task}/schedstat").split()[1]) / 1e9
    return delays


def signal_all(number: int, keep: Collection[int] = ()) -> list[int]:
    """Send a signal to every process but those in ``keep``, and return the processes."""
    pids = list_pids(keep)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return pids


def continue_all(keep: Collection[int] = ()) -> None:
    """Wake every process but those in ``keep``."""
    if keep:
        signal_all(signal.SIGCONT, keep)
    else:
        signal_every(signal.SIGCONT)


def signal_every(number: int) -> None:
    """Send a signal to every process but this one, which must be the first of a pid namespace.

    Raises:
        RuntimeError: This is another process: the signal would strike the complete machine.
    """
    # One call, and none that is being started meanwhile escapes it.
    if os.getpid() != 1:
        raise RuntimeError("this signals every process that it can see, so it is for pid 1 of a pid namespace")
    with suppress(ProcessLookupError):
        os.kill(-1, number)


def end_all(keep: Collection[int] = ()) -> bool:
    """Kill and reap every process but those in ``keep``.

    Returns:
        Whether none was left after some seconds.
    """
    until = time.monotonic() + _END_S
    while signal_all(signal.SIGKILL, keep):
        reap()
        if time.monotonic() > until:
            return False
        time.sleep(0.0002)
    return True


class _Children:
    """Replaces pidfds where the kernel has none, as in gVisor: a pipe that becomes readable when any child changes."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        for descriptor in (self.reader, writer):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # A signal that is ignored, or left to the kernel, would write nothing.
        signal.signal(signal.SIGCHLD, _do_nothing)

    def drain(self) -> None:
        """Make it unreadable until the next change."""
        with suppress(BlockingIOError):
            while os.read(self.reader, 512):
                pass


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal, so that it is written to the pipe."""


_children: _Children | None = None


def exit_descriptor(pid: int) -> int:
    """Open a descriptor that becomes readable when a child has ended, and perhaps before: see :func:`has_ended`."""
    global _children
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    _children = _children or _Children()
    return os.dup(_children.reader)


def has_ended(pid: int) -> bool:
    """Return whether a child has ended; its exit status can still be taken."""
    if _children is not None:
        _children.drain()
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def take_status(pid: int) -> tuple[int, int]:
    """Take the exit status of a child that has ended; one that was taken already counts as killed.

    Returns:
        The status as ``os.wait4`` gives it, and the largest resident memory [bytes].
    """
    try:
        _, status, spent = os.wait4(pid, 0)
    except ChildProcessError:
        return signal.SIGKILL, 0
    return status, spent.ru_maxrss << 10


def reap(keep: Collection[int] = ()) -> None:
    """Take the exit statuses of ended children but those in ``keep``: zombies count against the process limit."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in keep:
            os.waitpid(ended.si_pid, 0)


def has_signals(pid: int) -> bool:
    """Return whether signals are pending for a stopped process; true where the kernel hides them, as gVisor does."""
    with suppress(FileNotFoundError, ProcessLookupError):
        waiting = _PENDING.search(_read_proc(pid, "status"))
        return waiting is None or int(waiting[1], 16) > 0 or int(waiting[2], 16) > 0
    return False


def is_stopped(pid: int) -> bool:
    """Return whether a process is alive and stopped."""
    try:
        return _read_proc(pid, "stat").rpartition(b")")[2].split()[0] == b"T"
    except FileNotFoundError:
        return False


def wait_until_stopped(pid: int) -> bool:
    """Wait for a child that is about to stop itself.

    Args:
        pid: A number that a program claims.

    Returns:
        Whether it is a child of ours, alive and stopped.
    """
    if not 1 < pid <= _LAST_PID:
        return False
    until = time.monotonic() + _STOP_S
    try:
        while time.monotonic() < until:
            changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if changed:
                return os.WIFSTOPPED(status)
            time.sleep(0.00005)
    except ChildProcessError:
        return False
    return False


@functools.cache
def _oom_counter() -> str | None:
    return next((path for path in _OOM_COUNTERS if os.access(path, os.R_OK)), None)


def oom_kills() -> int:
    """Count the processes that the kernel killed as the container was at its limit; 0 where nothing counts them."""
    if (path := _oom_counter()) is None:
        return 0
    with open(path) as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
