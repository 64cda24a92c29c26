"""Ends a test at its deadline, whatever it waits in: a lock, a system call, a child, C code that holds the interpreter.

Each process that runs tests has a watchdog, a process of its own, which hears when a test begins and ends. At the
deadline the watchdog prints the stacks of the test's whole process tree and kills the children that are new since the
test began. Then a signal makes the test fail. If that does not end the test, the watchdog kills the process that runs
it, with all its children; pytest-xdist counts the test as failed and goes on with another worker.

A second in which no process of the tree wants a core is a second of the limit. Others count less on a busy machine.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

GRACE_S = 15.0
"""How long a test that has been made to fail may clean up, at most as long as its limit."""
SAMPLE_S = 2.0
Orders = queue.SimpleQueue[dict[str, Any] | None]


class Watchdog:
    """The watchdog, as the process that runs tests sees it."""

    def __init__(self) -> None:
        # It forks and is no child then: tests count their process's children.
        code = "import os, sys, runpy; os.fork() and os._exit(0); runpy.run_path(sys.argv[1], run_name='watchdog')"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, __file__, str(os.getpid())], stdin=subprocess.PIPE
        )
        self._process.wait()
        signal.signal(signal.SIGALRM, fail)

    def send(self, **test: object) -> None:
        """Name the test that begins; without one, a test has ended."""
        assert self._process.stdin
        # Nobody may listen any more: it ends this process right then.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(test).encode() + b"\n")
            self._process.stdin.flush()


def fail(*_: object) -> None:
    """Fail the test that runs: handlers run in the main thread, and so do tests."""
    pytest.fail("over its limit of time; standard error has the stacks of all its processes")


WATCHDOG = pytest.StashKey[Watchdog]()


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist's own process runs no tests.
    if not config.getoption("numprocesses", None) and not config.option.collectonly:
        config.stash[WATCHDOG] = Watchdog()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    item.config.stash[WATCHDOG].send(test=item.nodeid, limit=settings.timeout)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    item.config.stash[WATCHDOG].send()
    return True


def pytest_enter_pdb(config: pytest.Config) -> None:
    config.stash[WATCHDOG].send()


def watch(worker: psutil.Process) -> None:
    """Be the watchdog of a process, until it ends."""
    orders = Orders()

    def read() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        orders.put(None)

    threading.Thread(target=read, daemon=True).start()
    order = orders.get()
    while order is not None:
        order = watch_test(worker, order["test"], order["limit"], orders) if order else orders.get()


def watch_test(worker: psutil.Process, test: str, limit: float, orders: Orders) -> dict[str, Any] | None:
    """Watch a test; return the order that comes at its end."""
    began, used, failed, tree = time.time(), 0.0, False, dict[psutil.Process, None]()
    pause, grace = min(SAMPLE_S, limit / 4), min(GRACE_S, limit)
    while True:
        with suppress(queue.Empty):
            return orders.get(timeout=pause)
        with suppress(psutil.NoSuchProcess):
            # Those that were seen before may have lost their parents.
            tree |= dict.fromkeys([worker, *worker.children(recursive=True)])
        crowd = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
        used += pause / (crowd if any(map(wants_a_core, tree)) else 1.0)
        if used < limit:
            continue
        if not failed:
            print(f"\n{test} is over its limit of time.\n{stacks([*tree])}", file=sys.stderr, flush=True)
        # Tests of one process share some children, which began before this one.
        kill([child for child in tree if child != worker and (failed or child.create_time() >= began)])
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGKILL if failed else signal.SIGALRM)
        failed, used = True, limit - grace


def wants_a_core(process: psutil.Process) -> bool:
    """True while a process computes, waits for a core or for a disk."""
    with suppress(psutil.NoSuchProcess):
        return process.status() in {psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP}
    return False


def stacks(tree: list[psutil.Process]) -> str:
    """The command and the stacks of each process."""
    text = ""
    for process in tree:
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline() or [process.name()]
            text += f"--- {process.pid} ({process.status()}), child of {process.ppid()}: {' '.join(words)[:300]}\n"
            spy = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(process.pid)]
            with suppress(subprocess.TimeoutExpired):
                done = subprocess.run(spy, capture_output=True, text=True, timeout=GRACE_S, check=False)
                # What is no Python process has the kernel's function in which it waits.
                text += done.stdout or f"waits in {Path(f'/proc/{process.pid}/wchan').read_text()}\n"
    return text


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "watchdog":
    # Ctrl-C is for the tests; this process ends when theirs does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch(psutil.Process(int(sys.argv[2])))
