"""What connects pid 1 to a program: orders go one way, claims come the other, and pid 1 never waits for either."""

import select
import socket
from collections.abc import Iterator
from typing import Final

from agentrl.sandboxes import wire

_CHUNKS: Final = 16


class Line:
    """Pid 1's end of a channel; the program's is kept as well, so that closing its copy does not end the channel."""

    def __init__(self, ends: tuple[socket.socket, socket.socket] | None = None) -> None:
        """Take over two connected sockets, pid 1's first, or make some."""
        self._here, self._there = ends or socket.socketpair()
        self._here.setblocking(False)
        self._frames = wire.Frames(wire.MAX_CLAIM)
        self._outbox = b""
        self.cut = False
        """Whether the program has shut the channel, so that it hears nothing more, or says nothing more."""

    @property
    def there(self) -> int:
        """The program's end."""
        return self._there.fileno()

    def register(self, poll: select.poll) -> None:
        """Add what to wait for."""
        if not self.cut:
            poll.register(self._here, select.POLLIN | (select.POLLOUT if self._outbox else 0))

    def is_in(self, ready: dict[int, int]) -> bool:
        """Whether there is something to take or room for more."""
        return self._here.fileno() in ready

    def send(self, order: wire.Message) -> None:
        """Send an order; what does not fit in now goes with :meth:`push`."""
        self._outbox += wire.pack(order)
        self.push()

    def push(self) -> None:
        """Send what is left of the last order."""
        try:
            if self._outbox:
                self._outbox = self._outbox[self._here.send(self._outbox) :]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self.cut = True

    def hand_over(self, order: wire.Message, descriptors: list[int]) -> bool:
        """Send a short order with descriptors; whether the program can have it."""
        try:
            socket.send_fds(self._here, [wire.pack(order)], descriptors)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return False
        return True

    def chunks(self) -> Iterator[bytes]:
        """Take what the program has said."""
        for _ in range(_CHUNKS):
            try:
                data = self._here.recv(1 << 18)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                self.cut = True
                return
            yield data

    def claims(self, data: bytes) -> list[wire.Message]:
        """Cut what was said into claims.

        Raises:
            agentrl.sandboxes.wire.WireError: It does not keep to the form.
        """
        return self._frames.feed(data)

    def forget(self) -> None:
        """Forget a claim that was begun."""
        self._frames = wire.Frames(wire.MAX_CLAIM)

    def close(self) -> None:
        """Let go of both ends."""
        self._here.close()
        self._there.close()
