"""Encodes messages: a length in four big-endian bytes, then JSON; descriptors go beside them.

A message from a program is a *claim*: short, parsed strictly, and believed only where the reader says so.
"""

import errno
import json
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, cast

Message = dict[str, object]
NOTHING: Final[Message] = {"value": None, "exc_type": None, "traceback": None, "exit_code": None}
"""The parts of a cell's outcome, where there are none."""

MAX_CLAIM = 1 << 20
"""Longest message that is read from a program [bytes]."""
MAX_ORDER = 256 << 20
"""Longest message between trusted processes [bytes]."""

# Captured, so that a program that replaces json.dumps in its own process does not change what we send there.
_dumps, _loads, _pack, _unpack = json.dumps, json.loads, struct.pack, struct.unpack
_receive = socket.recv_fds
# Other processes of this user, or of the machine, have too many descriptors: under way, or open.
_CROWDED: Final = frozenset({errno.ETOOMANYREFS, errno.EMFILE, errno.ENFILE})
_AGAIN_S: Final = 0.01


class WireError(Exception):
    """Bytes that are not a message."""


def pack(message: Message) -> bytes:
    """Encode one message."""
    body = _dumps(message).encode("ascii")
    return _pack(">I", len(body)) + body


class Decoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add bytes and return the messages that are complete now.

        Raises:
            WireError: A message is too long, or is not a JSON object.
        """
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= 4:
            size = int(_unpack(">I", self._buffer[:4])[0])
            if size > self._limit:
                raise WireError(f"a message of {size} bytes is longer than {self._limit}")
            if len(self._buffer) < 4 + size:
                break
            messages.append(_parse(bytes(self._buffer[4 : 4 + size])))
            del self._buffer[: 4 + size]
        return messages


def _parse(body: bytes) -> Message:
    try:
        message = _loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError("not a JSON object")
    return cast(Message, message)


def receive(channel: socket.socket, frames: Decoder) -> Message | None:
    """Wait for one message, where only one is under way at a time.

    Returns:
        The message, or ``None`` where the other side has gone.

    Raises:
        WireError: What came is not one message.
    """
    received = receive_with(channel, frames)
    return None if received is None else received[0]


def receive_with(channel: socket.socket, frames: Decoder) -> tuple[Message, list[int]] | None:
    """Wait for one message and the descriptors that come with it, which belong to the caller then.

    Returns:
        The message and at most three descriptors, or ``None`` where the other side has gone.

    Raises:
        WireError: What came is not one message.
    """
    passed: list[int] = []
    while True:
        data, descriptors, _, _ = _receive(channel, 1 << 16, 3)
        passed += descriptors
        if not data:
            return None
        messages = frames.feed(data)
        if messages:
            if len(messages) > 1:
                raise WireError("more than one message at once")
            return messages[0], passed


def send_with(channel: socket.socket, data: bytes, descriptors: Sequence[int], patience: float) -> None:
    """Send a short message with descriptors; try again for a while where the kernel has too many descriptors.

    Args:
        channel: Where to.
        data: The message.
        descriptors: Sent along with it.
        patience: For how long to try [seconds].

    Raises:
        OSError: The other side has gone, or the kernel has too many still.
    """
    until = time.monotonic() + patience
    while True:
        try:
            socket.send_fds(channel, [data], descriptors)
            return
        except OSError as error:
            if error.errno not in _CROWDED or time.monotonic() > until:
                raise
        time.sleep(_AGAIN_S)


def text(message: Message, key: str, limit: int) -> str | None:
    """Take a string or ``null`` of at most ``limit`` characters out of a message, safe to encode as UTF-8.

    Raises:
        WireError: It is missing, is something else, or is too long.
    """
    value = message.get(key, 0)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > limit:
        raise WireError(f"{key} is not a string of at most {limit} characters")
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def number(message: Message, key: str) -> int | None:
    """Take an integer of 64 bits or ``null`` out of a message.

    Raises:
        WireError: It is missing or is something else.
    """
    value = message.get(key, "")
    if value is None:
        return None
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise WireError(f"{key} is not an integer")
    return value


def real(message: Message, key: str) -> float:
    """Take a number out of a message between trusted processes.

    Raises:
        WireError: It is missing or is something else.
    """
    value = message.get(key)
    if not isinstance(value, int | float):
        raise WireError(f"{key} is not a number")
    return float(value)


def cut(value: str, limit: int) -> str:
    """Keep the head and the tail of a text and say how much is missing between them."""
    if len(value) <= limit:
        return value
    head, tail = value[: limit // 2], value[-(limit // 2) :]
    return f"{head}\n… [{len(value) - len(head) - len(tail)} characters cut] …\n{tail}"
