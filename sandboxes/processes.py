"""The processes of one session as its pid 1 sees them: what they use, and how to stop, thaw and end them."""

import os
import resource
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

_TICK: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_PATIENCE: Final = 5.0
_STOP_PATIENCE: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What all processes of the session use together."""

    cpu_s: float
    """CPU time, of ended processes as well [seconds]."""
    rss: int
    """Resident memory; pages that processes share count once for each [bytes]."""
    count: int
    """Processes that are alive."""


def living(keep: int = 0) -> list[int]:
    """List every process, zombies as well, but pid 1 and ``keep``."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid not in (1, keep)]


def usage(keep: int = 0) -> Usage:
    """Add up what the session uses now, without the process ``keep``."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = pages = count = 0
    for pid in living(keep):
        # A process that ended since it was listed.
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses is the program's own choice and may contain anything.
            fields = file.read().rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15]))
            pages += int(fields[21])
            count += 1
    return Usage(cpu_s=ended.ru_utime + ended.ru_stime + ticks / _TICK, rss=pages * _PAGE, count=count)


def proportional_bytes(keep: int, otherwise: int) -> int:
    """Add up resident memory with shared pages divided among their users.

    Args:
        keep: A process to leave out, or 0.
        otherwise: What to assume where a process forbids to look.
    """
    total = 0
    for pid in living(keep):
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                total += sum(int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:"))
        except PermissionError:
            return otherwise
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def cpu_clock(pid: int) -> float:
    """Read the CPU time of one process to the nanosecond, or 0 where it is gone [seconds]."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def signal_all(number: int, keep: int = 0) -> list[int]:
    """Send a signal to every process but ``keep`` and return which there were."""
    pids = living(keep)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return pids


def stop_all(keep: int = 0) -> None:
    """Stop every process, those as well that are being started meanwhile."""
    seen: set[int] = set()
    while not seen.issuperset(pids := signal_all(signal.SIGSTOP, keep)):
        seen.update(pids)


def end_all(keep: int = 0) -> bool:
    """Kill and reap every process but ``keep``.

    Returns:
        Whether none was left after some seconds.
    """
    until = time.monotonic() + _PATIENCE
    while signal_all(signal.SIGKILL, keep):
        reap()
        if time.monotonic() > until:
            return False
        time.sleep(0.0002)
    return True


def reap() -> None:
    """Take the exit statuses of ended children that nobody asks for."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def reap_orphans(ours: set[int]) -> None:
    """Take the exit statuses of ended children that are not ``ours``: zombies count against the process limit."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in ours:
            os.waitpid(ended.si_pid, 0)


def threads(pid: int) -> int:
    """Count the threads of a process; 0 where it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return 0


def is_stopped(pid: int) -> bool:
    """Whether a process is alive and stopped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except FileNotFoundError:
        return False


def wait_until_stopped(pid: int) -> bool:
    """Wait for a child that is about to stop itself.

    Returns:
        Whether it is a child of ours, alive and stopped.
    """
    until = time.monotonic() + _STOP_PATIENCE
    try:
        while time.monotonic() < until:
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found:
                return os.WIFSTOPPED(status)
            time.sleep(0.0002)
    except ChildProcessError:
        return False
    return False
