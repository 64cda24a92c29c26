"""Sessions in workers, and the base of back ends that have them: one-shot runs, a bound on running cells, counting."""

import os
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from agentrl.sandboxes.base import (
    MIB,
    Cell,
    Counters,
    Files,
    ForkRefused,
    Health,
    Limits,
    Result,
    Sandbox,
    SandboxClosed,
    SandboxError,
    Session,
)
from agentrl.sandboxes.host.counters import Meter
from agentrl.sandboxes.host.messages import Answer, file_piece, run_order, run_result
from agentrl.sandboxes.host.profiles import Profile, profile_of
from agentrl.sandboxes.host.worker import Worker, WorkerDied
from agentrl.sandboxes.inside import wire

_READ_S: Final = 2.0
_FORK_S: Final = 20.0
_MAX_READ: Final = 512 << 10
_LOOK_S: Final = 0.05
_READY_PER_CORE: Final = 2
# Stands in a session's history where its variables were lost: a rerun loses them at the same point.
_LOSE_STATE: Final = Cell(code="import os\nos._exit(1)", transaction=False)


class WorkerSession(Session):
    """One pid 1 with its program, taken when the first cell shows which modules it needs."""

    def __init__(self, sandbox: "WorkerSandbox", seed: int, *, turn: "threading.Lock | None" = None) -> None:
        """Note the seed; ``turn`` is shared by a session and its forks, of which one runs at a time."""
        # First what __del__ needs: the next lines may raise.
        self._open = False
        self._closing = threading.Lock()
        sandbox.count_opened()
        self._sandbox = sandbox
        self._seed = seed
        self._fresh = False
        """Its next worker may be none that was made before."""
        self._open = True
        self._lock = threading.RLock()
        self._turn = turn or threading.Lock()
        self._worker: Worker | None = None
        self._history: list[Cell] = []

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
        with self._exclusive():
            try:
                result = self._attempt(cell, order)
            except WorkerDied:
                result = None
            # The machine may have killed a one-shot program once; twice it is the program's doing.
            if result is None or (cell.final and result.signal == signal.SIGKILL):
                result = self._rerun(cell)
            self._record(cell, result)
            return result

    def _order(self, cell: Cell) -> wire.Message:
        return run_order(cell, self._seed, self._sandbox.limits)

    def _record(self, cell: Cell, result: Result) -> None:
        if result.state == "lost" and self._history[-1:] != [_LOSE_STATE]:
            # The cells before stay in the history: the files that they made are still there.
            self._history.append(_LOSE_STATE)
        # A cell that ended by itself did its work, even where the variables had been lost before it.
        if result.state == "kept" or (result.state == "lost" and result.status in ("ok", "error")):
            self._history.append(cell)

    def _attempt(self, cell: Cell, order: wire.Message) -> Result:
        asked = time.monotonic()
        worker = self._start_worker(profile_of(cell.code, cell.files.values()))
        return run_result(*self._ask(worker, order, asked), self._sandbox.limits, self._sandbox.backend)

    def _rerun(self, cell: Cell) -> Result:
        """Run the history and this cell in a fresh worker; where that dies of the cell too, the cell is to blame.

        Raises:
            SandboxError: A cell of the history fails as well, so the machinery is to blame.
        """
        self._sandbox.meter.rerun()
        # A second death is the program's doing only in a worker that the cause of the first can't have reached.
        self._fresh = True
        self._drop_worker()
        try:
            for past in self._history:
                again = self._attempt(past, self._order(past))
                # Later cells need the variables of this one, and would be blamed for a NameError.
                if again.state != ("lost" if past is _LOSE_STATE else "kept"):
                    raise SandboxError(f"the session died, and a cell that ran before ends with {again.status} now")
        except SandboxError:
            self.close()
            raise
        try:
            return replace(self._attempt(cell, self._order(cell)), attempts=2)
        except WorkerDied:
            self._history.clear()
            return Result(status="crash", attempts=2, state="lost", backend=self._sandbox.backend)

    def replay(self) -> "WorkerSession":
        """Run this session's cells again; see :meth:`Session.replay`."""
        with self._lock:
            cells = list(self._history)
        again = self._sandbox.session(self._seed)
        try:
            for cell in cells:
                self._sandbox.meter.measure(lambda cell=cell: again.execute(cell))
        except BaseException:
            again.close()
            raise
        return again

    def fork(self) -> "WorkerSession":
        """Copy this session; see :meth:`Session.fork`."""
        with self._exclusive():
            # Nothing has run yet: a fresh session is a copy.
            if self._worker is None:
                return WorkerSession(self._sandbox, self._seed)
            forked = WorkerSession(self._sandbox, self._seed, turn=self._turn)
            try:
                self._copy_into(forked, self._worker)
            except BaseException:
                forked.close()
                raise
            return forked

    def _copy_into(self, forked: "WorkerSession", worker: Worker) -> None:
        forked._worker = made = Worker(self._sandbox.limits)
        order: wire.Message = {"t": "fork", "cpu": _FORK_S, "wall": _FORK_S, "transaction": False, "final": False}
        answer = self._answer(worker, order, made.remote)
        if answer["refused"] is not None:
            raise ForkRefused(f"this session can't be forked: {answer['refused']}")
        made.close_remote(started=True)
        forked._history = list(self._history)

    def read_file(self, path: str, max_bytes: int = MIB) -> bytes:
        """Read the first ``max_bytes`` bytes of a file; see :meth:`Session.read_file`."""
        order: wire.Message = {"t": "read", "path": path, "cpu": _READ_S, "wall": _READ_S}
        data = b""
        if "\0" in path:
            raise ValueError(f"a path holds no NUL character, as {path!r} does")
        with self._exclusive():
            worker = self._start_worker("plain")
            # In pieces, since an answer is a claim, whose length is bounded.
            while len(data) < max_bytes:
                size = min(_MAX_READ, max_bytes - len(data))
                chunk = {"max": size, "offset": len(data), "seed": self._seed, "transaction": True, "final": False}
                piece = file_piece(self._answer(worker, {**order, **chunk}), path)
                data += piece[:size]
                if len(piece) < size:
                    break
        return data

    def close(self) -> None:
        """End every process of the session, without waiting for it."""
        with self._closing:
            was_open, self._open = self._open, False
        if was_open:
            self._sandbox.count_closed()
            # Wakes a thread that is in a call; that thread closes the descriptors then.
            if (worker := self._worker) is not None:
                worker.shut()
            self._dispose()

    def _dispose(self) -> None:
        # Where a call holds the lock, it disposes of the worker at its end: closing must not wait for it.
        if self._lock.acquire(blocking=False):
            try:
                if self._worker is not None:
                    self._worker.dispose()
            finally:
                self._lock.release()

    def __del__(self) -> None:
        self.close()

    @contextmanager
    def _exclusive(self) -> Generator[None]:
        """Exclude other calls of this session; dispose of its worker where it was closed meanwhile."""
        with self._lock:
            if not self._open:
                raise SandboxClosed("this session is closed")
            try:
                yield
            finally:
                if not self._open:
                    self._dispose()

    def _start_worker(self, profile: Profile) -> Worker:
        """Return the session's worker, once its processes are ready."""
        if self._worker is not None and self._worker.spent:
            self._drop_worker()
        # What was made in advance may have died: no code of the program has run, so another serves as well.
        for last in (False, True):
            try:
                worker = self._worker = self._worker or self._sandbox.take(profile, fresh=self._fresh or last)
                if not self._open:
                    raise SandboxClosed("this session was closed during the call")
                worker.await_started()
                return worker
            except SandboxError as error:
                self._drop_worker()
                if not self._open:
                    raise SandboxClosed("this session was closed during the call") from error
                if last:
                    self.close()
                    raise
        raise AssertionError("the loop returns or raises")

    def _drop_worker(self) -> None:
        if self._worker is not None:
            self._worker.dispose()
            self._worker = None

    def _ask(
        self, worker: Worker, order: wire.Message, asked: float, descriptors: tuple[int, ...] = ()
    ) -> tuple[Answer, float]:
        """Send an order when a core is free; return the answer and the time in the queue, which began at ``asked``."""
        with self._acquired(self._turn), self._acquired(self._sandbox.slots):
            queue = time.monotonic() - asked
            try:
                return worker.ask(order, descriptors), queue
            except WorkerDied as error:
                # Only a cell can be run again; and where its owner closed it, the death is no fault.
                was_open = self._open and not self._sandbox.closed
                if not was_open or order["t"] != "run":
                    self.close()
                if not was_open:
                    raise SandboxClosed("this session was closed during the call") from error
                self._drop_worker()
                raise
            except BaseException:
                # After Ctrl-C, for instance, the answer is still to come, and would be taken for the next order's.
                self.close()
                raise

    def _answer(self, worker: Worker, order: wire.Message, descriptors: tuple[int, ...] = ()) -> wire.Message:
        """Send an order that is no cell, and count its fault."""
        try:
            (answer, _), _ = self._ask(worker, order, time.monotonic(), descriptors)
        except SandboxError as error:
            self._sandbox.meter.fault(error)
            raise
        return answer

    @contextmanager
    def _acquired(self, gate: "threading.Lock | threading.Semaphore") -> Generator[None]:
        # With a timeout, so that closing the session ends a call that waits for others.
        while not gate.acquire(timeout=_LOOK_S):
            if not self._open:
                raise SandboxClosed("this session was closed during the call")
        try:
            yield
        finally:
            gate.release()


