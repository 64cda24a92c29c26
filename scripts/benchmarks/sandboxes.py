"""How long a program takes in each sandbox, beside ``python3 -c pass``.

The rows take turns, so that whatever else the machine does meets all of them alike. Each latency row shows what the
project promises and how many times as long as ``python3 -c pass`` of the same run it took.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import psutil
import sandboxes_rows as rows
from measures import Measure, Samples, measure_table, say, write
from sandboxes_rows import BenchmarkRow

from agentrl.sandboxes import Limits, Result, Sandbox, SandboxError, SandboxUnavailable, open_sandbox
from agentrl.sandboxes.host.local import LocalSandbox

EXAMPLES = """examples:
  sandboxes.py                         everything that this machine has: about two minutes
  sandboxes.py --quick                 does it still run? seconds
  sandboxes.py --only local            one back end
  sandboxes.py --rounds 300 --json runs/sandboxes.json
"""
BASELINE = "python3 -c pass"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its tables."""
    args = parsed(arguments)
    samples: Samples = {}
    measures: list[Measure] = []
    with ExitStack() as stack:
        sandboxes = opened(stack, args.only)
        table = [BenchmarkRow(name=BASELINE, sample=rows.interpreter, each=2), *sandbox_rows(stack, sandboxes)]
        failed = play(table, args.rounds, samples)
        for name, sandbox in sandboxes.items():
            measures += [*throughput(name, sandbox, args.seconds), *recovery(name, sandbox, args.repeats)]
    measures += memory(args.only)
    print("\n\n".join((machine(), latency_table(table, samples, failed), measure_table(measures))))
    if args.json is not None:
        write(args.json, machine(), samples, measures)


def opened(stack: ExitStack, only: str | None) -> dict[str, Sandbox]:
    """Open the back ends that this machine has."""
    found: dict[str, Sandbox] = {}
    for name in ("local", "docker"):
        if only in (None, name):
            try:
                found[name] = stack.enter_context(open_sandbox(name))
            except SandboxUnavailable as error:
                say(f"{name}: {error}")
    return found


def sandbox_rows(stack: ExitStack, sandboxes: dict[str, Sandbox]) -> Iterator[BenchmarkRow]:
    """Yield the latency rows of every back end."""
    for name, sandbox in sandboxes.items():
        session, parent = (stack.enter_context(sandbox.session()) for _ in range(2))
        parent.run("x = [1]")
        cell = partial(rows.warm_cell, session)
        warm = (1, 3) if name == "local" else (1.5, 5)
        yield BenchmarkRow(name=f"{name}: warm cell", sample=partial(cell, transaction=False), targets=warm, each=10)
        copied = (8, 15) if name == "local" else None
        yield BenchmarkRow(
            name=f"{name}: transactional cell", sample=partial(cell, transaction=True), targets=copied, each=3
        )
        made = (7, 15) if name == "local" else None
        shot = partial(rows.one_shot, sandbox)
        yield BenchmarkRow(name=f"{name}: one-shot made ready, numpy and sympy", sample=shot, targets=made, each=2)
        yield BenchmarkRow(name=f"{name}: fork() and its first cell", sample=partial(rows.fork, parent))
        for what, code, target in (("", rows.HOSTILE["sleep"][1], 50), (", fork bomb", rows.SLEEPY_BOMB, 250)):
            late = partial(rows.verdict_delay, sandbox, code)
            yield BenchmarkRow(
                name=f"{name}: verdict after deadline{what}", sample=late, targets=(target, target), rare=10
            )
    if "local" in sandboxes:
        unpooled = stack.enter_context(LocalSandbox(Limits(), ready=0))
        fresh = partial(rows.fresh, unpooled)
        yield BenchmarkRow(name="local: fresh session, no pool, numpy and sympy", sample=fresh, targets=(20, 30))


