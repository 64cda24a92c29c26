"""How long a program takes in each sandbox, beside ``python3 -c pass``.

The rows take turns, so that whatever else the machine does meets all of them alike. Each latency row shows what the
project promises and how many times as long as ``python3 -c pass`` of the same run it took.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy
import psutil
from measures import Measure, Samples, command_line, measure_table, say, timed, write

from agentrl.eval.pages import table
from agentrl.sandboxes import Limits, Result, Sandbox, SandboxError, SandboxUnavailable, Session, open_sandbox
from agentrl.sandboxes.host.local import LocalSandbox

EXAMPLES = """examples:
  sandboxes.py                         everything that this machine has: about two minutes
  sandboxes.py --quick                 does it still run? seconds
  sandboxes.py --only local            one back end
  sandboxes.py --rounds 300 --json runs/sandboxes.json
"""
BASELINE = "python3 -c pass"
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its tables."""
    args = parsed(arguments)
    samples: Samples = {}
    measures: list[Measure] = []
    with ExitStack() as stack:
        sandboxes = opened(stack, args.only)
        rows = [BenchmarkRow(name=BASELINE, sample=interpreter, each=2), *sandbox_rows(stack, sandboxes)]
        failed = play(rows, args.rounds, samples)
        for name, sandbox in sandboxes.items():
            measures += [*throughput(name, sandbox, args.seconds), *recovery(name, sandbox, args.repeats)]
    measures += memory(args.only)
    print("\n\n".join((machine(), latency_table(rows, samples, failed), measure_table(measures))))
    if args.json is not None:
        write(args.json, machine(), samples, measures)


def opened(stack: ExitStack, only: str | None) -> dict[str, Sandbox]:
    """Open the back ends that this machine has."""
    sandboxes: dict[str, Sandbox] = {}
    for name in ("local", "docker"):
        if only in (None, name):
            try:
                sandboxes[name] = stack.enter_context(open_sandbox(name))
            except SandboxUnavailable as error:
                say(f"{name}: {error}")
    return sandboxes


def sandbox_rows(stack: ExitStack, sandboxes: dict[str, Sandbox]) -> Iterator[BenchmarkRow]:
    """Yield the latency rows of every back end."""
    for name, sandbox in sandboxes.items():
        session, parent = (stack.enter_context(sandbox.session()) for _ in range(2))
        parent.run("x = [1]")
        cell = partial(warm_cell, session)
        warm = (1, 3) if name == "local" else (1.5, 5)
        yield BenchmarkRow(name=f"{name}: warm cell", sample=partial(cell, transaction=False), targets=warm, each=10)
        copied, made = ((8, 15), (7, 15)) if name == "local" else (None, None)
        copying, shot = partial(cell, transaction=True), partial(one_shot, sandbox)
        yield BenchmarkRow(name=f"{name}: transactional cell", sample=copying, targets=copied, each=3)
        yield BenchmarkRow(name=f"{name}: one-shot made ready, numpy and sympy", sample=shot, targets=made, each=2)
        yield BenchmarkRow(name=f"{name}: fork() and its first cell", sample=partial(fork, parent))
        for what, code, target in (("", HOSTILE["sleep"][1], 50), (", fork bomb", SLEEPY_BOMB, 250)):
            late, row = partial(verdict_delay, sandbox, code), f"{name}: verdict after deadline{what}"
            yield BenchmarkRow(name=row, sample=late, targets=(target, target), rare=10)
    if "local" in sandboxes:
        unpooled = stack.enter_context(LocalSandbox(Limits(), ready=0))
        sample = partial(fresh, unpooled)
        yield BenchmarkRow(name="local: fresh session, no pool, numpy and sympy", sample=sample, targets=(20, 30))


