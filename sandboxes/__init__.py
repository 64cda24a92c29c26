"""Places to run programs that nobody has read.

::

    with open_sandbox() as sandbox, sandbox.session() as session:
        session.run("x = 6")
        session.run("x * 7").value      # '42'

``README.md`` beside this file states the boundary: what is promised and what is not.
"""

import pkgutil
from collections.abc import Sequence
from contextlib import ExitStack

from agentrl.sandboxes.base import (
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
    SandboxUnavailable,
    Session,
)
from agentrl.sandboxes.remote.address import PREFIX

BACKENDS = ("auto", "local", "docker")
"""The names of back ends."""

__all__ = [
    "BACKENDS",
    "Cell",
    "Counters",
    "Files",
    "ForkRefused",
    "Health",
    "Limits",
    "Result",
    "Sandbox",
    "SandboxClosed",
    "SandboxError",
    "SandboxUnavailable",
    "Session",
    "open_sandbox",
]


def open_sandbox(
    backend: str = "auto",
    *,
    runtime: str | None = None,
    limits: Limits | None = None,
    ready: int | None = None,
    packages: Sequence[str] = (),
) -> Sandbox:
    """Open a sandbox; close it, or use it in a ``with`` statement.

    Args:
        backend: ``local`` isolates with Linux namespaces, ``docker`` with containers; ``auto`` takes the first of them
            that this machine offers. ``remote:URL,URL`` uses servers that ``agentrl sandbox serve`` started.
            ``module:name`` is a function of your own, called as ``LocalSandbox`` is, which returns a ``Sandbox``.
        runtime: Container runtime of the ``docker`` back end, such as ``runsc``; asks for that back end.
        limits: What each session may use. Servers of ``remote`` must have been started with the same; by default
            theirs hold.
        ready: Sessions to keep made in advance; ``None`` lets the back end choose, 0 makes none.
        packages: Packages that programs may import beside those of ``rootfs.PACKAGES``, by the names they import them
            by. ``local`` takes them from this interpreter; the image of ``docker`` must have been built with them.

    Raises:
        SandboxUnavailable: This machine can't isolate programs that way, or a package can't be imported; the message
            names the way out.
        ValueError: There is no such back end, or it takes no ``runtime`` or ``ready``, or ``ready`` is negative.
        ImportError: There is no such module.
        AttributeError: The module has nothing of that name.
        TypeError: What it has takes other arguments, or returns no ``Sandbox``.
    """
    if backend not in BACKENDS and ":" not in backend:
        choice = "choose auto, local, docker or remote:URL, or write module:name"
        raise ValueError(f"no back end is called {backend!r}; {choice}")
    if runtime is not None and backend not in ("auto", "docker"):
        raise ValueError(f"runtime={runtime!r} belongs to the docker back end")
    if backend.startswith(PREFIX):
        return _remote(backend, limits, ready, packages)
    limits = limits or Limits()
    if backend not in BACKENDS:
        own = pkgutil.resolve_name(backend)(limits, ready=ready, packages=packages)
        if not isinstance(own, Sandbox):
            raise TypeError(f"{backend} must return a Sandbox of agentrl.sandboxes, and not a {type(own).__name__}")
        return _with(own, packages)
    if backend == "docker" or runtime is not None:
        return _docker(limits, runtime, ready, packages)
    from agentrl.sandboxes.host.local import LocalSandbox

    try:
        sandbox = LocalSandbox(limits, ready=ready, packages=packages)
    except SandboxUnavailable as local:
        if backend == "local":
            raise
        try:
            return _docker(limits, None, ready, packages)
        except SandboxUnavailable as docker:
            message = f"no sandbox can be opened here. local: {local}. docker: {docker}"
            raise SandboxUnavailable(message, remedy=local.remedy or docker.remedy) from docker
    return _with(sandbox, packages)


def _remote(name: str, limits: Limits | None, ready: int | None, packages: Sequence[str]) -> Sandbox:
    from agentrl.sandboxes.remote.client import RemoteSandbox

    if ready is not None:
        raise ValueError("ready belongs to the servers: start them with --ready")
    return RemoteSandbox(name, limits=limits, packages=packages)


def _docker(limits: Limits, runtime: str | None, ready: int | None, packages: Sequence[str]) -> Sandbox:
    from agentrl.sandboxes.docker.sandbox import DockerSandbox

    return _with(DockerSandbox(limits, runtime=runtime, ready=ready), packages)


def _with(sandbox: Sandbox, packages: Sequence[str]) -> Sandbox:
    """Return the sandbox; where programs in it can't import these packages, close it and raise."""
    with ExitStack() as undo:
        undo.callback(sandbox.close)
        result = sandbox.run(f"import {', '.join(packages)}") if packages else Result(status="ok")
        if result.status != "ok":
            why = (result.traceback or result.status).splitlines()[-1]
            in_image = result.backend == "docker"
            remedy = f"agentrl sandbox build-image --packages {' '.join(packages)}" if in_image else ""
            way = f"build its image with `{remedy}`" if remedy else "install and name whatever is missing"
            raise SandboxUnavailable(f"programs can't import {', '.join(packages)} ({why}): {way}", remedy=remedy)
        undo.pop_all()
    return sandbox
