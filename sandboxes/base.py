"""The interface of every back end: limits, results, the two abstract classes and the errors.

::

    SandboxError                the infrastructure failed: never the program's fault, never a reward
    ├── SandboxUnavailable      this machine can't isolate programs this way; the message names the way out
    ├── SandboxClosed           its owner closed it: no fault of anything
    └── ForkRefused             this session can't be copied as it is now; it continues
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from agentrl.sandboxes.inside.limits import MIB, Limits

Status = Literal["ok", "error", "exit", "timeout", "memory", "output_limit", "killed", "crash"]
State = Literal["kept", "rolled_back", "lost"]
Files = Mapping[str, str | bytes]


class SandboxError(Exception):
    """The sandbox itself failed; the program is not to blame, and the run is no evidence about it."""


class SandboxUnavailable(SandboxError):
    """This machine can't run the back end that was asked for.

    Args:
        message: What stands in the way and how to remove it.
        remedy: The command that removes it, where there is one.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class SandboxClosed(SandboxError):
    """The session or the sandbox was closed by its owner, before or during the call."""


class ForkRefused(SandboxError):
    """The session can't be copied: the message says what stands in the way. The session itself continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one cell."""

    status: Status
    """``ok``; ``error`` an exception; ``exit`` the program ended itself; ``timeout``; ``memory`` the limit or an
    uncaught ``MemoryError``; ``output_limit``; ``killed`` by a signal; ``crash`` its worker died twice."""
    stdout: str = ""
    """Standard output, head and tail where it is longer than the limit."""
    stderr: str = ""
    """Standard error, cut in the same way."""
    value: str | None = None
    """The repr of the last expression, as in a REPL; ``None`` where it is ``None`` or there is none."""
    exc_type: str | None = None
    """Class name of the uncaught exception."""
    traceback: str | None = None
    """The traceback, cut to the program's own frames."""
    exit_code: int | None = None
    """Exit status where the program ended itself."""
    signal: int | None = None
    """Number of the signal that ended the program."""
    wall_s: float = 0.0
    """Seconds from the cell's start to its end."""
    cpu_s: float = 0.0
    """CPU seconds of all of the cell's processes."""
    queue_s: float = 0.0
    """Seconds spent waiting for a free core and for a fresh session, before the cell's clock started."""
    max_rss: int = 0
    """Largest resident memory seen, summed over the processes [bytes]; shared pages count once per process."""
    truncated: bool = False
    """Something of stdout, stderr, value or traceback was cut."""
    state: State = "kept"
    """The session's variables afterwards: ``kept``; ``rolled_back`` to before the cell; ``lost``: the interpreter is a
    fresh one. Files are kept in every case. A one-shot run has nothing to keep and says ``lost``."""
    attempts: int = 1
    """Number of workers that ran it: 2 where the first one died meanwhile."""
    backend: str = ""
    """The back end that ran it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One piece of code as it is sent to a session."""

    code: str
    """Python source."""
    timeout: float | None = None
    """CPU seconds; ``None`` takes ``Limits.cpu_s``."""
    transaction: bool = True
    """Roll the variables back when the cell does not end by itself."""
    stdin: str = ""
    """Text the program finds on standard input."""
    files: Files = field(default_factory=dict[str, str | bytes])
    """Files to write into the working folder first."""
    final: bool = False
    """The session ends with this cell: ``ok`` also needs exit status 0."""


