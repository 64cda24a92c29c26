"""Keeps containers warm, so that a session need not wait for one to start."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from agentrl.sandboxes.base import SandboxClosed, SandboxError
from agentrl.sandboxes.docker.container import Container

_SPARE: Final = 1
_AHEAD: Final = max(1, len(os.sched_getaffinity(0)) - 1)
"""Containers that start at a time while nobody waits for them: the imports of each keep a core busy."""

Maker = Callable[[Callable[[Container, bool], None]], Container]
"""Makes a container, which calls what it is given after each session and at its end; see :class:`Container`."""


class ContainerPool:
    """Containers: some ready, some serving, some starting; safe from any thread.

    Threads make them, and :meth:`give_back` takes one back after a session. The pool makes one for each caller that
    waits. Ahead of callers it makes containers up to its size in all, and one that is ready; these leave a core free.
    """

    def __init__(self, make: Maker, size: int, slots: threading.Semaphore) -> None:
        """Make nothing.

        Args:
            make: Makes a container, or raises :class:`SandboxError`.
            size: Containers to keep; 0 makes each when it is asked for.
            slots: One is held while a container is made: imports would make the clocks of running cells run out.
        """
        self._make, self._size, self._slots = make, size, slots
        self._changed = threading.Condition()
        self._ready: list[Container] = []
        self._serving: set[Container] = set()
        self._starting = self._removing = self._waiting = 0
        self._fault: SandboxError | None = None
        self._closed = False

    @property
    def ready(self) -> int:
        """Number of those that wait for a session."""
        return len(self._ready)

    @property
    def total(self) -> int:
        """Number of all, with those that are starting."""
        return len(self._ready) + len(self._serving) + self._starting

    @property
    def fault(self) -> str:
        """Reason why the last container could not be started; empty where it could."""
        return str(self._fault or "")

    def take(self, *, fresh: bool = False) -> Container:
        """Take a ready container, or wait until one is.

        Args:
            fresh: Take none that was made before this call.

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
                while (container := self._pick(since)) is None:
                    # The pool may be full of containers that are too old for this caller.
                    if fresh and not self._starting:
                        self._launch()
                    self._fill()
                    self._changed.wait()
                self._serving.add(container)
                return container
            finally:
                self._waiting -= 1
                self._fill()

    def give_back(self, container: Container, usable: bool) -> None:
        """Take a container back after a session, or replace it; called by its own thread."""
        with self._changed:
            # One that ends while it starts is removed by the thread that starts it.
            ours = container in self._serving or container in self._ready
            self._serving.discard(container)
            self._ready = [other for other in self._ready if other is not container]
            # A burst of sessions leaves more than are to be kept.
            room = len(self._ready) < max(self._size, self._waiting)
            keep = ours and usable and container.alive and room
            if keep:
                self._ready.append(container)
            self._removing += ours and not keep
            self._changed.notify_all()
            self._fill()
        if ours and not keep:
            self._remove(container)

    def close(self) -> None:
        """End every container and wait until they are gone. Closing twice is allowed."""
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

    def _pick(self, since: float) -> Container | None:
        if self._closed:
            raise SandboxClosed("this sandbox is closed")
        for container in list(self._ready):
            if not container.alive:
                self._ready.remove(container)
                self._removing += 1
                # In a thread, since this one has the lock, and to remove a container is a call of the engine.
                threading.Thread(target=self._remove, args=(container,), daemon=True).start()
            elif container.made >= since:
                self._ready.remove(container)
                return container
        if self._fault is not None:
            raise self._fault
        return None

    def _fill(self) -> None:
        # After a fault the pool starts none until a caller needs one: the engine may be gone.
        while not self._closed and self._fault is None and self._missing() > 0:
            self._launch()

    def _missing(self) -> int:
        """Return how many containers to start now."""
        soon = len(self._ready) + self._starting
        wanted = max(self._size - self.total, min(_SPARE, self._size) - soon)
        # What callers wait for starts at once, whatever the cores are busy with.
        return max(min(wanted, _AHEAD - self._starting), self._waiting - soon)

    def _launch(self) -> None:
        self._starting += 1
        threading.Thread(target=self._start, daemon=True).start()

    def _start(self) -> None:
        made, fault = None, None
        try:
            with self._slots:
                made = None if self._closed else self._make(self.give_back)
        except SandboxError as error:
            fault = error
        except Exception as error:  # a caller that waits for this container must see it, whatever it is
            fault = SandboxError(f"a session could not be started: {type(error).__name__}: {error}")
        with self._changed:
            self._starting -= 1
            self._fault = fault
            # Closed meanwhile: close() waits until this one is removed as well.
            late = made if self._closed else None
            self._removing += late is not None
            if made is not None and late is None:
                self._ready.append(made)
            self._changed.notify_all()
            self._fill()
        if late is not None:
            self._remove(late)

    def _remove(self, container: Container) -> None:
        """Remove a container that has been counted in ``_removing``."""
        try:
            # Where the engine is gone, the container ends with its stream, and the engine removes it later.
            with suppress(SandboxError):
                container.dispose()
        finally:
            # Whatever went wrong: a removal that is never counted as ended would let ``close`` wait for ever.
            with self._changed:
                self._removing -= 1
                self._changed.notify_all()
