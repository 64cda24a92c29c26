"""Imports what training needs, then forks a command line of agentrl, or a grid, for every line on standard input."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

# What every command would import by itself, each time anew.
import agentrl.evaluation
import agentrl.pipeline  # noqa: F401
from agentrl.cli import main

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import grid
import grid_work


def become(argv: Sequence[str], out: str, err: str) -> None:
    """Be a process of its own, with its own output."""
    os.setsid()
    for number, name in enumerate((os.devnull, out, err)):
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["agentrl", *argv]


class Forked:
    """The process of a grid's run."""

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


def start_forked(words: Sequence[str], log: Path) -> Forked:
    """Start a grid's run without importing everything anew; it inherits as little as a new Python would."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Forked(pid)
    grid_work.follow(parent)
    os.closerange(3, 1000)
    become(words, str(log), str(log))
    code = 1
    try:
        code = main()
    finally:
        sys.stdout.flush()
        os._exit(code)


def serve() -> None:
    """Answer ``{"program", "argv", "cwd", "logs"}`` with a process id, and ``{"wait"}`` with an exit code."""
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            os.chdir(order["cwd"])
            sys.path.insert(0, order["cwd"])
            become(order["argv"], f"{order['logs']}/out", f"{order['logs']}/err")
            sys.exit(grid.main(order["argv"], start=start_forked) if order["program"] == "grid" else main())
        print(pid, flush=True)


if __name__ == "__main__":
    serve()
