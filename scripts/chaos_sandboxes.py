"""Thousands of ordinary and hostile programs from several threads, while the sandbox's own processes are killed.

Ordinary programs must get the right answer. A fault of the machinery, which only a kill from outside may cause, must be
raised and never be a status. Afterwards no process, descriptor, thread, mount, container or file may be left, and
the memory of this process must have stayed level. Ends with exit code 1 where one of these does not hold.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import psutil

from agentrl.sandboxes import Result, Sandbox, SandboxError, open_sandbox

EXAMPLES = """examples:
  chaos_sandboxes.py                                20,000 runs from four threads: several minutes
  chaos_sandboxes.py --runs 200 --seed 3            a few seconds
  chaos_sandboxes.py --backend docker --kill-every 5
"""
HOSTILE = (
    ("while True: pass", {"timeout"}),
    ("import time\ntime.sleep(60)", {"timeout"}),
    ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {"timeout"}),
    ("kept = []\nwhile True: kept.append(b'x' * (16 << 20))", {"memory", "timeout"}),
    ("while True: print('x' * 65536)", {"output_limit", "timeout"}),
    ("import os\nos._exit(3)", {"exit"}),
    ("import ctypes\nctypes.string_at(0)", {"killed"}),
    ("import os\nos.kill(-1, 9)", {"killed", "error"}),
    ("import os, time\nif os.fork() == 0: time.sleep(60)\n1", {"ok"}),
    ("import os\nfor n in range(20_000):\n    try: os.close(n)\n    except OSError: pass", {"ok", "exit", "killed"}),
    # A busy machine's cold caches may use up a fifth of a second of CPU time.
    ("def f(n): return f(n + 1)\nf(0)", {"error", "timeout"}),
    (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return [f(n + 1)]\nf(0)",
        {"error", "killed", "memory", "timeout"},
    ),
    ("open('/tmp/a', 'wb').write(b'x' * (128 << 20))", {"error", "memory", "killed", "timeout"}),
)
"""Programs with the statuses that each may end with."""
HOSTILE_S = 0.2
GROWTH_BYTES = 24 << 20
_GRACE_S = 5.0
_AFTERMATH_S = 1.0
_SETTLE_S = 120.0
_SPARED = 5  # programs that end between two kills


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What may come of a program."""

    statuses: frozenset[str]
    """Statuses that it may end with."""
    value: str | None = None
    """Its value, where it has to be right."""
    kept: bool = False
    """The variables of its session must be there afterwards."""


@dataclass(slots=True)
class Record:
    """What has happened so far; every method may be called from any thread."""

    counts: Counter[str] = field(default_factory=Counter[str])
    """Results by status, faults and kills."""
    violations: list[str] = field(default_factory=list[str])
    """What must not have happened, a sentence each."""
    kills: list[float] = field(default_factory=list[float])
    """When something was killed from outside, on the monotonic clock [seconds]."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while any of these changes."""

    def count(self, name: str) -> None:
        """Count one."""
        with self.lock:
            self.counts[name] += 1

    def ended(self) -> int:
        """How many programs have ended."""
        with self.lock:
            return sum(count for name, count in self.counts.items() if not name.startswith("killed "))

    def judge(self, code: str, expected: Expected, found: Result | SandboxError, began: float) -> None:
        """Count an outcome, and note what is wrong with it.

        Args:
            code: The program.
            expected: What may come of it.
            found: What came.
            began: When it was started, on the monotonic clock [seconds].
        """
        with self.lock:
            if isinstance(found, SandboxError):
                self.counts["fault"] += 1
                if not any(moment > began - _GRACE_S for moment in self.kills):
                    self.violations.append(f"a fault that nothing caused: {found}: {code!r}")
                return
            self.counts[found.status] += 1
            # A worker that died twice is the program's doing, as far as anyone can tell from inside. The first kill may
            # have struck one of the pool that was not yet seen to be dead when it was taken.
            kills = sum(moment > began - _AFTERMATH_S for moment in self.kills)
            struck = found.status == "crash" and found.attempts == 2 and kills >= 2
            right = found.status in expected.statuses and expected.value in (None, found.value)
            if not struck and (not right or (expected.kept and found.state == "lost")):
                told = (found.status, found.value, found.exc_type, found.signal, found.state)
                self.violations.append(f"expected {sorted(expected.statuses)} {expected.value}, not {told}: {code!r}")