def play(rows: list[BenchmarkRow], rounds: int, samples: Samples) -> dict[str, str]:
    """Run the rows in turns, of which the first is not counted; return why rows failed."""
    failed: dict[str, str] = {}
    for turn in range(rounds + 1):
        for row in rows:
            if row.name in failed or (turn > 1 and turn % row.rare):
                continue
            try:
                taken = [row.sample() for _ in range(row.each)]
            except (SandboxError, NotImplementedError) as error:
                failed[row.name] = f"failed: {str(error)[:80]}"
                say(f"{row.name} {failed[row.name]}")
            else:
                if turn:
                    samples.setdefault(row.name, []).extend(taken)
        if turn % max(1, rounds // 10) == 0:
            say(f"round {turn} of {rounds}")
    return failed


def throughput(name: str, sandbox: Sandbox, seconds: float) -> Iterator[Measure]:
    """Measure results per second and core when every core is busy."""
    cores = len(os.sched_getaffinity(0))
    local = name == "local"
    say(f"{name}: throughput")
    with ExitStack() as stack:
        sessions = [stack.enter_context(sandbox.session()) for _ in range(cores)]
        cells = [partial(session.run, "6 * 7", transaction=False) for session in sessions]
        yield rate(f"{name}: warm cells", cells, seconds, 1200 if local else None)
    for what, code, target in (("", LIBRARIES, 40 if local else None), (", plain", "6 * 7", None)):
        yield rate(f"{name}: fresh one-shots{what}", [partial(sandbox.run, code)] * (2 * cores), seconds, target)


def rate(name: str, calls: Sequence[Callable[[], Result]], seconds: float, target: int | None) -> Measure:
    """Measure results per second and core with each of ``calls`` repeated in a thread of its own."""
    until = time.perf_counter() + seconds

    def repeat(call: Callable[[], Result]) -> int:
        done = 0
        while time.perf_counter() < until:
            expected(call(), "42")
            done += 1
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(len(calls)) as threads:
        done = sum(threads.map(repeat, calls))
    value = done / (time.perf_counter() - began) / len(os.sched_getaffinity(0))
    promised, met = ("", None) if target is None else (f">= {target:,}", value >= target)
    return Measure(name=name, value=f"{value:,.0f} per second and core", target=promised, met=met)


def recovery(name: str, sandbox: Sandbox, repeats: int) -> Iterator[Measure]:
    """Time the next program's result after each class of hostile program: one-shot, and in one session."""
    for kind in HOSTILE:
        say(f"{name}: after {kind}")
        shots = [usable_again(sandbox, kind) for _ in range(repeats)]
        cells: list[float] = []
        for _ in range(repeats):
            with sandbox.session() as session:
                session.run("6 * 7")
                cells.append(usable_again(session, kind))
        for what, seconds in (("next program", shots), ("next cell", cells)):
            values = f"{median(seconds) * 1e3:.1f} ms, at most {max(seconds) * 1e3:.1f} ms"
            met = max(seconds) <= 0.1
            yield Measure(name=f"{name}: {what} after {kind}", value=values, target="<= 100 ms", met=met)


def memory(only: str | None) -> Iterator[Measure]:
    """Measure the memory of a session that waits for its first program."""
    if only in (None, "local"):
        try:
            used = bytes_per_session(8) / 2**20
            value, met = f"{used:.1f} MiB", used <= 8
        except (psutil.AccessDenied, SandboxUnavailable) as error:
            value, met = f"can't be measured: {error}", None
        yield Measure(name="local: memory per ready session (PSS)", value=value, target="<= 8 MiB", met=met)


def machine() -> str:
    """Describe the machine."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    versions = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{platform.machine()}, {cores} cores, load {load:.1f}, {versions}"


def latency_table(rows: list[BenchmarkRow], samples: Samples, failed: dict[str, str]) -> str:
    """Tabulate each row's percentiles beside the project's targets and the plain interpreter."""
    lines: list[tuple[object, ...]] = []
    unit = median(samples[BASELINE])
    for row in rows:
        if row.name not in samples:
            lines.append((row.name, 0, failed[row.name], *[""] * 4))
            continue
        half, most = (float(part) for part in numpy.percentile(samples[row.name], (50, 99)) * 1e3)
        target = met = ""
        if row.targets is not None:
            target = f"{row.targets[0]} / {row.targets[1]}"
            met = "yes" if half <= row.targets[0] and most <= row.targets[1] else "NO"
        numbers = (f"{half:.2f}", f"{most:.2f}", target, met, f"{half / unit / 1e3:.2f}")
        lines.append((row.name, len(samples[row.name]), *numbers))
    return table(("program", "runs", "p50 ms", "p99 ms", "target p50 / p99", "met", f"x {BASELINE}"), lines)


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


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, EXAMPLES)
    parser.add_argument("--only", choices=["local", "docker"], help="one back end")
    parser.add_argument("--rounds", type=int, help="turns of every latency row (default 100; quick 3)")
    parser.add_argument("--quick", action="store_true", help="a test that all runs, no timing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there")
    args = parser.parse_args(arguments)
    args.rounds = args.rounds or (3 if args.quick else 100)
    args.seconds = 0.3 if args.quick else 4.0
    args.repeats = 1 if args.quick else 5
    return args


if __name__ == "__main__":
    main()
