"""Child processes that do not outlive their parent, on Linux."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO

from agentrl.processes.zygote import end_with_parent


def start_python(
    words: Sequence[str], log: IO[bytes], env: Mapping[str, str] | None = None, number: int = signal.SIGINT
) -> subprocess.Popen[bytes]:
    """Start this Python with ``words`` in a session of its own, which a terminal's Ctrl-C does not reach.

    Args:
        words: the arguments of Python.
        log: a file that gets the output.
        env: environment variables; this process's own by default.
        number: the signal that the process gets when this one ends; see :func:`end_with_parent`.
    """
    return subprocess.Popen(
        [sys.executable, *words],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=partial(end_with_parent, os.getpid(), number),
    )
