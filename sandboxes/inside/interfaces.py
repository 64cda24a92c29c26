"""What the parts of pid 1 share: a session's setup, and the interface of its host."""

from dataclasses import dataclass
from typing import Protocol

from agentrl.sandboxes.inside.launcher import INSIDE
from agentrl.sandboxes.inside.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    """Descriptors and settings that a session's pid 1 gets from the process that it is forked from."""

    channel: int
    """Socket to the host."""
    out: int
    """Pipe to the host for standard output."""
    err: int
    """Pipe to the host for standard error."""
    limits: Limits
    """Limits of the session."""
    seccomp: bytes
    """The program's filter."""
    inside: int | None = INSIDE
    """User and group of the program in a user namespace of its own; ``None`` where a container took care of that."""


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
