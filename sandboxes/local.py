"""The ``local`` back end: every session in its own Linux namespaces on this machine, no daemon and no root needed."""

import base64
import errno
import importlib.util
import math
import os
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, cast

from agentrl.sandboxes import wire
from agentrl.sandboxes.base import (
    MIB,
    Cell,
    Files,
    ForkRefused,
    Health,
    Limits,
    Result,
    SandboxClosed,
    SandboxError,
    State,
    Status,
)
from agentrl.sandboxes.capture import Capture
from agentrl.sandboxes.pool import Nursery, in_background
from agentrl.sandboxes.profiles import PRELOADED, Profile, profile_of
from agentrl.sandboxes.sessions import CellSession, WorkerSandbox
from agentrl.sandboxes.worker import Worker, WorkerDied

_READ_S: Final = 2.0
_FORK_S: Final = 20.0
_MAX_READ: Final = 512 << 10
_NOTE: Final = 64
_LOOK_S: Final = 0.05
_READY_PER_CORE: Final = 2
# Stands in a session's past where its variables were lost, and loses them when that is run again.
_FORGET: Final = Cell(code="import os\nos._exit(1)", transaction=False)


class LocalSandbox(WorkerSandbox):
    """Sessions forked from zygotes, one for each import profile, that have imported what programs will want."""

    backend = "local"

    def __init__(self, limits: Limits, *, ready: int | None = None, packages: Sequence[str] = ()) -> None:
        """Start the plain zygote; the others start when a program first needs them.

        Args:
            limits: What each session may use.
            ready: Sessions that each zygote keeps made in advance; ``None`` for two for each core, 0 for none.
            packages: Installed packages that programs may import beside the usual ones.

        Raises:
            SandboxUnavailable: This machine forbids it; the message names the way out.
            ValueError: ``ready`` is negative.
        """
        super().__init__(limits)
        cores = len(os.sched_getaffinity(0))
        size = _READY_PER_CORE * cores if ready is None else ready
        if size < 0:
            raise ValueError(f"ready must not be negative, not {size}")
        kinds = {profile: _installed(names) for profile, names in PRELOADED.items()}
        nurseries = {names: Nursery(limits, names, size, packages) for names in kinds.values()}
        self._nurseries = {profile: nurseries[names] for profile, names in kinds.items()}
        self._nurseries["plain"].start()

    def preload(self, *profiles: Profile) -> None:
        """Start zygotes and fill their pools in the background, so that the first program need not wait for them."""
        for nursery in {self._nurseries[profile] for profile in profiles or tuple(PRELOADED)}:
            in_background(nursery.start)

    def open(self, seed: int, *, made_now: bool = False) -> "LocalSession":
        """Open a session; see :meth:`WorkerSandbox.open`."""
        return LocalSession(self, seed, made_now=made_now)

    def health(self) -> Health:
        """Say whether the zygotes live; see :meth:`Sandbox.health`."""
        counted = self.counters()
        states = {profile: nursery.state for profile, nursery in self._nurseries.items()}
        return Health(
            ok=not self._closed and "dead" not in states.values(),
            backend=self.backend,
            sessions=self._sessions,
            ready=sum(nursery.ready for nursery in set(self._nurseries.values())),
            faults=counted.faults,
            fault_rate=counted.fault_rate,
            detail=", ".join(f"{profile} zygote {state}" for profile, state in states.items()),
        )

    def take(self, profile: Profile, *, made_now: bool = False) -> Worker:
        """Take a session's processes; see :meth:`WorkerSandbox.take`."""
        return self._nurseries[profile].take(made_now=made_now)

    def close(self) -> None:
        """End every session and wait until no process is left."""
        with self._lock:
            self._closed = True
        for nursery in self._nurseries.values():
            nursery.close()


