"""The zygote of a ``WorkerPool``: a process that imports a module once and forks a worker on request.

Run as ``python -P -m agentrl.processes.zygote MODULE FD``. Each byte on the control socket ``FD`` carries a socket, on
which a new worker answers: a line of JSON in, a line of JSON out. The kernel kills a worker that exceeds the CPU time
of its request, in C loops too: the signal of its timer has no handler. A worker's memory is limited, and it can't write
files. The zygote answers no request itself. It ends when its control socket is closed, and its workers end with it.
"""

import importlib
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping

from agentrl.processes.parent import end_with_parent


def main(module: str, control_fd: int) -> None:
    """Fork workers until the control socket is closed."""
    control, zygote = socket.socket(fileno=control_fd), os.getpid()
    # Nobody waits for workers: the kernel reaps them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    workers_module = importlib.import_module(module)
    workers_module.warm()
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


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
