"""The zygote of a ``WorkerPool``: a process that imports a module once and forks a worker on request.

Run as ``python -P zygote.py MODULE FD WORD …``; the words are the arguments of the module's ``warm``. This file imports
nothing of agentrl, so another interpreter can run it: then MODULE is the path of a file. Each byte on the control
socket ``FD`` carries a socket, on which a new worker answers: a line of JSON in, a line of JSON out. The kernel kills a
worker that exceeds the CPU time of its request, in C loops too: the signal of its timer has no handler. A worker's
memory is limited, and it can't write files. The zygote answers no request itself. It ends when its control socket is
closed, and its workers end with it.
"""

import ctypes
import importlib
import importlib.util
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from types import ModuleType

_PR_SET_PDEATHSIG = 1


def main(module: str, control_fd: int, *words: str) -> None:
    """Fork workers until the control socket is closed."""
    control, zygote = socket.socket(fileno=control_fd), os.getpid()
    # Nobody waits for workers: the kernel reaps them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    workers_module = _load(module)
    workers_module.warm(*words)
    # Only now: until here errors tell the pool why the zygote does not start.
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    control.sendall(b"+")
    while links := socket.recv_fds(control, 1, 1)[1]:
        if os.fork() == 0:
            end_with_parent(zygote, signal.SIGKILL)
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _limit(workers_module.MAX_BYTES)
            _serve(socket.socket(fileno=links[0]), workers_module.reply, workers_module.CONTROL)
            os._exit(0)
        # The worker alone keeps the socket, so that its end is seen as the end of the stream.
        os.close(links[0])


def _load(module: str) -> ModuleType:
    """Import a module by its name, or by its path where it ends with ``.py``."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    spec = importlib.util.spec_from_file_location("agentrl_workers", module)
    assert spec is not None and spec.loader is not None, "Python loads files that end with .py"
    # Registered before it runs: classes of it look their own module up.
    sys.modules[spec.name] = loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def _serve(link: socket.socket, reply: Callable[..., object], control: Mapping[str, object]) -> None:
    """Answer requests until the other side hangs up."""
    with link, link.makefile("rwb") as stream:
        for line in stream:
            request, seconds = json.loads(line)
            # With the default disposition the kernel ends the process when the time is used up.
            signal.setitimer(signal.ITIMER_PROF, seconds)
            text = json.dumps(reply(**(request or control)))
            signal.setitimer(signal.ITIMER_PROF, 0)
            stream.write(text.encode() + b"\n")
            stream.flush()


def _limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


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


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
