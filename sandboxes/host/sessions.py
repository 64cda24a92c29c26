"""Base of back ends that run each session in a worker: one-shot runs, a bound on running cells, counting."""

import os
import signal
import threading
from abc import abstractmethod
from dataclasses import replace

from agentrl.sandboxes.base import Cell, Counters, Files, Limits, Result, Sandbox, SandboxClosed, Session
from agentrl.sandboxes.host.counters import Meter
from agentrl.sandboxes.host.profiles import Profile
from agentrl.sandboxes.host.worker import Worker, WorkerDied


class CellSession(Session):
    """A session that takes cells with all their settings."""

    @abstractmethod
    def execute(self, cell: Cell) -> Result:
        """Run one cell with all its settings, uncounted.

        Raises:
            SandboxError: The sandbox failed.
            ValueError: The code is longer than the limit, or the timeout is not positive.
        """


class WorkerSandbox(Sandbox):
    """A sandbox whose sessions each take one worker."""

    def __init__(self, limits: Limits) -> None:
        """Start nothing."""
        self.limits = limits
        self.meter = Meter()
        """Every call of the sandbox and its sessions is counted here."""
        self._lock = threading.Lock()
        self._closed = False
        self._sessions = 0
        # More running cells than cores only make each other's clocks run out.
        self.slots = threading.Semaphore(max(2, len(os.sched_getaffinity(0))))
        """Held while a cell runs."""

    @abstractmethod
    def open(self, seed: int, *, fresh: bool = False) -> CellSession:
        """Open a session; ``fresh`` excludes workers that were made in advance."""

    @abstractmethod
    def take(self, profile: Profile, *, fresh: bool = False) -> Worker:
        """Take a worker; one that was made in advance where there are such and ``fresh`` allows it.

        Raises:
            SandboxError: The sandbox is closed, or none can be made.
        """

    def session(self, seed: int = 0) -> CellSession:
        """Open a session; see :meth:`Sandbox.session`."""
        return self.open(seed)

    def run(
        self, code: str, *, timeout: float | None = None, stdin: str = "", files: Files | None = None, seed: int = 0
    ) -> Result:
        """Run one program in a fresh session; see :meth:`Sandbox.run`."""
        cell = Cell(code=code, timeout=timeout, transaction=False, stdin=stdin, files=files or {}, final=True)
        return self.meter.measure(lambda: self._run(cell, seed))

    def _run(self, cell: Cell, seed: int) -> Result:
        for attempt in (1, 2):
            # A second death is the program's doing only in a session that the cause of the first can't have reached.
            with self.open(seed, fresh=attempt == 2) as session:
                try:
                    result = session.execute(cell)
                except WorkerDied:
                    result = Result(status="crash", state="lost", backend=self.backend)
            # A dead worker or a killed program may be the machine's doing once; twice it is the program's.
            if attempt == 2 or (result.status, result.signal) not in (("crash", None), ("killed", signal.SIGKILL)):
                return replace(result, attempts=attempt)
            self.meter.rerun()
        raise AssertionError("the second attempt returns")

    def counters(self) -> Counters:
        """Return what this sandbox has done so far."""
        return self.meter.snapshot()

    @property
    def closed(self) -> bool:
        """Its owner has closed it."""
        return self._closed

    def count_opened(self) -> None:
        """Count a session that was opened.

        Raises:
            SandboxClosed: The sandbox is closed.
        """
        with self._lock:
            if self._closed:
                raise SandboxClosed("this sandbox is closed")
            self._sessions += 1

    def count_closed(self) -> None:
        """Count a session that was closed."""
        with self._lock:
            self._sessions -= 1
