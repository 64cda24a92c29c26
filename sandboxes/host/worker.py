"""The host's end of one session: a channel for orders and answers, and the pipes of its output."""

import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from agentrl.sandboxes.base import Limits, SandboxError
from agentrl.sandboxes.host.capture import Capture
from agentrl.sandboxes.inside import wire

# Time beyond a cell's deadline after which its worker counts as dead. Pid 1 enforces the deadline; on an overloaded
# machine it gets little time to kill a fork bomb, and to give up too early would raise an error that nothing caused.
_BACKSTOP_S: Final = 20.0
_START_S: Final = 60.0
_CHUNK: Final = 1 << 18
# Longest single wait: the kernel takes no more than 24 days.
_LOOK_S: Final = 3600.0


class WorkerDied(SandboxError):
    """The session's trusted process ended while the program ran."""


class Worker:
    """The host's descriptors of one session; used by one thread at a time, but for :meth:`shut`."""

    def __init__(self, limits: Limits, send: Callable[[tuple[int, int, int]], None] | None = None) -> None:
        """Make both ends; those in ``remote`` are for the process that serves the session.

        Args:
            limits: What the session may use.
            send: Sends them there; ``None`` leaves that, and :meth:`close_remote`, to the caller.

        Raises:
            SandboxError: There are too many descriptors, or they can't be sent.
        """
        self._limits = limits
        self._decoder = wire.Decoder(wire.MAX_ORDER)
        try:
            self._channel, remote = socket.socketpair()
            self._out, out = os.pipe()
            self._err, err = os.pipe()
        except OSError as error:
            raise SandboxError(f"no descriptors are left for a session: raise `ulimit -n` ({error})") from error
        for reader, writer in ((self._out, out), (self._err, err)):
            os.set_blocking(reader, False)
            # The program is another user, who may open /dev/stdout for writing.
            os.fchmod(writer, 0o622)
        self.remote = (remote.detach(), out, err)
        """The other ends: channel, standard output, standard error."""
        self._open = self._remote_open = True
        self._started = self.spent = False
        """``spent``: its processes are gone, with the session's variables and files, and another worker takes over."""
        if send is not None:
            try:
                send(self.remote)
            except BaseException:
                self.dispose()
                raise
            self.close_remote()

    def close_remote(self, *, started: bool = False) -> None:
        """Close this process's copies of the other ends, which have been sent.

        Args:
            started: The session runs already and will not announce itself.
        """
        # While a copy is open here, the end of the session can't be seen.
        if self._remote_open:
            self._remote_open = False
            for descriptor in self.remote:
                os.close(descriptor)
        self._started = self._started or started

    @property
    def alive(self) -> bool:
        """The other end is open; for a session that nobody uses."""
        poll = select.poll()
        poll.register(self._channel, select.POLLRDHUP)
        return not poll.poll(0)

    def await_started(self) -> None:
        """Wait until the program is confined and idle.

        Raises:
            SandboxError: The session did not start.
        """
        if self._started:
            return
        self._channel.settimeout(_START_S)
        try:
            answer = wire.receive(self._channel, self._decoder)
            self._channel.settimeout(None)
        except (OSError, wire.WireError) as error:
            raise SandboxError(f"the session did not start: {error}") from error
        if answer is None or answer["t"] != "up":
            raise SandboxError(f"the session did not start: {answer['why'] if answer else 'its processes ended'}")
        self._started = True

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
        limit = self._limits.output_kept_bytes
        captures = (Capture(limit), Capture(limit))
        try:
            if descriptors:
                wire.send_with(self._channel, wire.pack(order), descriptors, _BACKSTOP_S)
            else:
                self._channel.sendall(wire.pack(order))
            return self._collect(captures, wire.real(order, "wall") + _BACKSTOP_S), captures
        except (OSError, wire.WireError) as error:
            raise WorkerDied(f"the session died while the program ran: {error}") from error

    def shut(self) -> None:
        """End the session and wake the thread that is in a call; any thread may."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def dispose(self) -> None:
        """Close the descriptors, which ends the session. Calling twice is allowed."""
        self.close_remote()
        if self._open:
            self._open = False
            self._channel.close()
            os.close(self._out)
            os.close(self._err)

    def _collect(self, captures: tuple[Capture, Capture], seconds: float) -> wire.Message:
        pipes = dict(zip((self._out, self._err), captures, strict=True))
        poll = select.poll()
        for descriptor in (self._channel.fileno(), *pipes):
            poll.register(descriptor, select.POLLIN)
        until, killed = time.monotonic() + seconds, False
        while (left := until - time.monotonic()) > 0:
            ready = [descriptor for descriptor, _ in poll.poll(min(left, _LOOK_S) * 1000)]
            if self._channel.fileno() in ready:
                # Everything that the cell wrote is in the pipes by now.
                if (answer := self._receive()) is not None:
                    _drain(pipes)
                    return answer
                # A heartbeat: pid 1 is alive and enforces the deadline, however late it is.
                until = time.monotonic() + seconds
            for descriptor in ready:
                # A closed pipe would be ready for ever.
                if descriptor in pipes and not _take(descriptor, pipes[descriptor]):
                    poll.unregister(descriptor)
            # Only the host sees the output, and only pid 1 can end the process.
            if not killed and sum(capture.size for capture in captures) > self._limits.output_kill_bytes:
                killed = True
                self._channel.sendall(wire.pack({"t": "kill", "reason": "output_limit"}))
        raise OSError("no answer in time")

    def _receive(self) -> wire.Message | None:
        data = self._channel.recv(_CHUNK)
        if not data:
            raise OSError("its processes ended")
        for message in self._decoder.feed(data):
            if message["t"] == "fault":
                raise OSError(str(message["why"]))
            if message["t"] != "waiting":
                return message
        return None


def _drain(pipes: dict[int, Capture]) -> None:
    # A process that the cell left running may go on writing: read no more than a pipe can hold.
    for descriptor, capture in pipes.items():
        for _ in range(8):
            if not _take(descriptor, capture):
                break


def _take(descriptor: int, capture: Capture) -> bool:
    """Read what is in the pipe, and return whether more may come."""
    try:
        data = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return False
    capture.add(data)
    return bool(data)
