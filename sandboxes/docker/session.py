"""Runs sessions over a stream to a container."""

import re
import time
from typing import Final

from agentrl.sandboxes.base import Cell, ForkRefused, Limits, Result
from agentrl.sandboxes.docker.container import Container
from agentrl.sandboxes.host.capture import Capture
from agentrl.sandboxes.host.sessions import WorkerSandbox, WorkerSession
from agentrl.sandboxes.host.worker import Worker, WorkerDied
from agentrl.sandboxes.inside import wire

_EVENT_S: Final = 1.0
_ADDRESS: Final = re.compile("0x[0-9a-f]{6,}")
_FORGOTTEN: Final = "memory can't cross containers, so a fork runs the cells again, and "


class ContainerWorker(Worker):
    """A session's processes in a container."""

    def __init__(self, limits: Limits, container: Container) -> None:
        """Begin a session in the container.

        Raises:
            SandboxError: The container is gone.
        """
        super().__init__(limits, container.serve)
        self._container = container

    def ask(
        self, order: wire.Message, descriptors: tuple[int, ...] = ()
    ) -> tuple[wire.Message, tuple[Capture, Capture]]:
        """Send an order and wait for its answer; see :meth:`Worker.ask`.

        A container that the kernel ended at its memory limit counts as the program's doing.

        Raises:
            SandboxError: The engine is gone.
        """
        started = time.monotonic()
        try:
            return super().ask(order, descriptors)
        except WorkerDied:
            if not self._ran_out_of_memory():
                raise
        self.spent = True
        limit = self._limits.output_kept_bytes
        measured = {"wall": time.monotonic() - started, "cpu": 0.0, "rss": self._container.memory_bytes, "signal": None}
        return {**wire.NOTHING, **measured, "status": "memory", "state": "lost"}, (Capture(limit), Capture(limit))

    def _ran_out_of_memory(self) -> bool:
        # The kernel's notice may reach the engine later than the end of the stream reaches us.
        until = time.monotonic() + _EVENT_S
        while not (hit_limit := self._container.was_out_of_memory()) and time.monotonic() < until:
            time.sleep(_EVENT_S / 10)
        return hit_limit


class DockerSession(WorkerSession):
    """A session in one container; another container takes over where the kernel ended that one."""

    def __init__(self, sandbox: WorkerSandbox, seed: int) -> None:
        """Note the seed; a container is taken with the first cell."""
        super().__init__(sandbox, seed)
        self._results: list[Result] = []

    def _record(self, cell: Cell, result: Result) -> None:
        super()._record(cell, result)
        self._results.append(result)

    def fork(self) -> WorkerSession:
        """Run the cells again in a second container, and refuse where they come out differently.

        Raises:
            ForkRefused: They did, or a cell of this session was rolled back or lost: its files can't be made again.
            SandboxError: The sandbox failed.
        """
        if any(result.state != "kept" for result in self._results):
            raise ForkRefused(f"{_FORGOTTEN}a cell that did not end by itself can't be run to the same point")
        expected = [_comparable(result) for result in self._results]
        forked = self.replay()
        if not isinstance(forked, DockerSession) or [_comparable(result) for result in forked._results] != expected:
            forked.close()
            raise ForkRefused(f"{_FORGOTTEN}they came out differently: they depend on time or chance")
        return forked


def _comparable(result: Result) -> tuple[str | None, ...]:
    """Return the parts of a result that a rerun of its cell must repeat: all but times and addresses."""
    texts = (result.status, result.state, result.stdout, result.stderr, result.value, result.exc_type)
    return tuple(None if text is None else _ADDRESS.sub("0x", text) for text in texts)