class LocalSession(CellSession):
    """One pid 1 with its program, asked for when the first cell shows what it needs."""

    def __init__(
        self, sandbox: WorkerSandbox, seed: int, *, turn: "threading.Lock | None" = None, made_now: bool = False
    ) -> None:
        """Note the seed; ``turn`` is shared by a session and its forks, of which one runs at a time."""
        self._open = False
        self._closing = threading.Lock()
        sandbox.enter()
        self._sandbox = sandbox
        self._seed = seed
        self._made_now = made_now
        self._open = True
        self._lock = threading.RLock()
        self._turn = turn or threading.Lock()
        self._worker: Worker | None = None
        self._log: list[Cell] = []

    def run(self, code: str, timeout: float | None = None, transaction: bool = True) -> Result:
        """Run one cell; see :meth:`Session.run`."""
        cell = Cell(code=code, timeout=timeout, transaction=transaction)
        return self._sandbox.meter.measure(lambda: self.execute(cell))

    def execute(self, cell: Cell) -> Result:
        """Run one cell with all its settings, uncounted.

        Raises:
            SandboxError: The sandbox failed.
            ValueError: The code is longer than the limit, or the timeout is not positive.
        """
        order = self._order(cell)
        with self._held():
            try:
                result = self._once(cell, order)
            except WorkerDied:
                if cell.final:
                    raise  # whoever opened this session for one program opens another
                result = self._again(cell)
            if not cell.final:
                self._note(cell, result)
            return result

    def _note(self, cell: Cell, result: Result) -> None:
        if result.state == "lost" and self._log[-1:] != [_FORGET]:
            # The files are there still, so what made them is run again as well.
            self._log.append(_FORGET)
        # Variables that were lost before a cell don't concern what it did itself.
        if result.state == "kept" or (result.state == "lost" and result.status in ("ok", "error")):
            self._log.append(cell)

    def _order(self, cell: Cell) -> wire.Message:
        limits = self._sandbox.limits
        if len(cell.code.encode("utf-8", "surrogatepass")) > limits.code_bytes:
            raise ValueError(f"the code is longer than {limits.code_bytes} bytes")
        cpu = limits.cpu_s if cell.timeout is None else cell.timeout
        if not 0 < cpu < math.inf:
            raise ValueError(f"the timeout must be positive and finite, not {cpu!r}")
        return {
            **{"t": "run", "code": cell.code, "cpu": cpu, "wall": cpu * limits.wall_factor, "stdin": cell.stdin},
            **{"seed": self._seed, "transaction": cell.transaction, "final": cell.final, "files": _encoded(cell.files)},
        }

    def _once(self, cell: Cell, order: wire.Message) -> Result:
        asked = time.monotonic()
        worker = self._connect(profile_of(cell.code, cell.files.values()))
        return self._result(*self._ask(worker, order, asked))

    def _again(self, cell: Cell) -> Result:
        """Run the session's cells and this one in a fresh worker: one that dies of the same cell dies by its doing.

        Raises:
            SandboxError: What went well before fails as well, so it is the machinery.
        """
        self._sandbox.meter.rerun()
        self._made_now = True
        try:
            for past in self._log:
                self._expect(past, self._once(past, self._order(past)))
        except SandboxError:
            self.close()
            raise
        try:
            return replace(self._once(cell, self._order(cell)), attempts=2)
        except WorkerDied:
            self._log.clear()
            return Result(status="crash", attempts=2, state="lost", backend=self._sandbox.backend)

    def _expect(self, past: Cell, again: Result) -> None:
        # Its variables are needed by what follows: a cell that lacks them would be blamed for a NameError.
        if again.state != ("lost" if past is _FORGET else "kept"):
            raise SandboxError(f"the session died, and a cell that ran before ends with {again.status} now")

    def replay(self) -> CellSession:
        """Run this session's cells again; see :meth:`Session.replay`."""
        with self._lock:
            cells = list(self._log)
        again = self._sandbox.open(self._seed)
        try:
            for cell in cells:
                self._sandbox.meter.measure(lambda cell=cell: again.execute(cell))
        except BaseException:
            again.close()
            raise
        return again

    def fork(self) -> CellSession:
        """Copy this session; see :meth:`Session.fork`."""
        with self._held():
            if self._worker is None:
                return LocalSession(self._sandbox, self._seed)
            twin = LocalSession(self._sandbox, self._seed, turn=self._turn)
            try:
                self._copy_into(twin, self._worker)
            except BaseException:
                twin.close()
                raise
            return twin

    def _copy_into(self, twin: "LocalSession", worker: Worker) -> None:
        order: wire.Message = {"t": "fork", "wall": _FORK_S, "transaction": False, "final": False}
        twin._worker = made = Worker(self._sandbox.limits)
        try:
            answer = self._ask(worker, order, time.monotonic(), made.theirs)[0]
        except SandboxError as error:
            self._sandbox.meter.fault(error)
            raise
        if answer["refused"] is not None:
            raise ForkRefused(f"this session can't be forked: {answer['refused']}")
        made.sent(up=True)
        twin._log = list(self._log)

    def read_file(self, path: str, max_bytes: int = MIB) -> bytes:
        """Read the first ``max_bytes`` bytes of a file; see :meth:`Session.read_file`."""
        order: wire.Message = {"t": "read", "path": path, "cpu": _READ_S, "wall": _READ_S}
        data = b""
        if "\0" in path:
            raise ValueError(f"a path holds no NUL character, as {path!r} does")
        with self._held():
            worker = self._connect("plain")
            while len(data) < max_bytes:
                size = min(_MAX_READ, max_bytes - len(data))
                chunk = {"max": size, "offset": len(data), "seed": self._seed, "transaction": True, "final": False}
                try:
                    answer = self._ask(worker, {**order, **chunk}, time.monotonic())[0]
                except SandboxError as error:
                    self._sandbox.meter.fault(error)
                    raise
                piece = _piece(answer, path)
                data += piece[:size]
                if len(piece) < size:
                    break
        return data

    def close(self) -> None:
        """End every process of the session, without waiting for it."""
        with self._closing:
            was_open, self._open = self._open, False
        if was_open:
            self._sandbox.leave()
            # Wakes a thread that is in a call; it lets go of the descriptors then.
            if self._worker is not None:
                self._worker.shut()
            self._dispose()

    def _dispose(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                if self._worker is not None:
                    self._worker.dispose()
            finally:
                self._lock.release()

    def __del__(self) -> None:
        self.close()

    @contextmanager
    def _held(self) -> Generator[None]:
        """Be the one call of this session; a session that is closed meanwhile is let go of afterwards."""
        with self._lock:
            if not self._open:
                raise SandboxClosed("this session is closed")
            try:
                yield
            finally:
                if not self._open:
                    self._dispose()

    def _connect(self, profile: Profile) -> Worker:
        """Give the session's processes; none of the program's code has run where they must be made again."""
        for last in (False, True):
            if self._worker is None:
                self._worker = self._sandbox.take(profile, made_now=self._made_now)
            try:
                if not self._open:
                    raise SandboxClosed("this session was closed during the call")
                self._worker.await_up()
                return self._worker
            except SandboxError as error:
                self._worker.dispose()
                if not self._open:
                    raise SandboxClosed("this session was closed during the call") from error
                if last:
                    self.close()
                    raise
                self._worker = None
        raise AssertionError("the loop returns or raises")

    def _ask(
        self, worker: Worker, order: wire.Message, asked: float, descriptors: tuple[int, ...] = ()
    ) -> tuple[wire.Message, tuple[Capture, Capture], float]:
        """Send an order when a core is free and wait for its answer; ``asked`` is when the queueing began."""
        with self._waiting_for(self._turn), self._waiting_for(self._sandbox.slots):
            queue = time.monotonic() - asked
            try:
                answer, captures = worker.ask(order, descriptors)
            except WorkerDied as error:
                was_open = self._open and not self._sandbox.closed
                if not was_open or order["t"] != "run":
                    self.close()
                if not was_open:
                    raise SandboxClosed("this session was closed during the call") from error
                worker.dispose()
                self._worker = None
                raise
            except BaseException:
                # Ctrl-C, say: the answer is still to come, and would be taken for the next order's.
                self.close()
                raise
        return answer, captures, queue

    @contextmanager
    def _waiting_for(self, gate: "threading.Lock | threading.Semaphore") -> Generator[None]:
        # Looks up now and then, so that closing the session wakes a call that waits for others.
        while not gate.acquire(timeout=_LOOK_S):
            if not self._open:
                raise SandboxClosed("this session was closed during the call")
        try:
            yield
        finally:
            gate.release()

    def _result(self, answer: wire.Message, captures: tuple[Capture, Capture], queue: float) -> Result:
        limits, (out, err) = self._sandbox.limits, captures
        texts = {key: wire.text(answer, key, wire.MAX_CLAIM) for key in ("value", "exc_type", "traceback")}
        long = len(texts["value"] or "") > limits.value_chars or len(texts["traceback"] or "") > limits.traceback_chars
        return Result(
            status=cast(Status, answer["status"]),
            stdout=out.text(),
            stderr=err.text(),
            value=_bounded(texts["value"], limits.value_chars),
            exc_type=texts["exc_type"],
            traceback=_bounded(texts["traceback"], limits.traceback_chars),
            exit_code=wire.number(answer, "exit_code"),
            signal=wire.number(answer, "signal"),
            wall_s=wire.real(answer, "wall"),
            cpu_s=wire.real(answer, "cpu"),
            queue_s=queue,
            max_rss=int(wire.real(answer, "rss")),
            truncated=out.truncated or err.truncated or long,
            state=cast(State, answer["state"]),
            backend=self._sandbox.backend,
        )


def _installed(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if importlib.util.find_spec(name) is not None)


def _piece(answer: wire.Message, path: str) -> bytes:
    """Take what was read out of an answer, or raise what kept the program from reading it."""
    number = wire.number(answer, "errno") if "errno" in answer else None
    if number is not None:
        # The program's word: what is no error of this machine is some error of input.
        number = number if number in errno.errorcode else errno.EIO
        raise OSError(number, os.strerror(number), path)
    content = wire.text(answer, "data", wire.MAX_CLAIM) if "data" in answer else None
    if content is None:
        raise TimeoutError(f"the program did not hand over {path!r}")
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise OSError(errno.EIO, "the program answered with something else than the file", path) from error


def _encoded(files: Files) -> dict[str, str]:
    raw = {name: content.encode() if isinstance(content, str) else content for name, content in files.items()}
    return {name: base64.b64encode(content).decode("ascii") for name, content in raw.items()}


def _bounded(claimed: str | None, limit: int) -> str | None:
    """Cut what a program that speaks for itself did not cut; the note of an honest cut comes on top of the limit."""
    return claimed if claimed is None or len(claimed) <= limit + _NOTE else wire.cut(claimed, limit)
