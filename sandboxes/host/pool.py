"""Keeps sessions ready: one pool for each import profile, with its zygote and a few sessions made in advance.

To ask a zygote for a session does not block, so the pool needs no thread of its own: the call that takes a session asks
for the next one. A ready session has no seed yet and has run nothing; the seed comes with the first order.
"""

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from agentrl.sandboxes.base import Limits, SandboxClosed, SandboxError
from agentrl.sandboxes.host.worker import Worker
from agentrl.sandboxes.host.zygote import Zygote


class ZygotePool:
    """A zygote, started when it is first needed, and its ready sessions; safe from any thread."""

    def __init__(self, limits: Limits, preload: tuple[str, ...], size: int, packages: Sequence[str] = ()) -> None:
        """Prepare, start nothing.

        Args:
            limits: What each session may use.
            preload: Modules that the zygote imports.
            size: Sessions to keep ready; 0 makes each when it is asked for.
            packages: Packages that programs may import beside the usual ones.
        """
        self._limits, self._preload, self._size, self._packages = limits, preload, size, packages
        self._starting = threading.Lock()
        self._lock = threading.Lock()
        self._zygote: Zygote | None = None
        self._ready: deque[Worker] = deque()
        self._closed = False

    def start(self) -> None:
        """Start the zygote, unless it runs, and fill the pool.

        Raises:
            SandboxUnavailable: This machine forbids it; the message names the way out.
            SandboxClosed: It was closed.
        """
        self._running(None)
        self._refill()

    def take(self, *, fresh: bool = False) -> Worker:
        """Take a ready session, or have the zygote fork one.

        Args:
            fresh: Take none that is ready, since it may have died with a zygote of before.

        Raises:
            SandboxError: The pool is closed, or the zygote can't be started.
        """
        worker = None if fresh else self._pop()
        if worker is None:
            worker = self._make()
        self._refill()
        return worker

    @property
    def ready(self) -> int:
        """Number of ready sessions."""
        return len(self._ready)

    @property
    def state(self) -> str:
        """``waiting`` for its first use, ``running``, ``dead`` until the next session is taken, or ``closed``."""
        if self._closed:
            return "closed"
        zygote = self._zygote
        return "waiting" if zygote is None else "running" if zygote.alive() else "dead"

    @property
    def parted(self) -> bool:
        """Each session has a user id of its own; false as well before the first one."""
        zygote = self._zygote
        return zygote is not None and zygote.parted

    def close(self) -> None:
        """End the zygote with every session that it made, and wait for that. Closing twice is allowed."""
        # A zygote that is starting must be waited for: nobody else would end it.
        with self._starting:
            with self._lock:
                self._closed = True
                zygote, self._zygote = self._zygote, None
                left = list(self._ready)
                self._ready.clear()
            for worker in left:
                worker.dispose()
            if zygote is not None:
                zygote.close()

    def _pop(self) -> Worker | None:
        while True:
            with self._lock:
                if not self._ready:
                    return None
                worker, zygote = self._ready.popleft(), self._zygote
            # The sessions of a zygote that has died look alive until the kernel has killed them.
            if worker.alive() and zygote is not None and zygote.alive():
                return worker
            worker.dispose()

    def _make(self) -> Worker:
        zygote = self._running(None)
        try:
            return self._ask(zygote)
        except SandboxError:
            # A zygote that lives has sessions: a new one would end them.
            if zygote.alive():
                raise
            return self._ask(self._running(zygote))

    def _ask(self, zygote: Zygote) -> Worker:
        try:
            worker = Worker(self._limits)
        except OSError as error:
            raise SandboxError(f"no descriptors are left for a session: raise `ulimit -n` ({error})") from error
        try:
            zygote.open(worker.remote)
        except BaseException:
            worker.dispose()
            raise
        worker.close_remote()
        return worker

    def _running(self, dead: Zygote | None) -> Zygote:
        """Return the zygote; start one where there is none, or only the one known to be ``dead``."""
        # A lock of its own, held for seconds: callers that find a ready session don't wait for it.
        with self._starting:
            if self._closed:
                raise SandboxClosed("this sandbox is closed")
            if self._zygote is not None and self._zygote is not dead:
                return self._zygote
            if self._zygote is not None:
                self._zygote.close()
            self._zygote = None
            self._zygote = Zygote(self._limits, self._preload, self._packages)
            return self._zygote

    def _refill(self) -> None:
        # This caller has its session: a zygote that has died concerns the next one who needs it.
        with suppress(SandboxError):
            while self._missing():
                zygote = self._zygote
                if zygote is None:
                    return
                worker = self._ask(zygote)
                # Another thread may have filled or closed the pool meanwhile.
                with self._lock:
                    if keep := self._missing():
                        self._ready.append(worker)
                if not keep:
                    worker.dispose()

    def _missing(self) -> bool:
        return not self._closed and len(self._ready) < self._size
