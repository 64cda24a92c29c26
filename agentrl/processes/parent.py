"""Child processes that do not outlive their parent, on Linux."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

LAUNCHER = str(Path(__file__).with_name("bound.py"))
"""Its arguments are the parent's process id, a signal and the arguments of Python."""


def start_python(
    words: Sequence[str], log: IO[bytes], env: Mapping[str, str] | None = None, number: int = signal.SIGINT
) -> subprocess.Popen[bytes]:
    """Start this Python with ``words`` in a session of its own, which a terminal's Ctrl-C does not reach.

    Args:
        words: the arguments of Python.
        log: a file that gets the output.
        env: environment variables; this process's own by default.
        number: the signal that the process gets when this one ends, or the thread that has started it.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", LAUNCHER, str(os.getpid()), str(int(number)), *words],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
