"""Keeps containers warm, so that a session need not wait for one to start."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from agentrl.sandboxes.base import SandboxClosed, SandboxError
from agentrl.sandboxes.docker.container import Container

MAX_USES: Final = 200
"""Sessions after which a container is replaced, however clean it reports to be."""
_SPARE: Final = 1
_AHEAD: Final = max(1, len(os.sched_getaffinity(0)) - 1)
"""Containers that start at a time while nobody waits for them: the imports of each keep a core busy."""


class ContainerPool:
    """Containers: some ready, some serving, some starting; safe from any thread.

    Each call that takes one, and each container that ends, starts what is missing in the background: up to the pool's
    size in all, one ready, and one for each caller that waits. Those that nobody waits for leave a core free.
    """

    def __init__(
        self, make: Callable[[Callable[[Container, bool], None]], Container], size: int, slots: threading.Semaphore
    ) -> None:
        """Start nothing.

        Args:
            make: Starts a container that calls what it is given after each session and at its end.
            size: How many to keep.
            slots: One is held while one starts: imports would make the clocks of running cells run out.
        """
        self._make = make
        self._slots = slots
        self._size = size
        self._changed = threading.Condition()
        self._ready: list[Container] = []
        self._serving: set[Container] = set()
        self._starting = 0
        self._removing = 0
        self._waiting = 0
        self._fault: SandboxError | None = None
        self._closed = False

    @property
    def ready(self) -> int:
        """Number of those that wait for a session."""
        return len(self._ready)

    @property
    def total(self) -> int:
        """Number of all, with those that are starting."""
        with self._changed:
            return self._total()

    @property
    def fault(self) -> str:
        """Reason why the last container could not be started; empty where it could."""
        fault = self._fault
        return "" if fault is None else str(fault)

    def start(self) -> None:
        """Start them all in the background and wait until one is ready.

        Raises:
            SandboxError: None can be started.
        """
        self._ended(self.take(), True)

    def take(self, *, fresh: bool = False) -> Container:
        """Take a ready container, or wait until one is.

        Args:
            fresh: Take none that was started before this call.

        Raises:
            SandboxClosed: The pool was closed.
            SandboxError: None can be started.
        """
        since = time.monotonic() if fresh else 0.0
        with self._changed:
            self._waiting += 1
            # A fault of before does not count: this caller has one more container tried.
            self._fault = None
            try:
                while True:
                    container = self._pick(since)
                    if container is not None:
                        self._serving.add(container)
                        return container
                    self._refill()
                    # The pool may be full of containers that are too old for this caller.
                    if fresh and not self._starting:
                        self._launch()
                    self._changed.wait()
            finally:
                self._waiting -= 1
                self._refill()

    def _pick(self, since: float) -> Container | None:
        if self._closed:
            raise SandboxClosed("this sandbox is closed")
        self._ready = [container for container in self._ready if container.alive]
        for container in self._ready:
            if container.made >= since:
                self._ready.remove(container)
                return container
        if self._fault is not None:
            raise self._fault
        return None

    def _total(self) -> int:
        return len(self._ready) + len(self._serving) + self._starting

    def _refill(self) -> None:
        # After a fault the pool starts none until a caller needs one: the engine may be gone.
        if self._closed or self._fault is not None:
            return
        soon = len(self._ready) + self._starting
        # Containers that callers wait for start at once, whatever the cores are busy with.
        wanted = max(self._size - self._total(), min(_SPARE, self._size) - soon)
        for _ in range(max(min(wanted, _AHEAD - self._starting), self._waiting - soon)):
            self._launch()

    def _launch(self) -> None:
        self._starting += 1
        threading.Thread(target=self._start, name="agentrl-container", daemon=True).start()

    def _start(self) -> None:
        fault: SandboxError | None = None
        container: Container | None = None
        try:
            with self._slots:
                if not self._closed:
                    container = self._make(self._ended)
                    container.await_ready()
        except SandboxError as error:
            fault = error
        except Exception as error:  # a caller that waits for this container must see it, whatever it is
            fault = SandboxError(f"a container could not be started: {type(error).__name__}: {error}")
        with self._changed:
            self._starting -= 1
            # Closed meanwhile: close() waits until this container is removed as well.
            keep = fault is None and not self._closed
            if container is not None and keep:
                self._ready.append(container)
            self._removing += not keep
            self._fault = fault
            self._changed.notify_all()
            self._refill()
        if not keep:
            self._remove(container)

    def _ended(self, container: Container, usable: bool) -> None:
        """Take a container back after a session, or replace it; called by its own thread."""
        with self._changed:
            # One that ends while it starts is removed by the thread that starts it.
            ours = container in self._serving or container in self._ready
            self._serving.discard(container)
            self._ready = [one for one in self._ready if one is not container]
            # A burst of sessions leaves more than are to be kept.
            room = len(self._ready) < max(self._size, self._waiting)
            keep = ours and usable and container.alive and container.uses < MAX_USES and room
            if keep:
                self._ready.append(container)
            self._removing += ours and not keep
            self._changed.notify_all()
            self._refill()
        if ours and not keep:
            self._remove(container)

    def close(self) -> None:
        """Remove every container and wait until they are gone. Closing twice is allowed."""
        with self._changed:
            self._closed = True
            containers = [*self._ready, *self._serving]
            self._ready.clear()
            self._serving.clear()
            self._removing += len(containers)
            self._changed.notify_all()
        for container in containers:
            self._remove(container)
        with self._changed:
            while self._starting or self._removing:
                self._changed.wait()

    def _remove(self, container: Container | None) -> None:
        """Remove a container that has been counted in ``_removing``."""
        # Where the engine is gone, the container ends with its stream, and the engine removes it later.
        with suppress(SandboxError):
            if container is not None:
                container.close()
        with self._changed:
            self._removing -= 1
            self._changed.notify_all()
