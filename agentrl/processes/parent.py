"""Child processes that do not outlive their parent, on Linux."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO

_PR_SET_PDEATHSIG = 1


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


def end_with_parent(parent: int, number: int = signal.SIGINT) -> None:
    """Have the kernel send this process a signal when the thread that started it ends, as its process's end does.

    Args:
        parent: the parent's process id.
        number: the signal; SIGINT lets a run save a checkpoint.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have ended before the call: then no signal comes any more.
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
