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


class SessionManager:
    """Forks and ends sessions, and knows which processes of the shared pid namespace belong to another session.

    This one is for a session that is alone in its container: it has no forks, and the container's runner ends it.
    """

    def other_pids(self) -> frozenset[int]:
        """Return the processes of all sessions but the active one."""
        return frozenset()

    def end_session(self) -> None:
        """End the active session, which the host let go of."""
        raise AssertionError("a session that is alone is ended by its container's runner")

    def request_fork(self, channel: ProgramChannel) -> bool:
        """Order the active session's program to copy itself, and return whether it can read the order."""
        raise AssertionError("a session that is alone can't be forked")

    def complete_fork(self, pid: int, *, pristine: bool) -> str | None:
        """Make a session out of the stopped copy ``pid``; return why that is impossible, or ``None``."""
        raise AssertionError("a session that is alone can't be forked")
