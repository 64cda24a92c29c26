"""A child process that does not outlive its parent, on Linux."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, number: int = signal.SIGINT) -> None:
    """Have the kernel send this process a signal when its parent ends; the ``preexec_fn`` of a subprocess.

    Args:
        parent: the parent's process id.
        number: the signal; SIGINT lets a run save a checkpoint.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have ended before the call: then no signal comes any more.
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
