"""What the process that a session is forked from leaves to the session's pid 1."""

import os
import select
from dataclasses import dataclass
from typing import Protocol

from agentrl.sandboxes.base import Limits
from agentrl.sandboxes.launcher import INSIDE
from agentrl.sandboxes.line import Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """What the zygote leaves to a session."""

    channel: int
    """Socket to the host."""
    out: int
    """Pipe to the host for standard output."""
    err: int
    """Pipe to the host for standard error."""
    limits: Limits
    """What the session may use."""
    seccomp: bytes
    """The program's filter."""
    inside: int | None = INSIDE
    """User and group of the program in a user namespace of its own; ``None`` where a container took care of that."""


class Channel(Protocol):
    """What connects a session to the host."""

    def fileno(self) -> int:
        """Give the descriptor that becomes readable when the host says something."""
        ...

    def recv(self, size: int, /) -> bytes:
        """Take what the host said; nothing where the host is gone."""
        ...

    def sendall(self, data: bytes, /) -> None:
        """Tell the host something."""
        ...


class Member(Protocol):
    """One of the sessions that a pid 1 oversees."""

    def end(self) -> None:
        """Kill the session's processes and let go of its descriptors."""
        ...

    def rest(self) -> frozenset[int]:
        """Stop every process of the session until its next order, and give which they are."""
        ...


class Kin(Protocol):
    """What a session must know of the sessions that were forked from it, or it from them, in the same pid namespace."""

    def spared(self, member: Member) -> frozenset[int]:
        """Give the processes of all other sessions."""
        ...

    def leave(self, member: Member) -> None:
        """End a session that the host let go of."""
        ...

    def ask_fork(self, member: Member, line: Line) -> bool:
        """Tell the program on the other end to copy itself; whether it can hear."""
        ...

    def fork(self, member: Member, pid: int, *, pristine: bool) -> str | None:
        """Make a session out of the stopped copy ``pid``; give what stands in the way, or ``None``."""
        ...


class Alone:
    """The kin of a session that can't be forked."""

    def spared(self, member: Member) -> frozenset[int]:
        """Give none."""
        return frozenset()

    def leave(self, member: Member) -> None:
        """End pid 1, and everything with it."""
        os._exit(0)

    def ask_fork(self, member: Member, line: Line) -> bool:
        """Tell the host that nothing knows how.

        Raises:
            OSError: Always.
        """
        raise OSError("this back end can't fork sessions")

    def fork(self, member: Member, pid: int, *, pristine: bool) -> str | None:
        """Refuse."""
        return "this back end can't fork sessions"


class Aside(Protocol):
    """What pid 1 has to do beside overseeing, in the same wait."""

    def register(self, poll: select.poll) -> None:
        """Add what to wait for."""
        ...

    def move(self, ready: dict[int, int]) -> None:
        """Do what has become possible."""
        ...

    def part(self) -> None:
        """Change every secret: a program that was just copied from this process has them in its memory."""
        ...
