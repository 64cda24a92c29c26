"""Imports what training needs, then forks a command line of agentrl for every line on standard input."""

import json
import os
import signal
import sys

# What every command would import by itself, each time anew.
import agentrl.evaluation
import agentrl.pipeline  # noqa: F401
from agentrl.cli import main


def become(order: dict[str, str]) -> None:
    """Be a process of its own, with its own output."""
    os.setsid()
    os.chdir(order["cwd"])
    sys.path.insert(0, order["cwd"])
    files = {0: os.devnull, 1: f"{order['logs']}/out", 2: f"{order['logs']}/err"}
    for number, name in files.items():
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["agentrl", *order["argv"]]


def serve() -> None:
    """Answer ``{"argv", "cwd", "logs"}`` with a process id, and ``{"wait"}`` with an exit code."""
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            become(order)
            sys.exit(main())
        print(pid, flush=True)


if __name__ == "__main__":
    serve()
