"""The ``local`` back end: every session in its own Linux namespaces on this machine, no daemon and no root needed."""

import importlib.util
from collections.abc import Sequence

from agentrl.sandboxes.base import Health, Limits
from agentrl.sandboxes.host import requirements
from agentrl.sandboxes.host.pool import ZygotePool
from agentrl.sandboxes.host.profiles import PRELOADED, Profile
from agentrl.sandboxes.host.sessions import WorkerSandbox
from agentrl.sandboxes.host.worker import Worker


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
        ids = "a user id for each session" if self._pools["plain"].parted else "one user id for all sessions"
        detail = ", ".join([*(f"{profile} zygote {state}" for profile, state in states.items()), ids])
        ready = sum(pool.ready for pool in set(self._pools.values()))
        return self._health(ok="dead" not in states.values(), ready=ready, detail=detail)

    def take(self, profile: Profile, *, fresh: bool = False) -> Worker:
        """Take a session's processes; see :meth:`WorkerSandbox.take`."""
        return self._pools[profile].take(fresh=fresh)

    def close(self) -> None:
        """End every session and wait until no process is left."""
        with self._lock:
            self._closed = True
        for pool in self._pools.values():
            pool.close()


def _installed(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if importlib.util.find_spec(name) is not None)
