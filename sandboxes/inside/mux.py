"""Multiplexes the stream between the host and a container's runner: orders, output, and control messages.

A frame is a key, in one direction, then one byte for the kind, the length in four big-endian bytes, and that many
bytes. The host's side is in :mod:`agentrl.sandboxes.docker.container`. No program is given a descriptor of the stream.
But gVisor lets a program open those of pid 1 through ``/proc``, so frames to the host carry a key unknown to it.
"""

import os
import select
from collections.abc import Iterator
from typing import Final

from agentrl.sandboxes.inside import wire

CHANNEL: Final = b"c"
"""Between the host's session and pid 1."""
OUT: Final = b"o"
"""The program's standard output."""
ERR: Final = b"e"
"""The program's standard error."""
CONTROL: Final = b"r"
"""Between the container's host and the runner: messages that begin and end sessions."""

_HEAD: Final = 5
_CHUNK: Final = 1 << 16
_FULL: Final = 1 << 20
_PIPE_CHUNKS: Final = 16
_LONGEST: Final = 1 << 31


def frame(kind: bytes, data: bytes, key: bytes = b"") -> bytes:
    """Encode one frame."""
    return key + kind + len(data).to_bytes(4, "big") + data


class FrameDecoder:
    """Cuts a stream into pieces of frames, in order, as they come: it buffers no payload."""

    def __init__(self, key: bytes = b"") -> None:
        self.key = key
        """Key that the next frame must begin with; a later one is as long."""
        self._full = len(key) + _HEAD
        self._head = b""
        self._kind = b""
        self._left = 0

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Add bytes and yield what they contain: the kind, and the piece.

        Raises:
            agentrl.sandboxes.inside.wire.WireError: They are no frame, or lack the key.
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
                if self._kind not in (CHANNEL, OUT, ERR, CONTROL) or self._left > _LONGEST:
                    raise wire.WireError(f"a frame of kind {self._kind!r} and {self._left} bytes")
            piece, view = view[: self._left], view[self._left :]
            self._left -= len(piece)
            if piece:
                yield self._kind, bytes(piece)


class SessionEnded(Exception):
    """The host has let go of the session."""


class Mux:
    """The container's end: the supervisor's channel to the host, which also forwards the program's output.

    Writing never blocks: what the host does not read waits here, and while that is much, the program's pipes stay full.
    """

    def __init__(self, source: int = 0, sink: int = 1) -> None:
        self._source = source
        self._sink = sink
        self._decoder = FrameDecoder()
        self._messages = wire.Decoder(wire.MAX_ORDER)
        self._outbox = bytearray()
        self._pipes: dict[int, bytes] = {}
        self.key = b""
        """Begins every frame to the host; the host chooses the first one."""
        os.set_blocking(sink, False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the host has sent something."""
        return self._source

    def open_pipes(self) -> tuple[int, int]:
        """Make the pipes of a session's program and return the ends that it writes to."""
        self._pipes.clear()
        writers: list[int] = []
        for kind in (OUT, ERR):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self._pipes[reader] = kind
            writers.append(writer)
        return writers[0], writers[1]

    def close_pipes(self) -> None:
        """Close the session's pipes; every process that could write to them is gone."""
        for reader in self._pipes:
            os.close(reader)
        self._pipes.clear()

    def recv(self, size: int) -> bytes:
        """Wait for bytes from the host's session.

        Raises:
            SessionEnded: There will be none.
        """
        while True:
            data = b""
            for kind, piece in self._read(size):
                if kind == CHANNEL:
                    data += piece
                elif any(message["t"] == "close" for message in self._messages.feed(piece)):
                    raise SessionEnded
            if data:
                return data

    def receive_control(self) -> list[wire.Message]:
        """Wait for control messages; bytes of a session that has ended are dropped."""
        messages: list[wire.Message] = []
        while not messages:
            for kind, piece in self._read(_CHUNK):
                if kind == CONTROL:
                    messages += self._messages.feed(piece)
        return messages

    def _read(self, size: int) -> Iterator[tuple[bytes, bytes]]:
        data = os.read(self._source, size)
        if not data:
            os._exit(0)  # the host is gone, and every process here goes with pid 1
        return self._decoder.feed(data)

    def sendall(self, data: bytes) -> None:
        """Send bytes to the host's session, after the output that came before them."""
        # The host takes a cell's output as complete when the answer comes.
        for reader in list(self._pipes):
            for _ in range(_PIPE_CHUNKS):
                if not self._forward(reader):
                    break
        self._outbox += frame(CHANNEL, data, self.key)
        self._push()

    def send_control(self, message: wire.Message) -> None:
        """Send a control message and wait until the host has taken everything."""
        self._outbox += frame(CONTROL, wire.pack(message), self.key)
        self.flush()

    def rotate_key(self) -> None:
        """Change the key, and send the new one under the old."""
        key = os.urandom(len(self.key))
        self._outbox += frame(CONTROL, wire.pack({"t": "key", "key": key.hex()}), self.key)
        self.key = key

    def flush(self) -> None:
        """Wait until the host has taken everything."""
        while self._outbox:
            poll = select.poll()
            poll.register(self._sink, select.POLLOUT)
            poll.poll()
            self._push()

    def register(self, poll: select.poll) -> None:
        """Add the descriptors to wait for."""
        if self._outbox:
            poll.register(self._sink, select.POLLOUT)
        # Back pressure: beyond this the program blocks on its pipes, as it would on a slow terminal.
        if len(self._outbox) < _FULL:
            for reader in self._pipes:
                poll.register(reader, select.POLLIN)

    def handle(self, ready: dict[int, int]) -> None:
        """Forward the output that has come."""
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