def ordinary(rng: random.Random) -> tuple[str, Expected]:
    """Make a program whose value is known."""
    a, b = rng.randrange(10**6), rng.randrange(10**6)
    words = "".join(rng.choices("abc", k=rng.randrange(1, 2000)))
    programs = [
        (f"{a} * {b}", repr(a * b)),
        (f"total = 0\nfor n in range({a % 3000}): total += n\ntotal", repr(sum(range(a % 3000)))),
        (f"print('x' * {a % 90_000})\nlen({words!r})", repr(len(words))),
        (f"open('/tmp/a', 'w').write({words!r})\nopen('/tmp/a').read().count('a')", repr(words.count("a"))),
        (f"import numpy\nint(numpy.arange({a % 999}).sum())", repr(sum(range(a % 999)))),
        (f"import sympy\nsympy.gcd({a}, {b}) == __import__('math').gcd({a}, {b})", "True"),
        (f"import subprocess\nsubprocess.run(['echo', '{a}'], capture_output=True).stdout", repr(f"{a}\n".encode())),
    ]
    code, value = rng.choice(programs)
    return code, Expected(statuses=frozenset({"ok"}), value=value)


def work(sandbox: Sandbox, record: Record, seed: int, left: Iterator[int]) -> None:
    """Run programs until none is left; ``left`` is shared by all threads."""
    rng = random.Random(seed)
    for _ in left:
        kind = rng.random()
        if kind < 0.15:
            code, statuses = rng.choice(HOSTILE)
            attempt(record, code, Expected(statuses=frozenset(statuses)), lambda c: sandbox.run(c, timeout=HOSTILE_S))
        elif kind < 0.3:
            conversation(sandbox, record, rng)
        else:
            attempt(record, *ordinary(rng), sandbox.run)


def conversation(sandbox: Sandbox, record: Record, rng: random.Random) -> None:
    """Run cells in one session, a hostile one among them that must leave the variables as they were."""
    secret = rng.randrange(10**9)
    fine = Expected(statuses=frozenset({"ok"}), value=repr(secret), kept=True)
    with sandbox.session(seed=secret) as session:
        if not attempt(record, f"x = {secret}\nx", fine, session.run):
            return
        code, statuses = rng.choice(HOSTILE[:6])
        spoiling = f"x = 0\n{code}"
        expected = Expected(statuses=frozenset(statuses), kept=True)
        if attempt(record, spoiling, expected, lambda c: session.run(c, timeout=HOSTILE_S)):
            attempt(record, "x", fine, session.run)


def attempt(record: Record, code: str, expected: Expected, run: Callable[[str], Result]) -> bool:
    """Run one program and judge it; whether there was a result, and the variables of its session are there."""
    began = time.monotonic()
    try:
        found: Result | SandboxError = run(code)
    except SandboxError as error:
        found = error
    record.judge(code, expected, found, began)
    return isinstance(found, Result) and found.state != "lost"


def kill_at_random(record: Record, args: argparse.Namespace, stop: threading.Event) -> None:
    """Kill a zygote, the pid 1 of a session or a container now and then, as an out-of-memory killer would.

    On a busy machine nothing would come to its end between two kills, so some programs do first.
    """
    rng, before = random.Random(args.seed), 0
    while not stop.wait(rng.expovariate(1 / args.kill_every)):
        if record.ended() - before < _SPARED:
            continue
        kind, end = docker_victim(rng) if args.backend == "docker" else local_victim(rng)
        if end is None:
            continue
        before = record.ended()
        with record.lock:
            record.kills.append(time.monotonic())
            record.counts[f"killed {kind}"] += 1
        end()
        # Where the killing takes its time, the fault comes later than its beginning.
        with record.lock:
            record.kills[-1] = time.monotonic()


