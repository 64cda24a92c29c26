"""The rows of the sandbox benchmark: one for each way of running a program."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from agentrl.sandboxes import Limits, Result, Sandbox, SandboxError, Session
from agentrl.sandboxes.host.local import LocalSandbox

PYTHON = os.path.realpath(sys.executable)
"""The interpreter itself: a virtual environment's start is slower, which would flatter every ratio."""
LIBRARIES = "import numpy, sympy\nint(sympy.Integer(6) * 7)"
SLEEPY_BOMB = """import os, time
while True:
    try: os.fork()
    except OSError: time.sleep(0.05)"""
HOSTILE = {
    "endless loop": (0.1, "while True: pass"),
    "sleep": (0.1, "import time\ntime.sleep(60)"),
    "fork bomb": (0.1, "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"),
    "sleeping fork bomb": (0.1, SLEEPY_BOMB),
    "memory hog": (5.0, "kept = []\nwhile True: kept.append(b'x' * (8 << 20))"),
    "thread bomb": (5.0, "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()"),
    "flood of output": (5.0, "while True: print('x' * 65536)"),
    "full disk": (5.0, "with open('/tmp/a', 'wb') as file:\n    while True: file.write(b'x' * (1 << 20))"),
    "os._exit": (5.0, "import os\nos._exit(3)"),
    "segmentation fault": (5.0, "import ctypes\nctypes.string_at(0)"),
    "kill itself": (5.0, "import os\nos.kill(os.getpid(), 9)"),
    "kill everything": (5.0, "import os\nos.kill(-1, 9)"),
}
"""Hostile programs by class, with the CPU seconds that each is given."""
DEADLINE_S = 0.2
SETTLE_S = 0.06
"""A pause in which the next session gets ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRow:
    """One way to run a program."""

    name: str
    """Its name in the table."""
    sample: Callable[[], float]
    """Prepare, run once and return the seconds that count."""
    targets: tuple[float, float] | None = None
    """The project's targets: p50 and p99 [milliseconds]."""
    each: int = 1
    """Samples per round: quick rows get more."""
    rare: int = 1
    """Take part in one round of this many: slow rows get fewer."""


def timed(call: Callable[[], object]) -> float:
    """Time one call in seconds."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def expected(result: Result, value: str) -> Result:
    """Return the result if it is the right one: a wrong one must not be timed as a quick one."""
    if (result.status, result.value) != ("ok", value):
        raise SandboxError(f"expected ok and {value}, not {result.status} and {result.value}: {result.traceback}")
    return result


def interpreter() -> float:
    """Time a process that is only the interpreter."""
    return timed(lambda: subprocess.run([PYTHON, "-c", "pass"], check=True))


def one_shot(sandbox: Sandbox) -> float:
    """Time one program that uses numpy and sympy, on a session that was made in advance."""
    time.sleep(SETTLE_S)
    return timed(lambda: expected(sandbox.run(LIBRARIES), "42"))


def warm_cell(session: Session, *, transaction: bool) -> float:
    """Time one cell of a session that has run others."""
    return timed(lambda: expected(session.run("6 * 7", transaction=transaction), "42"))


def fork(session: Session) -> float:
    """Time a copy of a session until its first cell is done."""
    copies: list[Session] = []

    def run() -> None:
        copies.append(session.fork())
        expected(copies[0].run("x", transaction=False), "[1]")

    seconds = timed(run)
    copies[0].close()
    return seconds


def fresh(unpooled: Sandbox) -> float:
    """Time a session that was not made in advance, until its first cell is done; ``unpooled`` keeps none ready."""
    with unpooled.session() as session:
        return timed(lambda: expected(session.run(LIBRARIES, transaction=False), "42"))


def verdict_delay(sandbox: Sandbox, code: str) -> float:
    """Time from the deadline to the verdict, of a program that sleeps: its wall clock decides.

    Raises:
        SandboxError: It was no timeout, or the CPU time ran out first.
    """
    began = time.perf_counter()
    result = sandbox.run(code, timeout=DEADLINE_S)
    took = time.perf_counter() - began - result.queue_s
    deadline = DEADLINE_S * sandbox.limits.wall_factor
    if result.status != "timeout" or took < deadline:
        raise SandboxError(f"expected a timeout by the wall clock, not {result.status} after {took:.3f} s")
    return took - deadline


def usable_again(runner: Sandbox | Session, kind: str) -> float:
    """Time from the verdict of a hostile program to the result of the next one, in the same session if it is one."""
    timeout, code = HOSTILE[kind]
    runner.run(code, timeout=timeout)
    return timed(lambda: expected(runner.run("6 * 7"), "42"))


def proportional_bytes() -> int:
    """Memory of this process and all below it, shared pages divided among their users [bytes].

    Raises:
        psutil.AccessDenied: Only root may look into processes that hide themselves.
    """
    total = 0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


def bytes_per_session(count: int) -> float:
    """Measure the memory of one more session that waits for its first program [bytes].

    Args:
        count: Sessions that each of the two zygotes keeps ready.
    """
    used: list[int] = []
    for ready in (0, count):
        with LocalSandbox(Limits(), ready=ready) as sandbox:
            for code in (LIBRARIES, "6 * 7"):
                expected(sandbox.run(code), "42")
            # The pool refills in the background after the two runs.
            time.sleep(1.0 + 0.02 * count)
            used.append(proportional_bytes())
    return (used[1] - used[0]) / (2 * count)
