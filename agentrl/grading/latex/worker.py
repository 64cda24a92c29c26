"""The graders' zygote: a process that imports everything once and forks a grader on request.

Run as ``python -P -m agentrl.grading.latex.worker FD``. Each byte on the control socket ``FD`` carries a socket, on
which a new grader answers: a line of JSON in, a line of JSON out. The kernel kills a grader that exceeds the CPU time
of its request, in C loops too: the signal of its timer has no handler. A grader's memory is limited, and it can't write
files. The zygote parses no answer itself. When its control socket is closed, it kills all its graders and itself.
"""

import json
import logging
import os
import resource
import signal
import socket
import sys

from agentrl.grading.latex.compare import same, verified

_WARMING = (
    *((r"\frac{\sqrt{8}}{2}+x^2", r"\sqrt2+x^{2}"), (r"(1,\frac{\pi}{3})", r"(1,\pi/3)"), (r"x^2+y^2=1", r"y^2=1-x^2")),
    *(
        (r"(-\infty,1)\cup(2,3]", r"(-\infty,1)\cup(2,3]"),
        (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
        (r"1<x\le 2", "(1,2]"),
    ),
    *((r"\begin{pmatrix}1\\x\end{pmatrix}", r"\begin{pmatrix}1\\ x+0\end{pmatrix}"), (r"e^{2\pi i}+2^x", "2^x+1")),
)
"""Comparisons that warm the caches of the parser and sympy: every grader inherits them."""


def main(control_fd: int) -> None:
    """Fork graders until the control socket is closed."""
    control = socket.socket(fileno=control_fd)
    # Ctrl-C is for the process that owns this one; the kernel reaps graders, since nobody waits for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    for answer, expected in _WARMING:
        same(answer, expected)
    # Only now: until here errors tell the pool why the zygote does not start.
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    control.sendall(b"+")
    while True:
        asked, links, _, _ = socket.recv_fds(control, 1, 1)
        if not asked:
            os.killpg(0, signal.SIGKILL)
        if os.fork() == 0:
            control.close()
            _grade(socket.socket(fileno=links[0]))
            os._exit(0)
        # The grader alone keeps the socket, so that its end is seen as the end of the stream.
        os.close(links[0])


def _grade(link: socket.socket) -> None:
    """Answer requests until the other side hangs up."""
    with link, link.makefile("rwb") as stream:
        for line in stream:
            request = json.loads(line)
            _limit(request["bytes"])
            # With the default disposition the kernel ends the process when the time is used up.
            signal.setitimer(signal.ITIMER_PROF, request["seconds"])
            pair = request["answer"], request["expected"]
            verdict = verified(*pair) if request["second"] else same(*pair, request["problem"])
            signal.setitimer(signal.ITIMER_PROF, 0)
            stream.write(json.dumps({"same": verdict}).encode() + b"\n")
            stream.flush()


def _limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(int(sys.argv[1]))