def local_victim(rng: random.Random) -> tuple[str, Callable[[], None] | None]:
    """Choose a pid 1: what it is, and what kills it, if there is one."""
    kind: Literal["zygote", "session"] = "zygote" if rng.random() < 0.1 else "session"
    found = first_processes()[kind]

    def end(pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    return kind, partial(end, rng.choice(found)) if found else None


def docker_victim(rng: random.Random) -> tuple[str, Callable[[], None] | None]:
    """Choose a container of this process, and what ends it, if there is one."""
    from agentrl.sandboxes import docker_engine

    with docker_engine.connect() as engine:
        found = [one.id for one in engine.owned() if one.owner == docker_engine.owner()]

    def end(container: str) -> None:
        with docker_engine.connect() as again:
            again.remove(container)

    return "container", partial(end, rng.choice(found)) if found else None


def first_processes() -> dict[Literal["zygote", "session"], list[int]]:
    """Every pid 1 below this process: of a sandbox's namespaces, and of the sessions' inside of those."""
    here = len(pids_inside(os.getpid()))
    found: dict[Literal["zygote", "session"], list[int]] = {"zygote": [], "session": []}
    for child in psutil.Process().children(recursive=True):
        with suppress(FileNotFoundError, ProcessLookupError):
            inside = pids_inside(child.pid)
            if inside[-1] == 1 and len(inside) > here:
                found["zygote" if len(inside) == here + 1 else "session"].append(child.pid)
    return found


def pids_inside(pid: int) -> list[int]:
    """The process's ids, from our namespace inwards."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [int(word) for line in lines if line.startswith("NSpid:") for word in line.split()[1:]]


def belongings(backend: str) -> dict[str, int]:
    """Count what this process holds; none of it may grow."""
    held = {
        "processes": len(psutil.Process().children(recursive=True)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
    }
    if backend == "docker":
        from agentrl.sandboxes import docker_engine

        with docker_engine.connect() as engine:
            me = docker_engine.owner()
            held["containers"] = sum(one.owner == me for one in engine.owned())
    return held


def resident_bytes() -> int:
    """Resident memory of this process [bytes]."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def play(args: argparse.Namespace, record: Record) -> None:
    """Open a sandbox, let the threads and the killer loose, close it."""
    left, stop = Shared(args.runs), threading.Event()
    with open_sandbox(args.backend) as sandbox:
        workers = [
            threading.Thread(target=guarded, args=(record, lambda n=n: work(sandbox, record, args.seed + n, left)))
            for n in range(args.threads)
        ]
        killer = threading.Thread(target=kill_at_random, args=(record, args, stop))
        for thread in (*workers, killer):
            thread.start()
        watch(record, workers, args.runs)
        stop.set()
        killer.join()
        if (open_sessions := sandbox.health().sessions) != 0:
            record.violations.append(f"{open_sessions} sessions are still counted as open")


def guarded(record: Record, call: Callable[[], None]) -> None:
    """Note what a thread dies of: nothing but a SandboxError may come out of a sandbox."""
    try:
        call()
    except Exception as error:  # whatever it is, it is a finding, and the other threads go on
        with record.lock:
            record.violations.append(f"{type(error).__name__} came out of the sandbox: {error}")


def watch(record: Record, workers: list[threading.Thread], runs: int) -> None:
    """Wait for the threads, tell how it goes, and compare memory at a third of the way with memory at the end."""
    level, told, shown = 0, time.monotonic(), 0
    while any(thread.is_alive() for thread in workers):
        time.sleep(0.1)
        done = record.ended()
        with record.lock:
            new = record.violations[shown:]
        for violation in new:
            print(violation, file=sys.stderr, flush=True)
        shown += len(new)
        if not level and done > runs / 3:
            level = resident_bytes()
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(f"{done} done, {len(record.violations)} violations", file=sys.stderr, flush=True)
    for thread in workers:
        thread.join()
    grown = resident_bytes() - level
    record.counts["grown KiB"] = max(0, grown) >> 10
    if level and grown > GROWTH_BYTES:
        record.violations.append(f"the memory of this process grew by {grown >> 20} MiB")


class Shared:
    """Numbers below ``count`` for several threads: each goes to one of them."""

    def __init__(self, count: int) -> None:
        self._numbers = iter(range(count))
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._numbers)


def leftovers(before: dict[str, int], backend: str) -> list[str]:
    """Wait until as much is held as before, and say what is too much in the end."""
    until = time.monotonic() + _SETTLE_S
    while time.monotonic() < until:
        after = belongings(backend)
        left = [
            f"{after[name] - count} {name} were left behind" for name, count in before.items() if after[name] > count
        ]
        if not left:
            return []
        time.sleep(0.05)
    return left


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chaos, print what happened as JSON, and give the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20_000, help="programs and conversations in all (default 20000)")
    parser.add_argument("--threads", type=int, default=4, help="threads that start them (default 4)")
    parser.add_argument("--kill-every", type=float, default=1.0, metavar="S", help="mean seconds to a kill (default 1)")
    parser.add_argument("--backend", choices=["local", "docker"], default="local", help="which one (default local)")
    parser.add_argument("--seed", type=int, default=0, help="of the programs and the kills (default 0)")
    args = parser.parse_args(arguments)
    record, began = Record(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        before_dir, tempfile.tempdir = tempfile.tempdir, scratch
        try:
            with open_sandbox(args.backend) as sandbox:
                sandbox.run("1")  # whatever is loaded or opened once is not left behind
            before = belongings(args.backend)
            play(args, record)
            record.violations += leftovers(before, args.backend)
        finally:
            tempfile.tempdir = before_dir
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"seconds": seconds, "counts": dict(record.counts), "violations": record.violations}, indent=1))
    return 1 if record.violations else 0


if __name__ == "__main__":
    sys.exit(main())
