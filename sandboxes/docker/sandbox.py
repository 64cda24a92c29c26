"""The ``docker`` back end: every session in a hardened container that was started in advance."""

import os
import weakref
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final

from agentrl.sandboxes.base import Health, Limits, SandboxError, SandboxUnavailable
from agentrl.sandboxes.docker.container import Container, ContainerSpec
from agentrl.sandboxes.docker.engine import DockerEngine, connect
from agentrl.sandboxes.docker.image import IMAGE
from agentrl.sandboxes.docker.pool import ContainerPool
from agentrl.sandboxes.docker.session import ContainerWorker, DockerSession
from agentrl.sandboxes.host.profiles import Profile
from agentrl.sandboxes.host.sessions import WorkerSandbox

_CORES: Final = 2


class DockerSandbox(WorkerSandbox):
    """Sessions in containers of a Docker engine, which may be on another machine."""

    backend = "docker"
    session_class = DockerSession

    def __init__(
        self, limits: Limits, *, runtime: str | None = None, image: str = IMAGE, ready: int | None = None
    ) -> None:
        """Start containers in the background and wait until the first is ready.

        Args:
            limits: What each session may use.
            runtime: Container runtime, such as ``runsc`` for gVisor; ``None`` takes the engine's own.
            image: Name of an image that ``build_image`` made.
            ready: Containers to keep, each with the interpreter and its imports in memory (about 100 MiB); ``None`` for
                two for each core. More sessions at once each wait a second or two for one more container.

        Raises:
            SandboxUnavailable: There is no engine, SDK, image or runtime; the message names the way out.
            SandboxError: The first container did not start.
            ValueError: ``ready`` is negative.
        """
        super().__init__(limits, ready)
        with ExitStack() as undo:
            engine = undo.enter_context(connect())
            spec = _spec(engine, image, runtime, limits)
            engine.remove_leftovers()
            self.version = f"{runtime or 'default runtime'}, image {spec.image.id.removeprefix('sha256:')[:12]}"
            self._pool = ContainerPool(partial(Container, engine, spec), self._size, self.slots)
            self._end = weakref.finalize(self, _end, self._pool, engine, os.getpid())
            undo.callback(self.close)
            # The others start in the background.
            self._pool.give_back(self._pool.take(), True)
            undo.pop_all()

    def take(self, profile: Profile, *, fresh: bool = False) -> ContainerWorker:
        """Take a container; see :meth:`WorkerSandbox.take`. All of them have everything imported."""
        return ContainerWorker(self.limits, self._pool.take(fresh=fresh))

    def health(self) -> Health:
        """Return whether containers can be started; see :meth:`Sandbox.health`."""
        fault = self._pool.fault
        detail = "closed" if self.closed else fault or f"{self._pool.total} containers"
        return self._health(ok=not fault, ready=self._pool.ready, detail=detail)

    def close(self) -> None:
        """End every session and wait until every container is gone."""
        super().close()
        self._end()


def _spec(engine: DockerEngine, name: str, runtime: str | None, limits: Limits) -> ContainerSpec:
    info = engine.info()
    if runtime is not None and runtime not in info.runtimes:
        runtimes = ", ".join(sorted(info.runtimes))
        raise SandboxUnavailable(
            f"the Docker engine has no runtime called {runtime!r}, only {runtimes}: "
            "install it and name it under runtimes in /etc/docker/daemon.json"
        )
    image = engine.image(name)
    if not image.python:
        raise SandboxUnavailable(
            f"the image {name} is not one that `agentrl sandbox build-image` made", remedy="agentrl sandbox build-image"
        )
    return ContainerSpec(image=image, runtime=runtime, limits=limits, cpus=min(_CORES, info.cores))


def _end(pool: ContainerPool, engine: DockerEngine, owner: int) -> None:
    # A fork of the host process has a copy of everything here, and none of it is its own.
    if os.getpid() == owner:
        with suppress(SandboxError):
            pool.close()
        engine.close()