class WorkerSandbox(Sandbox):
    """A sandbox whose sessions each take one worker."""

    session_class: type[WorkerSession] = WorkerSession
    """Class of its sessions."""

    def __init__(self, limits: Limits, ready: int | None) -> None:
        """Start nothing; ``ready`` is how many workers are to be made in advance, ``None`` for two for each core.

        Raises:
            ValueError: ``ready`` is negative.
        """
        cores = len(os.sched_getaffinity(0))
        self._size = _READY_PER_CORE * cores if ready is None else ready
        if self._size < 0:
            raise ValueError(f"ready must not be negative, not {ready}")
        self.limits = limits
        self.meter = Meter()
        """Every call of the sandbox and its sessions is counted here."""
        self._lock = threading.Lock()
        self.closed = False
        """Its owner has closed it."""
        self._sessions = 0
        # More running cells than cores only make each other's clocks run out.
        self.slots = threading.Semaphore(max(2, cores))
        """Held while a cell runs."""

    @abstractmethod
    def take(self, profile: Profile, *, fresh: bool = False) -> Worker:
        """Take a worker; one that was made in advance where there are such and ``fresh`` allows it.

        Raises:
            SandboxError: The sandbox is closed, or none can be made.
        """

    def session(self, seed: int = 0) -> WorkerSession:
        """Open a session; see :meth:`Sandbox.session`."""
        return self.session_class(self, seed)

    def run(
        self, code: str, *, timeout: float | None = None, stdin: str = "", files: Files | None = None, seed: int = 0
    ) -> Result:
        """Run one program in a fresh session; see :meth:`Sandbox.run`."""
        cell = Cell(code=code, timeout=timeout, transaction=False, stdin=stdin, files=files or {}, final=True)
        with self.session(seed) as session:
            return self.meter.measure(lambda: session.execute(cell))

    def counters(self) -> Counters:
        """Return what this sandbox has done so far."""
        return self.meter.snapshot()

    def _health(self, *, ok: bool, ready: int, detail: str) -> Health:
        ok = ok and not self.closed
        return Health(ok=ok, backend=self.backend, sessions=self._sessions, ready=ready, detail=detail)

    def close(self) -> None:
        """Open no more sessions; each back end ends those that are open."""
        with self._lock:
            self.closed = True

    def count_opened(self) -> None:
        """Count a session that was opened.

        Raises:
            SandboxClosed: The sandbox is closed.
        """
        with self._lock:
            if self.closed:
                raise SandboxClosed("this sandbox is closed")
            self._sessions += 1

    def count_closed(self) -> None:
        """Count a session that was closed."""
        with self._lock:
            self._sessions -= 1
