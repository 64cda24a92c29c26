"""The interfaces between the parts of pid 1: a session's setup, its host, and the manager of its forks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from agentrl.sandboxes.inside.launcher import INSIDE
from agentrl.sandboxes.inside.limits import Limits
from agentrl.sandboxes.inside.program_channel import ProgramChannel


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    """Descriptors and settings that a session's pid 1 gets from the process that it is forked from."""

    channel: int
    """Socket to the host."""
    out: int
    """Pipe to the host for standard output."""
    err: int
    """Pipe to the host for standard error."""
    proc: int = -1
    """Folder descriptor of a ``/proc`` that can be written to; pid 1 opens it."""
    limits: Limits
    """Limits of the session."""
    seccomp: bytes
    """The program's filter."""
    inside: int | None = INSIDE
    """User and group of the program in a user namespace of its own; ``None`` where a container took care of that."""
    user: int = INSIDE
    """User and group of pid 1, as the zygote sees them."""
    spawned: Callable[[], None] = lambda: None
    """Called after each start of a fresh program, which has a copy of this process's memory."""


class HostChannel(Protocol):
    """Connects a session to the host."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the host has sent something."""
        ...

    def recv(self, size: int, /) -> bytes:
        """Receive bytes; none where the host is gone."""
        ...

    def sendall(self, data: bytes, /) -> None:
        """Send bytes."""
        ...


class SessionManager(Protocol):
    """Forks and ends sessions, and knows which processes of the shared pid namespace belong to another session."""

    def other_pids(self, session: object) -> frozenset[int]:
        """Return the processes of all other sessions."""
        ...

    def end_session(self, session: object) -> None:
        """End a session that the host let go of."""
        ...

    def request_fork(self, session: object, channel: ProgramChannel) -> bool:
        """Order the program on the other end to copy itself, and return whether it can read the order."""
        ...

    def complete_fork(self, session: object, pid: int, *, pristine: bool) -> str | None:
        """Make a session out of the stopped copy ``pid``; return why that is impossible, or ``None``."""
        ...
