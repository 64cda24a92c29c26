"""Functions of a library whose pins differ from ours, asked in an interpreter of its own.

All environments of a process that name the same interpreter, file and words share one pool of workers. It starts with
the first question and ends with the process, or by :func:`close_interpreters`: an import may take seconds, and
collectors close environments between episodes.

Not covered: the workers run with the rights of this process, in no sandbox. They must not run what the agent wrote.
"""

import os
import shutil
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigError, InfrastructureError
from agentrl.processes.per_process import PerProcess
from agentrl.processes.pool import WorkerPool

_WORKERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """An interpreter with a file whose functions it runs.

    Raises:
        ConfigError: there is no such interpreter.
    """

    python: str
    """Its path, such as ``venv/bin/python``; Python 3.11 or newer."""
    file: str
    """A file with the names of a workers' module of ``agentrl.processes.pool``: warm, reply, CONTROL, MAX_BYTES."""
    words: tuple[str, ...] = ()
    """Arguments of ``warm``."""

    def __post_init__(self) -> None:
        path = shutil.which(os.path.expanduser(self.python))
        if path is None:
            raise ConfigError(f"python is {self.python!r}: name an interpreter that is there, such as venv/bin/python")
        object.__setattr__(self, "python", os.path.abspath(path))

    def ask(self, *, seconds: float, **request: object) -> Any:
        """Return what ``reply`` answers to a request; None where that takes too long, or ends every worker.

        Args:
            seconds: CPU time for it; it gets three times as much wall time.
            request: arguments of ``reply``.

        Raises:
            InfrastructureError: the workers don't start, or fail whatever they are asked.
        """
        return _pools.get(self).ask(request, seconds=seconds)


def _make_pool(runs: Interpreter) -> WorkerPool:
    name = os.path.basename(runs.file).removesuffix(".py")
    return WorkerPool(runs.file, _WORKERS, name=name, failure=InfrastructureError, python=runs.python, words=runs.words)


_pools = PerProcess(_make_pool, close=WorkerPool.close, forget=WorkerPool.forget)
close_interpreters = _pools.close
"""End the workers of all interpreters; the next question starts others."""
