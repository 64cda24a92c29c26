"""The ``local`` back end: every session in its own Linux namespaces on this machine, no daemon and no root needed."""

import importlib.util
import threading
from collections.abc import Sequence
from contextlib import suppress

from agentrl.sandboxes.base import Health, Limits, SandboxClosed, SandboxError
from agentrl.sandboxes.host import requirements
from agentrl.sandboxes.host.profiles import PRELOADED, Profile
from agentrl.sandboxes.host.sessions import WorkerSandbox
from agentrl.sandboxes.host.worker import Worker
from agentrl.sandboxes.host.zygote import Zygote


class ZygotePool:
    """An import profile's zygote, which starts when it is first needed and after its death, and its ready sessions."""

    def __init__(self, limits: Limits, preload: tuple[str, ...], size: int, packages: Sequence[str] = ()) -> None:
        """Prepare, start nothing.

        Args:
            limits: What each session may use.
            preload: Modules that the zygote imports.
            size: Sessions to keep ready; 0 makes each when it is asked for.
            packages: Packages that programs may import beside the usual ones.
        """
        self._limits, self._preload, self._size, self._packages = limits, preload, size, packages
        self._lock = threading.Lock()
        self._ready: list[Worker] = []
        self._zygote: Zygote | None = None
        self._closed = False

    def start(self) -> None:
        """Start the zygote, unless it runs, and make the sessions to keep ready.

        Raises:
            SandboxUnavailable: This machine forbids it; the message names the way out.
            SandboxClosed: It was closed.
        """
        with self._lock:
            self._running()
            self._fill()

    def take(self, *, fresh: bool = False) -> Worker:
        """Take a ready session, or make one; ``fresh`` takes none that was made before this call.

        Raises:
            SandboxClosed: It was closed.
            SandboxError: None can be made.
        """
        with self._lock:
            zygote = self._running()
            while self._ready and not fresh:
                worker = self._ready.pop(0)
                if worker.alive:
                    break
                worker.dispose()
            else:
                worker = Worker(self._limits, zygote.open)
            self._fill()
            return worker

    @property
    def ready(self) -> int:
        """Number of sessions that are ready."""
        return len(self._ready)

    @property
    def state(self) -> str:
        """``waiting`` for its first use, ``running``, ``dead`` until the next session is taken, or ``closed``."""
        if self._closed:
            return "closed"
        zygote = self._zygote
        return "waiting" if zygote is None else "running" if zygote.alive() else "dead"

    @property
    def separates_users(self) -> bool:
        """Each session has a user id of its own; false as well before the first one."""
        zygote = self._zygote
        return zygote is not None and zygote.separates_users

    def close(self) -> None:
        """End the zygote with every session that it made, and wait for that. Closing twice is allowed."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        for worker in self._ready:
            worker.dispose()
        self._ready.clear()
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def _fill(self) -> None:
        # Whoever needs the session that can't be made hears of it.
        with suppress(SandboxError):
            while len(self._ready) < self._size:
                self._ready.append(Worker(self._limits, self._running().open))

    def _running(self) -> Zygote:
        """Return the zygote; start one where none lives."""
        if self._closed:
            raise SandboxClosed("this sandbox is closed")
        # Its sessions look alive until the kernel has killed them.
        if self._zygote is not None and not self._zygote.alive():
            self._end()
        self._zygote = self._zygote or Zygote(self._limits, self._preload, self._packages)
        return self._zygote


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
        super().__init__(limits, ready)
        requirements.raise_open_files()
        kinds = {profile: _installed(names) for profile, names in PRELOADED.items()}
        pools = {names: ZygotePool(limits, names, self._size, packages) for names in kinds.values()}
        self._pools = {profile: pools[names] for profile, names in kinds.items()}
        self._pools["plain"].start()

    def health(self) -> Health:
        """Return whether the zygotes live; see :meth:`Sandbox.health`."""
        states = {profile: pool.state for profile, pool in self._pools.items()}
        ids = "a user id for each session" if self._pools["plain"].separates_users else "one user id for all sessions"
        detail = ", ".join([*(f"{profile} zygote {state}" for profile, state in states.items()), ids])
        ready = sum(pool.ready for pool in set(self._pools.values()))
        return self._health(ok="dead" not in states.values(), ready=ready, detail=detail)

    def take(self, profile: Profile, *, fresh: bool = False) -> Worker:
        """Take a session's processes; see :meth:`WorkerSandbox.take`."""
        return self._pools[profile].take(fresh=fresh)

    def close(self) -> None:
        """End every session and wait until no process is left."""
        super().close()
        for pool in self._pools.values():
            pool.close()


def _installed(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if importlib.util.find_spec(name) is not None)
