"""The interfaces between the parts of pid 1: a session's setup, its host, and the manager of its forks."""

import os
import select
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


class ManagedSession(Protocol):
    """One of the sessions that a pid 1 supervises."""

    def end(self) -> None:
        """Kill the session's processes and close its descriptors."""
        ...

    def suspend(self) -> frozenset[int]:
        """Stop every process of the session until its next order, and return which they are."""
        ...


class SessionManager(Protocol):
    """Forks and ends sessions, and tells which processes of the shared pid namespace belong to another session."""

    def other_pids(self, session: ManagedSession) -> frozenset[int]:
        """Return the processes of all other sessions."""
        ...

    def end_session(self, session: ManagedSession) -> None:
        """End a session that the host let go of."""
        ...

    def request_fork(self, session: ManagedSession, channel: ProgramChannel) -> bool:
        """Order the program on the other end to copy itself, and return whether it can read the order."""
        ...

    def complete_fork(self, session: ManagedSession, pid: int, *, pristine: bool) -> str | None:
        """Make a session out of the stopped copy ``pid``; return why that is impossible, or ``None``."""
        ...


class SingleSession:
    """The manager of a session that can't be forked."""

    def other_pids(self, session: ManagedSession) -> frozenset[int]:
        """Return none."""
        return frozenset()

    def end_session(self, session: ManagedSession) -> None:
        """End pid 1, and everything with it."""
        os._exit(0)

    def request_fork(self, session: ManagedSession, channel: ProgramChannel) -> bool:
        """Refuse.

        Raises:
            OSError: Always.
        """
        raise OSError("this back end can't fork sessions")

    def complete_fork(self, session: ManagedSession, pid: int, *, pristine: bool) -> str | None:
        """Refuse."""
        return "this back end can't fork sessions"


class EventHandler(Protocol):
    """Handles the events that pid 1 waits for beside those of its session."""

    def register(self, poll: select.poll) -> None:
        """Add the descriptors to wait for."""
        ...

    def handle(self, ready: dict[int, int]) -> None:
        """Handle the events that have come."""
        ...

    def rotate_key(self) -> None:
        """Change the secret: a program that was just copied from this process has it in its memory."""
        ...
