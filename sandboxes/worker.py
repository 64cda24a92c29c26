"""The host's end of one session: a channel for orders and answers, and the pipes of its output."""

import os
import select
import socket
import time
from contextlib import suppress
from typing import Final

from agentrl.sandboxes import wire
from agentrl.sandboxes.base import Limits, SandboxError
from agentrl.sandboxes.capture import Capture

# Patience beyond the deadline. The overseer inside keeps the deadline; when the machine is overloaded it gets little
# time to kill a fork bomb, and to give it up too early would be a fault that nothing caused.
_BACKSTOP_S: Final = 20.0
_UP_S: Final = 60.0
_CHUNK: Final = 1 << 18
# Longest single wait: the kernel takes no more than 24 days.
_LOOK_S: Final = 3600.0


class WorkerDied(SandboxError):
    """The session's trusted process ended while the program ran."""


class Worker:
    """Descriptors of one session; used by one thread at a time, but for :meth:`shut`."""

    def __init__(self, limits: Limits) -> None:
        """Make the descriptors; ``theirs`` belong to the other end and are to be sent there."""
        self._limits = limits
        self._frames = wire.Frames(wire.MAX_ORDER)
        self._channel, theirs = socket.socketpair()
        self._out, out = os.pipe()
        self._err, err = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(self._err, False)
        self._theirs = (theirs.detach(), out, err)
        self._here = self._there = True
        self._up = False

    @property
    def theirs(self) -> tuple[int, int, int]:
        """The other ends: channel, standard output, standard error."""
        return self._theirs

    def sent(self, *, up: bool = False) -> None:
        """Close the other ends, which have been sent.

        Args:
            up: The session is there already and will not announce itself.
        """
        if self._there:
            self._there = False
            for descriptor in self._theirs:
                os.close(descriptor)
        self._up = self._up or up

    def alive(self) -> bool:
        """Whether the other end has not gone; for a session that nobody uses."""
        poll = select.poll()
        poll.register(self._channel, select.POLLRDHUP)
        return not poll.poll(0)

    def await_up(self) -> None:
        """Wait until the program is confined and idle.

        Raises:
            SandboxError: The session did not start.
        """
        if self._up:
            return
        self._channel.settimeout(_UP_S)
        try:
            answer = wire.receive(self._channel, self._frames)
            self._channel.settimeout(None)
        except (OSError, wire.WireError) as error:
            raise SandboxError(f"the session did not start: {error}") from error
        if answer is None or answer["t"] != "up":
            raise SandboxError(f"the session did not start: {answer['why'] if answer else 'its processes ended'}")
        self._up = True

    def ask(
        self, order: wire.Message, descriptors: tuple[int, ...] = ()
    ) -> tuple[wire.Message, tuple[Capture, Capture]]:
        """Send an order and wait for its answer, collecting the output meanwhile.

        Args:
            order: What to do; its ``wall`` bounds the wait.
            descriptors: Sent along with it.

        Raises:
            WorkerDied: The other end went away, broke the protocol, or did not answer in time.
        """
        kept = self._limits.output_kept_bytes
        captures = (Capture(kept), Capture(kept))
        try:
            if descriptors:
                socket.send_fds(self._channel, [wire.pack(order)], descriptors)
            else:
                self._channel.sendall(wire.pack(order))
            return self._listen(captures, wire.real(order, "wall") + _BACKSTOP_S), captures
        except (OSError, wire.WireError) as error:
            raise WorkerDied(f"the session died while the program ran: {error}") from error

    def shut(self) -> None:
        """Wake the thread that is in a call, and let the other end go; any thread may."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def dispose(self) -> None:
        """Close the descriptors, which ends the session. Calling twice is allowed."""
        self.sent()
        if self._here:
            self._here = False
            self._channel.close()
            os.close(self._out)
            os.close(self._err)

    def _listen(self, captures: tuple[Capture, Capture], seconds: float) -> wire.Message:
        pipes = dict(zip((self._out, self._err), captures, strict=True))
        poll = select.poll()
        for descriptor in (self._channel.fileno(), *pipes):
            poll.register(descriptor, select.POLLIN)
        until, killed = time.monotonic() + seconds, False
        while (left := until - time.monotonic()) > 0:
            ready = [descriptor for descriptor, _ in poll.poll(min(left, _LOOK_S) * 1000)]
            if self._channel.fileno() in ready:
                if (answer := self._hear()) is not None:
                    _drain(pipes)
                    return answer
                until = time.monotonic() + seconds
            for descriptor in ready:
                if descriptor in pipes and not _take(descriptor, pipes[descriptor]):
                    poll.unregister(descriptor)
            if not killed and sum(capture.size for capture in captures) > self._limits.output_kill_bytes:
                killed = True
                self._channel.sendall(wire.pack({"t": "kill", "reason": "output_limit"}))
        raise OSError("no answer in time")

    def _hear(self) -> wire.Message | None:
        data = self._channel.recv(_CHUNK)
        if not data:
            raise OSError("its processes ended")
        for message in self._frames.feed(data):
            if message["t"] == "fault":
                raise OSError(str(message["why"]))
            if message["t"] != "waiting":
                return message
        return None


def _drain(pipes: dict[int, Capture]) -> None:
    # A program left behind may go on writing: take what is there, and no more than a pipe can hold.
    for descriptor, capture in pipes.items():
        for _ in range(8):
            if not _take(descriptor, capture):
                break


def _take(descriptor: int, capture: Capture) -> bool:
    """Read what is there; whether there may be more."""
    try:
        data = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return False
    capture.add(data)
    return bool(data)
