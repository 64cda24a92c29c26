"""Places to run programs that nobody has read.

::

    with open_sandbox() as sandbox, sandbox.session() as session:
        session.run("x = 6")
        session.run("x * 7").value      # '42'

``README.md`` beside this file states the boundary: what is promised and what is not.
"""

from typing import Literal

from agentrl.sandboxes.base import Cell, Files, Limits, Result, Sandbox, SandboxError, SandboxUnavailable, Session

__all__ = [
    "Cell",
    "Files",
    "Limits",
    "Result",
    "Sandbox",
    "SandboxError",
    "SandboxUnavailable",
    "Session",
    "open_sandbox",
]


def open_sandbox(
    backend: Literal["auto", "local", "docker"] = "auto",
    *,
    runtime: str | None = None,
    limits: Limits | None = None,
) -> Sandbox:
    """Open a sandbox; close it, or use it in a ``with`` statement.

    Args:
        backend: ``local`` isolates with Linux namespaces; ``auto`` takes the best that this machine offers.
        runtime: Container runtime of the ``docker`` back end, such as ``runsc``.
        limits: What each session may use.

    Raises:
        SandboxUnavailable: This machine can't isolate programs that way; the message names the way out.
        ValueError: There is no such back end.
    """
    if backend not in ("auto", "local", "docker"):
        raise ValueError(f"no back end is called {backend!r}; choose auto, local or docker")
    if backend == "docker":
        raise SandboxUnavailable("this version has no docker back end yet; use backend='local' or 'auto'")
    if runtime is not None:
        raise SandboxUnavailable(f"runtime={runtime!r} belongs to the docker back end, which this version lacks")
    from agentrl.sandboxes.local import LocalSandbox

    return LocalSandbox(limits or Limits())