LATENCY_BOUNDS_S: Final = tuple(0.001 * 10 ** (step / 3) for step in range(16))
"""Upper bounds of the buckets of ``Counters.latency``: three for each power of ten, 1 ms to 100 s [seconds]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counts of a sandbox since it was opened: a copy, which stays as it is."""

    runs: Mapping[Status, int] = field(default_factory=dict[Status, int])
    """Cells and one-shot programs that ended, by status; a status that never came is missing."""
    faults: int = 0
    """Calls that raised :class:`SandboxError`, without refused forks and without what its owner closed."""
    reruns: int = 0
    """One-shot programs that were run again because their worker died."""
    queue_s: float = 0.0
    """Sum of ``Result.queue_s`` [seconds]."""
    latency: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_S) + 1)
    """Runs by what the caller waited, ``queue_s`` and ``wall_s`` together: bucket i holds those of at most
    ``LATENCY_BOUNDS_S[i]`` and more than the bound before it; one last bucket holds the rest. [17]"""

    def __add__(self, other: "Counters") -> "Counters":
        """Return what two sandboxes have done together."""
        latency = tuple(map(int.__add__, self.latency, other.latency))
        queue_s, runs = self.queue_s + other.queue_s, dict(Counter(self.runs) + Counter(other.runs))
        faults, reruns = self.faults + other.faults, self.reruns + other.reruns
        return Counters(runs=runs, faults=faults, reruns=reruns, queue_s=queue_s, latency=latency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """State of a sandbox: can it run the next program?"""

    ok: bool
    """It is open and its processes are alive."""
    backend: str
    """The back end."""
    sessions: int
    """Sessions in use now."""
    ready: int
    """Sessions made in advance that wait for a program."""
    detail: str
    """The fault, or what runs, for people to read."""


class Closing(ABC):
    """Base of everything that a ``with`` statement closes."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Closing twice is allowed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Session(Closing):
    """A Python interpreter in a sandbox that keeps its variables and its ``/tmp`` between calls.

    One call at a time: calls from several threads wait for each other.
    """

    @abstractmethod
    def run(self, code: str, timeout: float | None = None, transaction: bool = True) -> Result:
        """Run one cell.

        Args:
            code: Python source; the repr of a last expression becomes ``Result.value``.
            timeout: CPU seconds; the wall clock allows ``Limits.wall_factor`` times as much.
            transaction: Roll the variables back when the cell times out, exits or is killed. An exception is an
                ordinary end: what the cell did before it is kept, as in a notebook. Files are never rolled back.

        Raises:
            SandboxError: The sandbox failed; the session can't be used any more.
            ValueError: The code is longer than the limit, or the timeout is not positive.
        """

    @abstractmethod
    def replay(self) -> "Session":
        """Run the cells of this session whose effects were kept again, in a fresh session with the same seed.

        Raises:
            SandboxError: The sandbox failed.
        """

    @abstractmethod
    def fork(self) -> "Session":
        """Make a second session that starts as this one is now: its variables and a copy of its ``/tmp``.

        What either does later, the other does not see. Processes that a cell left running stay with this session.

        Raises:
            ForkRefused: The program runs threads, or its ``/tmp`` or its processes leave no room for a copy.
            SandboxError: The sandbox failed; this session can't be used any more.
        """

    @abstractmethod
    def read_file(self, path: str, max_bytes: int = MIB) -> bytes:
        """Read the first ``max_bytes`` bytes of a regular file as the program sees it.

        Raises:
            OSError: There is no such file, the program may not read it, its name is a symbolic link (``ELOOP``), or
                it is no regular file but a folder, pipe, socket or device.
            SandboxError: The sandbox failed.
        """

    @abstractmethod
    def close(self) -> None:
        """End every process of the session, without waiting for it. Closing twice is allowed."""


class Sandbox(Closing):
    """Runs programs that nobody has read; safe to share between threads."""

    backend: str
    """Name of the back end."""
    version: str = ""
    """What its programs run in beside this package and this interpreter; empty where they run in nothing else."""
    limits: Limits
    """Limits of each session."""

    @abstractmethod
    def run(
        self, code: str, *, timeout: float | None = None, stdin: str = "", files: Files | None = None, seed: int = 0
    ) -> Result:
        """Run one program in a fresh session.

        Args:
            code: Python source.
            timeout: CPU seconds; ``None`` takes ``Limits.cpu_s``.
            stdin: Text on standard input.
            files: Relative paths and contents of files to write into the working folder first.
            seed: Seed of ``random`` and ``numpy.random``.

        Raises:
            SandboxError: The sandbox failed.
            ValueError: The code is longer than the limit, or the timeout is not positive.
        """

    @abstractmethod
    def session(self, seed: int = 0) -> Session:
        """Open a session; close it, or use it in a ``with`` statement.

        Raises:
            SandboxError: The sandbox failed or is closed.
        """

    @abstractmethod
    def counters(self) -> Counters:
        """Return what this sandbox has done so far."""

    @abstractmethod
    def health(self) -> Health:
        """Return whether this sandbox works, without running a program and without waiting."""

    @abstractmethod
    def close(self) -> None:
        """End every session and wait until no process is left. Closing twice is allowed."""
