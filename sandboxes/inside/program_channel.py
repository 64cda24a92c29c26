"""Connects pid 1 to a program: orders go one way, claims come the other, and pid 1 never blocks on either."""

import os
import select
import socket
from collections.abc import Iterator
from typing import Final

from agentrl.sandboxes.inside import processes, wire

_CHUNKS: Final = 16
_PATIENCE_S: Final = 1.0


class ProgramChannel:
    """Pid 1's end of a channel."""

    def __init__(self) -> None:
        """Connect two sockets. The program's is kept as well: closing its copy must not end the channel."""
        self._own_end, self._program_end = socket.socketpair()
        self._own_end.setblocking(False)
        self._decoder = wire.Decoder(wire.MAX_CLAIM)
        self._outbox = b""
        self.shut = False
        """The program has shut one or both directions of the channel."""
        self.pid = self._pidfd = -1
        """The program's process; -1 before :meth:`track`."""

    @property
    def program_end(self) -> int:
        """Descriptor of the program's end."""
        return self._program_end.fileno()

    def register(self, poll: select.poll) -> None:
        """Add the descriptors to wait for."""
        if not self.shut:
            poll.register(self._own_end, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        if self._pidfd >= 0:
            poll.register(self._pidfd, select.POLLIN)

    def track(self, pid: int) -> None:
        """Note the process of the program."""
        self.pid, self._pidfd = pid, processes.exit_descriptor(pid)

    def has_ended(self, ready: dict[int, int]) -> bool:
        """Return whether the program has ended, which makes one of the descriptors ready."""
        return self._pidfd in ready and processes.has_ended(self.pid)

    def is_ready(self, ready: dict[int, int]) -> bool:
        """Return whether there are bytes to read, or room to write."""
        return self._own_end.fileno() in ready

    def send(self, order: wire.Message) -> None:
        """Send an order; :meth:`flush` sends what does not fit into the socket now."""
        self._outbox += wire.pack(order)
        self.flush()

    def flush(self) -> None:
        """Send what is left of the last order."""
        try:
            if self._outbox:
                self._outbox = self._outbox[self._own_end.send(self._outbox) :]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self.shut = True

    def send_fds(self, order: wire.Message, descriptors: list[int]) -> bool:
        """Send a short order with descriptors, and return whether the program can read it."""
        # A session that can't be copied continues without a snapshot: whatever the reason, that is no fault.
        try:
            wire.send_with(self._own_end, wire.pack(order), descriptors, _PATIENCE_S)
        except OSError:
            return False
        return True

    def read(self) -> Iterator[bytes]:
        """Read what the program has written, in pieces."""
        # A bound: a program that writes without end must not keep pid 1 from its clock.
        for _ in range(_CHUNKS):
            try:
                data = self._own_end.recv(1 << 18)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                self.shut = True
                return
            yield data

    def decode(self, data: bytes) -> list[wire.Message]:
        """Cut bytes into claims.

        Raises:
            agentrl.sandboxes.inside.wire.WireError: They are none.
        """
        return self._decoder.feed(data)

    def reset(self) -> None:
        """Drop a claim that is incomplete."""
        self._decoder = wire.Decoder(wire.MAX_CLAIM)

    def close(self) -> None:
        """Close both ends, and stop to track the program."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._own_end.close()
        self._program_end.close()
