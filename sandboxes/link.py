"""One stream between the host and a container's runner that carries several: orders, output, and words of the runner.

A frame is a key, in one direction, then one byte that says what it is, the length in four big-endian bytes, and that
many bytes. The host's side is in :mod:`agentrl.sandboxes.docker_container`. No program is given a descriptor
of it; but gVisor lets one open those of pid 1 through ``/proc``, so what comes out of a container carries a key that
programs don't know.
"""

import os
import select
from collections.abc import Iterator
from typing import Final

from agentrl.sandboxes import wire

CHANNEL: Final = b"c"
"""Between the host's session and pid 1."""
OUT: Final = b"o"
"""The program's standard output."""
ERR: Final = b"e"
"""The program's standard error."""
RUNNER: Final = b"r"
"""Between the container's host and the runner: sessions begin and end."""

_HEAD: Final = 5
_CHUNK: Final = 1 << 16
_FULL: Final = 1 << 20
_PIPE_CHUNKS: Final = 16
_LONGEST: Final = 1 << 31


def frame(kind: bytes, data: bytes, key: bytes = b"") -> bytes:
    """Encode one frame."""
    return key + kind + len(data).to_bytes(4, "big") + data


class Cutter:
    """Cuts a stream into pieces of frames, in order, as they come: no frame is ever held whole."""

    def __init__(self, key: bytes = b"") -> None:
        self.key = key
        """What the next frame must begin with; a later one is as long."""
        self._full = len(key) + _HEAD
        self._head = b""
        self._kind = b""
        self._left = 0

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Add bytes and give what they contain: the kind, and the piece.

        Raises:
            agentrl.sandboxes.wire.WireError: This is no such stream.
        """
        view = memoryview(data)
        while view:
            if not self._left:
                taken = min(self._full - len(self._head), len(view))
                self._head, view = self._head + bytes(view[:taken]), view[taken:]
                if len(self._head) < self._full:
                    return
                key, head = self._head[:-_HEAD], self._head[-_HEAD:]
                self._kind, self._left = head[:1], int.from_bytes(head[1:], "big")
                self._head = b""
                if key != self.key:
                    raise wire.WireError("a frame that pid 1 did not send")
                if self._kind not in (CHANNEL, OUT, ERR, RUNNER) or self._left > _LONGEST:
                    raise wire.WireError(f"a frame of kind {self._kind!r} and {self._left} bytes")
            piece, view = view[: self._left], view[self._left :]
            self._left -= len(piece)
            if piece:
                yield self._kind, bytes(piece)


class SessionEnded(Exception):
    """The host has let go of the session."""


class Link:
    """The container's end. For the overseer it is the channel to the host, and it forwards the program's output.

    Writing never blocks: what the host does not take waits here, and while that is much, the program's pipes stay full.
    """

    def __init__(self, source: int = 0, sink: int = 1) -> None:
        self._source = source
        self._sink = sink
        self._cutter = Cutter()
        self._words = wire.Frames(wire.MAX_ORDER)
        self._outbox = bytearray()
        self._pipes: dict[int, bytes] = {}
        self.key = b""
        """What every frame to the host begins with, once the host has said it."""
        os.set_blocking(sink, False)

    def fileno(self) -> int:
        """Give the descriptor that becomes readable when the host says something."""
        return self._source

    def begin(self) -> tuple[int, int]:
        """Make the pipes of a session's program and give the ends that it writes to."""
        self._pipes.clear()
        writers: list[int] = []
        for kind in (OUT, ERR):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self._pipes[reader] = kind
            writers.append(writer)
        return writers[0], writers[1]

    def end(self) -> None:
        """Let go of the session's pipes; everything that could write to them is gone."""
        for reader in self._pipes:
            os.close(reader)
        self._pipes.clear()

    def recv(self, size: int) -> bytes:
        """Wait for bytes from the host's session.

        Raises:
            SessionEnded: There will be none.
        """
        while True:
            found = b""
            for kind, piece in self._read(size):
                if kind == CHANNEL:
                    found += piece
                elif any(word["t"] == "close" for word in self._words.feed(piece)):
                    raise SessionEnded
            if found:
                return found

    def hear(self) -> list[wire.Message]:
        """Wait for words to the runner; bytes of a session that has ended are dropped."""
        words: list[wire.Message] = []
        while not words:
            for kind, piece in self._read(_CHUNK):
                if kind == RUNNER:
                    words += self._words.feed(piece)
        return words

    def _read(self, size: int) -> Iterator[tuple[bytes, bytes]]:
        data = os.read(self._source, size)
        if not data:
            os._exit(0)  # the host is gone, and every process here goes with pid 1
        return self._cutter.feed(data)

    def sendall(self, data: bytes) -> None:
        """Send bytes to the host's session, after the output that came before them."""
        for reader in list(self._pipes):
            for _ in range(_PIPE_CHUNKS):
                if not self._forward(reader):
                    break
        self._outbox += frame(CHANNEL, data, self.key)
        self._push()

    def tell(self, word: wire.Message) -> None:
        """Send a word of the runner and wait until everything is on its way."""
        self._outbox += frame(RUNNER, wire.pack(word), self.key)
        self.flush()

    def part(self) -> None:
        """Change the key, and say the new one under the old."""
        key = os.urandom(len(self.key))
        self._outbox += frame(RUNNER, wire.pack({"t": "key", "key": key.hex()}), self.key)
        self.key = key

    def flush(self) -> None:
        """Wait until the host has taken everything."""
        while self._outbox:
            poll = select.poll()
            poll.register(self._sink, select.POLLOUT)
            poll.poll()
            self._push()

    def register(self, poll: select.poll) -> None:
        """Add what the next wait should also wait for."""
        if self._outbox:
            poll.register(self._sink, select.POLLOUT)
        if len(self._outbox) < _FULL:
            for reader in self._pipes:
                poll.register(reader, select.POLLIN)

    def move(self, ready: dict[int, int]) -> None:
        """Forward what is there."""
        for reader in [reader for reader in self._pipes if reader in ready]:
            self._forward(reader)
        self._push()

    def _forward(self, reader: int) -> bool:
        try:
            data = os.read(reader, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._outbox += frame(self._pipes[reader], data, self.key)
        return bool(data)

    def _push(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: os.write(self._sink, self._outbox[:_FULL])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            os._exit(0)