def play(table: list[BenchmarkRow], rounds: int, samples: Samples) -> dict[str, str]:
    """Run the rows in turns, of which the first is not counted; return why rows failed."""
    failed: dict[str, str] = {}
    for turn in range(rounds + 1):
        for row in table:
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
        yield per_core(f"{name}: warm cells", rate(cells, seconds) / cores, 1200 if local else None)
    for what, code, target in (("", rows.LIBRARIES, 40 if local else None), (", plain", "6 * 7", None)):
        shots = [partial(sandbox.run, code)] * (2 * cores)
        yield per_core(f"{name}: fresh one-shots{what}", rate(shots, seconds) / cores, target)


def per_core(name: str, value: float, target: int | None) -> Measure:
    """Format a rate."""
    promised = "" if target is None else f">= {target:,}"
    met = None if target is None else value >= target
    return Measure(name=name, value=f"{value:,.0f} per second and core", target=promised, met=met)


def rate(calls: list[Callable[[], Result]], seconds: float) -> float:
    """Measure results per second with each of ``calls`` repeated in a thread of its own."""
    until = time.perf_counter() + seconds

    def repeat(call: Callable[[], Result]) -> int:
        done = 0
        while time.perf_counter() < until:
            rows.expected(call(), "42")
            done += 1
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(len(calls)) as threads:
        done = sum(threads.map(repeat, calls))
    return done / (time.perf_counter() - began)


def recovery(name: str, sandbox: Sandbox, repeats: int) -> Iterator[Measure]:
    """Time the next program's result after each class of hostile program: one-shot, and in one session."""
    for kind in rows.HOSTILE:
        say(f"{name}: after {kind}")
        shots = [rows.usable_again(sandbox, kind) for _ in range(repeats)]
        cells: list[float] = []
        for _ in range(repeats):
            with sandbox.session() as session:
                session.run("6 * 7")
                cells.append(rows.usable_again(session, kind))
        for what, seconds in (("next program", shots), ("next cell", cells)):
            values = f"{median(seconds) * 1e3:.1f} ms, at most {max(seconds) * 1e3:.1f} ms"
            met = max(seconds) <= 0.1
            yield Measure(name=f"{name}: {what} after {kind}", value=values, target="<= 100 ms", met=met)


def memory(only: str | None) -> Iterator[Measure]:
    """Measure the memory of a session that waits for its first program."""
    if only in (None, "local"):
        name = "local: memory per ready session (PSS)"
        try:
            used = rows.bytes_per_session(8) / 2**20
        except (psutil.AccessDenied, SandboxUnavailable) as error:
            yield Measure(name=name, value=f"can't be measured: {error}", target="<= 8 MiB", met=None)
        else:
            yield Measure(name=name, value=f"{used:.1f} MiB", target="<= 8 MiB", met=used <= 8)


def machine() -> str:
    """Describe the machine."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    versions = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{platform.machine()}, {cores} cores, load {load:.1f}, {versions}"


def latency_table(table: list[BenchmarkRow], samples: Samples, failed: dict[str, str]) -> str:
    """Tabulate each row's percentiles beside the project's targets and the plain interpreter."""
    lines = [
        f"| program | runs | p50 ms | p99 ms | target p50 / p99 | met | x {BASELINE} |",
        "|---|---|---|---|---|---|---|",
    ]
    unit = median(samples[BASELINE])
    for row in table:
        if row.name not in samples:
            lines.append(f"| {row.name} | 0 | {failed[row.name]} | | | | |")
            continue
        half, most = percentiles(samples[row.name])
        target = met = ""
        if row.targets is not None:
            target = f"{row.targets[0]} / {row.targets[1]}"
            met = "yes" if half <= row.targets[0] and most <= row.targets[1] else "NO"
        many = len(samples[row.name])
        lines.append(f"| {row.name} | {many} | {half:.2f} | {most:.2f} | {target} | {met} | {half / unit / 1e3:.2f} |")
    return "\n".join(lines)


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """Compute the median and the 99th percentile [milliseconds]."""
    if len(seconds) == 1:
        return seconds[0] * 1e3, seconds[0] * 1e3
    cuts = quantiles(seconds, n=100, method="inclusive")
    return cuts[49] * 1e3, cuts[98] * 1e3


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
