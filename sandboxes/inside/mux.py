"""Multiplexes the stream between the host and a container's runner: orders, output, and control messages.

Everything travels as the messages of :mod:`agentrl.sandboxes.inside.wire`. Those of type ``channel``, ``out`` and
``err`` carry a session's bytes; the others begin and end sessions. The host's side is in
:mod:`agentrl.sandboxes.docker.container`. No program is given a descriptor of the stream. But gVisor lets a program
open those of pid 1 through ``/proc``, so messages to the host carry a key unknown to it.
"""

import base64
import os
import secrets
import select
from typing import Final

from agentrl.sandboxes.inside import wire

_CHUNK: Final = 1 << 16
_FULL: Final = 1 << 20
_PIPE_CHUNKS: Final = 16


def carry(kind: str, data: bytes) -> wire.Message:
    """Return the message that carries a session's bytes: ``channel``, or the program's output, ``out`` or ``err``."""
    return {"t": kind, "data": base64.b64encode(data).decode()}


def carried(message: wire.Message) -> bytes:
    """Return the bytes that a message carries.

    Raises:
        agentrl.sandboxes.inside.wire.WireError: They are no text.
        ValueError: The text is not their code.
    """
    return base64.b64decode(wire.text(message, "data", wire.MAX_CLAIM) or "", validate=True)


class SessionEnded(Exception):
    """The host has let go of the session."""


class Mux:
    """The container's end: the supervisor's channel to the host, which also forwards the program's output.

    Writing never blocks: what the host does not read waits here, and while that is much, the program's pipes stay full.
    """

    def __init__(self, source: int = 0, sink: int = 1) -> None:
        self._source = source
        self._sink = sink
        self._decoder = wire.Decoder(wire.MAX_CLAIM)
        self._outbox = bytearray()
        self._pipes: dict[int, str] = {}
        self.key = ""
        """Part of every message to the host, which chooses the first one."""
        os.set_blocking(sink, False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the host has sent something."""
        return self._source

    def open_pipes(self) -> tuple[int, int]:
        """Make the pipes of a session's program and return the ends that it writes to."""
        writers: list[int] = []
        for kind in ("out", "err"):
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
            for message in self._read(size):
                if message["t"] == "close":
                    raise SessionEnded
                if message["t"] == "channel":
                    data += carried(message)
            if data:
                return data

    def receive_control(self) -> list[wire.Message]:
        """Wait for control messages; bytes of a session that has ended are dropped."""
        messages: list[wire.Message] = []
        while not messages:
            messages = [message for message in self._read(_CHUNK) if message["t"] != "channel"]
        return messages

    def _read(self, size: int) -> list[wire.Message]:
        data = os.read(self._source, size)
        if not data:
            os._exit(0)  # the host is gone, and every process here goes with pid 1
        return self._decoder.feed(data)

    def _send(self, message: wire.Message) -> None:
        self._outbox += wire.pack({"key": self.key, **message})

    def sendall(self, data: bytes) -> None:
        """Send bytes to the host's session, after the output that came before them."""
        # The host takes a cell's output as complete when the answer comes.
        for reader in list(self._pipes):
            for _ in range(_PIPE_CHUNKS):
                if not self._forward(reader):
                    break
        # In pieces, so that the host need not wait for a long message to see that it lacks the key.
        for start in range(0, len(data), _CHUNK):
            self._send(carry("channel", data[start : start + _CHUNK]))
        self._push()

    def send_control(self, message: wire.Message) -> None:
        """Send a control message and wait until the host has taken everything."""
        self._send(message)
        self.flush()

    def rotate_key(self) -> None:
        """Change the key, and send the new one under the old."""
        key = secrets.token_hex(16)
        self._send({"t": "key", "next": key})
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
            self._send(carry(self._pipes[reader], data))
        return bool(data)

    def _push(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: os.write(self._sink, self._outbox[:_FULL])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            os._exit(0)
