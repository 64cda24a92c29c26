"""The ``local`` back end: every session in its own Linux namespaces on this machine, no daemon and no root needed."""

import base64
import os
import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Final, cast

from agentrl.sandboxes import wire
from agentrl.sandboxes.base import MIB, Cell, Files, Limits, Result, Sandbox, SandboxError, Session, State, Status
from agentrl.sandboxes.capture import Capture
from agentrl.sandboxes.host import Zygote

_BACKSTOP_S: Final = 5.0
_UP_S: Final = 60.0
_READ_S: Final = 2.0
_CHUNK: Final = 1 << 18
_MAX_READ: Final = 512 << 10


class _WorkerDied(SandboxError):
    """The session's trusted process ended while the program ran."""


class LocalSandbox(Sandbox):
    """Sessions forked from one zygote that has numpy and sympy imported already."""

    backend = "local"

    def __init__(self, limits: Limits) -> None:
        """Start the zygote.

        Raises:
            SandboxUnavailable: This machine forbids it; the message names the way out.
        """
        self.limits = limits
        self._lock = threading.Lock()
        self._closed = False
        self._zygote = Zygote(limits)
        # More running cells than cores only make each other's clocks run out.
        self.slots = threading.Semaphore(max(2, len(os.sched_getaffinity(0))))
        """Held while a cell runs."""

    def session(self, seed: int = 0) -> "LocalSession":
        """Open a session; see :meth:`Sandbox.session`."""
        return LocalSession(self, seed)

    def run(
        self, code: str, *, timeout: float | None = None, stdin: str = "", files: Files | None = None, seed: int = 0
    ) -> Result:
        """Run one program in a fresh session; see :meth:`Sandbox.run`."""
        cell = Cell(code=code, timeout=timeout, transaction=False, stdin=stdin, files=files or {}, final=True)
        for attempt in (1, 2):
            with self.session(seed) as session:
                try:
                    return replace(session.execute(cell), attempts=attempt)
                except _WorkerDied:
                    # Once may be the machine's fault; twice is the program's.
                    continue
        return Result(status="crash", attempts=2, state="lost", backend=self.backend)

    def connect(self, channel: socket.socket, out: int, err: int) -> None:
        """Have the zygote make a session; a zygote that has died is replaced once.

        Raises:
            SandboxError: The sandbox is closed, or the zygote can't be started again.
        """
        with self._lock:
            if self._closed:
                raise SandboxError("this sandbox is closed")
            zygote = self._zygote
        try:
            zygote.open(channel, out, err)
        except SandboxError:
            self._replace(zygote).open(channel, out, err)

    def _replace(self, dead: Zygote) -> Zygote:
        with self._lock:
            if self._closed:
                raise SandboxError("this sandbox is closed")
            if self._zygote is dead:
                dead.close()
                self._zygote = Zygote(self.limits)
            return self._zygote

    def close(self) -> None:
        """End every session and wait until no process is left."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._zygote.close()


class LocalSession(Session):
    """One pid 1 with its program, and the pipes to them."""

    def __init__(self, sandbox: LocalSandbox, seed: int) -> None:
        """Ask for the session's processes; they are awaited with the first cell."""
        self._sandbox = sandbox
        self._seed = seed
        self._open = self._descriptors = False
        self._lock = threading.RLock()
        self._up = False
        self._log: list[Cell] = []
        self._frames = wire.Frames(wire.MAX_ORDER)
        self._channel, theirs = socket.socketpair()
        self._out, out = os.pipe()
        self._err, err = os.pipe()
        self._open = self._descriptors = True
        try:
            sandbox.connect(theirs, out, err)
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
            os.close(out)
            os.close(err)
        os.set_blocking(self._out, False)
        os.set_blocking(self._err, False)

    def run(self, code: str, timeout: float | None = None, transaction: bool = True) -> Result:
        """Run one cell; see :meth:`Session.run`."""
        return self.execute(Cell(code=code, timeout=timeout, transaction=transaction))

    def execute(self, cell: Cell) -> Result:
        """Run one cell with all its settings.

        Raises:
            SandboxError: The sandbox failed.
            ValueError: The code is longer than the limit, or the timeout is not positive.
        """
        limits = self._sandbox.limits
        if len(cell.code.encode("utf-8", "surrogatepass")) > limits.code_bytes:
            raise ValueError(f"the code is longer than {limits.code_bytes} bytes")
        cpu = limits.cpu_s if cell.timeout is None else cell.timeout
        if not cpu > 0:
            raise ValueError(f"the timeout must be positive, not {cpu!r}")
        order: wire.Message = {
            **{"t": "run", "code": cell.code, "cpu": cpu, "wall": cpu * limits.wall_factor, "stdin": cell.stdin},
            **{"seed": self._seed, "transaction": cell.transaction, "final": cell.final, "files": _encoded(cell.files)},
        }
        with self._lock:
            result = self._exchange(order)
            if result.state == "kept" and not cell.final:
                self._log.append(cell)
            return result

    def replay(self) -> "LocalSession":
        """Run this session's cells again; see :meth:`Session.replay`."""
        with self._lock:
            cells = list(self._log)
        again = LocalSession(self._sandbox, self._seed)
        try:
            for cell in cells:
                again.execute(cell)
        except BaseException:
            again.close()
            raise
        return again

    def read_file(self, path: str, max_bytes: int = MIB) -> bytes:
        """Read the first ``max_bytes`` bytes of a file; see :meth:`Session.read_file`."""
        order: wire.Message = {"t": "read", "path": path, "cpu": _READ_S, "wall": _READ_S}
        data = b""
        with self._lock:
            while len(data) < max_bytes:
                size = min(_MAX_READ, max_bytes - len(data))
                chunk = {"max": size, "offset": len(data), "seed": self._seed, "transaction": True, "final": False}
                answer = self._ask({**order, **chunk})[0]
                number = wire.number(answer, "errno") if "errno" in answer else None
                if number is not None:
                    raise OSError(number, os.strerror(number), path)
                content = wire.text(answer, "data", _CHUNK * 8) if "data" in answer else None
                if content is None:
                    raise TimeoutError(f"the program did not hand over {path!r}")
                piece = base64.b64decode(content)
                data += piece
                if len(piece) < size:
                    break
        return data

    def close(self) -> None:
        """End every process of the session, without waiting for it."""
        if self._open:
            self._open = False
            # Wakes a thread that is in a call; it lets go of the descriptors then.
            with suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)
        if self._lock.acquire(blocking=False):
            try:
                self._dispose()
            finally:
                self._lock.release()

    def _dispose(self) -> None:
        if self._descriptors:
            self._descriptors = False
            self._channel.close()
            os.close(self._out)
            os.close(self._err)

    def __del__(self) -> None:
        self.close()

    def _exchange(self, order: wire.Message) -> Result:
        limits, name = self._sandbox.limits, self._sandbox.backend
        answer, captures, queue = self._ask(order)
        out, err = captures
        texts = {key: wire.text(answer, key, wire.MAX_CLAIM) for key in ("value", "exc_type", "traceback")}
        long = len(texts["value"] or "") > limits.value_chars or len(texts["traceback"] or "") > limits.traceback_chars
        return Result(
            status=cast(Status, answer["status"]),
            stdout=out.text(),
            stderr=err.text(),
            value=texts["value"],
            exc_type=texts["exc_type"],
            traceback=texts["traceback"],
            exit_code=wire.number(answer, "exit_code"),
            signal=wire.number(answer, "signal"),
            wall_s=wire.real(answer, "wall"),
            cpu_s=wire.real(answer, "cpu"),
            queue_s=queue,
            max_rss=int(wire.real(answer, "rss")),
            truncated=out.truncated or err.truncated or long,
            state=cast(State, answer["state"]),
            backend=name,
        )

    def _ask(self, order: wire.Message) -> tuple[wire.Message, tuple[Capture, Capture], float]:
        """Send an order when a core is free and wait for its answer, collecting the output meanwhile."""
        asked = time.monotonic()
        self._await_up()
        with self._sandbox.slots:
            queue = time.monotonic() - asked
            captures = (
                Capture(self._sandbox.limits.output_kept_bytes),
                Capture(self._sandbox.limits.output_kept_bytes),
            )
            try:
                self._channel.sendall(wire.pack(order))
                answer = self._listen(captures, wire.real(order, "wall") + _BACKSTOP_S)
            except (OSError, wire.WireError) as error:
                was_open = self._open
                self.close()
                if not was_open:
                    raise SandboxError("this session was closed during the call") from error
                raise _WorkerDied(f"the session died while the program ran: {error}") from error
        return answer, captures, queue

    def _await_up(self) -> None:
        if not self._open:
            raise SandboxError("this session is closed")
        if self._up:
            return
        self._channel.settimeout(_UP_S)
        try:
            answer = wire.receive(self._channel, self._frames)
        except (OSError, wire.WireError) as error:
            self.close()
            raise SandboxError(f"the session did not start: {error}") from error
        self._channel.settimeout(None)
        if answer is None or answer["t"] != "up":
            self.close()
            raise SandboxError(f"the session did not start: {answer['why'] if answer else 'its processes ended'}")
        self._up = True

    def _listen(self, captures: tuple[Capture, Capture], seconds: float) -> wire.Message:
        pipes = dict(zip((self._out, self._err), captures, strict=True))
        poll = select.poll()
        for descriptor in (self._channel.fileno(), *pipes):
            poll.register(descriptor, select.POLLIN)
        until, killed = time.monotonic() + seconds, False
        while (left := until - time.monotonic()) > 0:
            ready = [descriptor for descriptor, _ in poll.poll(left * 1000)]
            if self._channel.fileno() in ready and (answer := self._hear()) is not None:
                self._drain(pipes)
                return answer
            for descriptor in ready:
                if descriptor in pipes and not _take(descriptor, pipes[descriptor]):
                    poll.unregister(descriptor)
            if not killed and sum(capture.size for capture in captures) > self._sandbox.limits.output_kill_bytes:
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
            return message
        return None

    def _drain(self, pipes: dict[int, Capture]) -> None:
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


def _encoded(files: Files) -> dict[str, str]:
    raw = {name: content.encode() if isinstance(content, str) else content for name, content in files.items()}
    return {name: base64.b64encode(content).decode("ascii") for name, content in raw.items()}
