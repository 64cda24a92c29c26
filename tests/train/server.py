"""Imports what training needs, then forks a command line of agentrl for every line on standard input."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import IO

import torch

# What every command would import by itself, each time anew.
import agentrl.eval.command
import agentrl.train.run  # noqa: F401
from agentrl.cli import main
from agentrl.eval.sweep import work


def become(argv: Sequence[str], out: int, err: int) -> None:
    """Be a process of its own, with its own output; it inherits as little as a new Python would."""
    os.setsid()
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(descriptor, number)
    os.closerange(3, 1000)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(torch.get_num_threads())  # makes torch's pool anew before autograd's threads race for it
    sys.argv = ["agentrl", *argv]


class Forked:
    """The process of a sweep's run."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, once it has one."""
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self._pid, sig)


def start_forked(words: Sequence[str], log: IO[bytes]) -> Forked:
    """Start a sweep's run without importing everything anew."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Forked(pid)
    work.follow(parent)
    become(words, log.fileno(), log.fileno())
    code = 1
    try:
        code = main()
    finally:
        sys.stdout.flush()
        os._exit(code)


def serve() -> None:
    """Answer ``{"argv", "cwd", "logs"}`` with a process id, and ``{"wait"}`` with an exit code."""
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            os.chdir(order["cwd"])
            sys.path.insert(0, order["cwd"])
            out, err = (os.open(f"{order['logs']}/{name}", os.O_WRONLY | os.O_CREAT, 0o600) for name in ("out", "err"))
            become(order["argv"], out, err)
            sys.exit(main())
        print(pid, flush=True)


if __name__ == "__main__":
    work.start_process = start_forked  # so that a sweep's processes begin quickly too
    serve()
