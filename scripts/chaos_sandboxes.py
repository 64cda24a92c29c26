"""Thousands of ordinary and hostile programs from several threads, while the sandbox's own processes are killed.

Ordinary programs must get the right answer. A fault of the machinery, which only a kill from outside may cause, must be
raised and never be a status. Afterwards no process, descriptor, thread, mount, container or file may be left, and
the memory of this process must have stayed level. Ends with exit code 1 where one of these does not hold.
"""

import argparse
import json
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import psutil

from agentrl.sandboxes import Limits, Result, Sandbox, SandboxError, open_sandbox

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.sandboxes.conformance import programs

EXAMPLES = """examples:
  chaos_sandboxes.py                                20,000 runs from four threads: several minutes
  chaos_sandboxes.py --runs 200 --seed 3            a few seconds
  chaos_sandboxes.py --backend docker --kill-every 5
"""
UNDONE = ("infinite_loop", "sleep_past_timeout", "fork_bomb_catching", "stdout_flood", "os_exit_0", "sigkill_self")
"""Hostile programs of the conformance suite that leave a session's variables as they were."""
NAMES = (
    *(*UNDONE, "memory_bomb_bytearray", "segfault_null", "kill_minus1", "daemonize_double_fork", "plain_recursion"),
    *("c_stack_overflow", "fd_exhaustion", "disk_fill_tmp", "closes_every_descriptor"),
)
"""Hostile programs of the conformance suite that are played."""
_LISTED = (Path(programs.__file__).with_name(name).read_text() for name in ("hostile.json", "further.json"))
_ENTRIES = {entry["name"]: entry for listed in _LISTED for entry in json.loads(listed)}
HOSTILE_S = 0.2
"""CPU time limit of programs that may time out [seconds]; the others get the default."""
GROWTH_BYTES = 24 << 20
_SETTLE_S = 120.0
_HEARD_S = 1.0  # until the sandbox has heard of a removed container


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The allowed outcomes of a program."""

    statuses: Set[str]
    """Statuses that it may end with."""
    value: str | None = None
    """Its value, where that is checked."""
    keeps_state: bool = False
    """True if its session's variables must survive it."""


@dataclass(slots=True)
class Record:
    """The outcomes so far; every method may be called from any thread."""

    counts: Counter[str] = field(default_factory=Counter[str])
    """Results by status, faults and kills."""
    violations: list[str] = field(default_factory=list[str])
    """Violated invariants, a sentence each."""
    running: set[float] = field(default_factory=set[float])
    """Start times of the runs and conversations that have not ended yet, on the monotonic clock [seconds]."""
    last_kill: float = -math.inf
    """Time at which the last kill from outside had taken effect, and infinity until it has [seconds]."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while any of these changes."""

    @contextmanager
    def run(self) -> Iterator[float]:
        """Count a run or conversation as running, and yield its start time."""
        with self.lock:
            # No two start times are equal: the clock counts nanoseconds, and the lock admits one reader at a time.
            self.running.add(began := time.monotonic())
        try:
            yield began
        finally:
            with self.lock:
                self.running.remove(began)

    def may_kill(self) -> bool:
        """Return True if everything that the last kill may have hit has ended.

        The sandbox blames a program whose worker dies twice, so no program may meet two kills.
        """
        with self.lock:
            return all(began > self.last_kill for began in self.running)

    def violate(self, sentence: str) -> None:
        """Record a violated invariant, and print it at once."""
        self.violations.append(sentence)
        print(sentence, file=sys.stderr, flush=True)

    def ended(self) -> int:
        """Count the programs that have ended."""
        with self.lock:
            return sum(count for name, count in self.counts.items() if not name.startswith("killed "))

    def judge(self, code: str, expected: Expected, outcome: Result | SandboxError, began: float) -> None:
        """Count an outcome, and record a violation if it is wrong.

        Args:
            code: The program.
            expected: The allowed outcomes.
            outcome: The result, or the fault.
            began: Start time of it or its conversation, on the monotonic clock [seconds].
        """
        with self.lock:
            if isinstance(outcome, SandboxError):
                self.counts["fault"] += 1
                if began > self.last_kill:
                    self.violate(f"a fault that nothing caused: {outcome}: {code!r}")
                return
            self.counts[outcome.status] += 1
            right = outcome.status in expected.statuses and expected.value in (None, outcome.value)
            if not right or (expected.keeps_state and outcome.state == "lost"):
                seen = (outcome.status, outcome.value, outcome.exc_type, outcome.signal, outcome.state)
                self.violate(f"expected {sorted(expected.statuses)} {expected.value}, not {seen}: {code!r}")


def hostile(rng: random.Random, names: Sequence[str]) -> tuple[str, Expected]:
    """Choose a program of the conformance suite, which may end as it may there."""
    entry = _ENTRIES[rng.choice(names)]
    # A program is only blamed for a crash after two deaths. None meets two kills, but one that kills itself dies again.
    statuses = set(entry["expect"]["verdict"]) - {"crash"}
    if "killed" in statuses:
        statuses.add("crash")
    return programs.source(entry, Limits(), Path()), Expected(statuses=statuses)


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
    return code, Expected(statuses={"ok"}, value=value)


def work(sandbox: Sandbox, record: Record, seed: int, left: Iterator[int]) -> None:
    """Run programs until none is left; all threads share ``left``, whose steps the interpreter's lock guards."""
    rng = random.Random(seed)
    for _ in left:
        kind = rng.random()
        with record.run() as began:
            if kind < 0.15:
                attempt(record, began, *hostile(rng, NAMES), sandbox.run)
            elif kind < 0.3:
                conversation(sandbox, record, rng, began)
            else:
                attempt(record, began, *ordinary(rng), sandbox.run)


def conversation(sandbox: Sandbox, record: Record, rng: random.Random, began: float) -> None:
    """Run cells in one session, a hostile one among them that must leave the variables as they were."""
    secret = rng.randrange(10**9)
    fine = Expected(statuses={"ok"}, value=repr(secret), keeps_state=True)
    with sandbox.session(seed=secret) as session:
        if not attempt(record, began, f"x = {secret}\nx", fine, session.run):
            return
        code, expected = hostile(rng, UNDONE)
        if attempt(record, began, f"x = 0\n{code}", replace(expected, keeps_state=True), session.run):
            attempt(record, began, "x", fine, session.run)


def attempt(record: Record, began: float, code: str, expected: Expected, run: Callable[..., Result]) -> bool:
    """Run one program and judge it; return True if there was a result and its session's variables survived."""
    try:
        outcome: Result | SandboxError = run(code, timeout=HOSTILE_S if "timeout" in expected.statuses else None)
    except SandboxError as error:
        outcome = error
    record.judge(code, expected, outcome, began)
    return isinstance(outcome, Result) and outcome.state != "lost"


def kill_at_random(record: Record, args: argparse.Namespace, stop: threading.Event) -> None:
    """Kill a zygote, the pid 1 of a session or a container now and then, as an out-of-memory killer would."""
    rng = random.Random(args.seed)
    while not stop.wait(rng.expovariate(1 / args.kill_every)):
        if not record.may_kill():
            continue
        kind, end = docker_victim(rng) if args.backend == "docker" else local_victim(rng)
        if end is None:
            continue
        with record.lock:
            record.last_kill = math.inf
            record.counts[f"killed {kind}"] += 1
        end()
        with record.lock:
            record.last_kill = time.monotonic()


def local_victim(rng: random.Random) -> tuple[str, Callable[[], None] | None]:
    """Choose a pid 1; return its kind, and a call that kills it and waits for its end, if there is one."""
    kind: Literal["zygote", "session"] = "zygote" if rng.random() < 0.1 else "session"
    candidates = first_processes()[kind]

    def end(pid: int) -> None:
        with suppress(psutil.NoSuchProcess):
            victim = psutil.Process(pid)
            victim.kill()
            # Before the kernel has closed its descriptors, the pool may still hand it out.
            while victim.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.001)

    return kind, partial(end, rng.choice(candidates)) if candidates else None


def docker_victim(rng: random.Random) -> tuple[str, Callable[[], None] | None]:
    """Choose a container of this process; return its kind, and a call that removes it, if there is one."""
    from agentrl.sandboxes.docker import engine as docker_engine

    with docker_engine.connect() as engine:
        containers = [container for container, name in engine.owned().items() if name == docker_engine.owner()]

    def end(container: str) -> None:
        with docker_engine.connect() as again:
            again.remove(container)
        time.sleep(_HEARD_S)

    return "container", partial(end, rng.choice(containers)) if containers else None


def first_processes() -> dict[Literal["zygote", "session"], list[int]]:
    """Find every pid 1 below this process: of a sandbox's namespaces, and of the sessions' inside those."""
    here = len(pids_inside(os.getpid()))
    first_pids: dict[Literal["zygote", "session"], list[int]] = {"zygote": [], "session": []}
    for child in psutil.Process().children(recursive=True):
        with suppress(FileNotFoundError, ProcessLookupError):
            inside = pids_inside(child.pid)
            if inside[-1] == 1 and len(inside) > here:
                first_pids["zygote" if len(inside) == here + 1 else "session"].append(child.pid)
    return first_pids


def pids_inside(pid: int) -> list[int]:
    """List the process's ids, from our namespace inwards."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [int(word) for line in lines if line.startswith("NSpid:") for word in line.split()[1:]]


def belongings(backend: str) -> dict[str, int]:
    """Count the resources of this process, none of which may grow."""
    held = {
        "processes": len(psutil.Process().children(recursive=True)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
    }
    if backend == "docker":
        from agentrl.sandboxes.docker import engine as docker_engine

        with docker_engine.connect() as engine:
            held["containers"] = list(engine.owned().values()).count(docker_engine.owner())
    return held


def resident_bytes() -> int:
    """Read the resident memory of this process [bytes]."""
    return psutil.Process().memory_info().rss


def play(args: argparse.Namespace, record: Record) -> None:
    """Open a sandbox, run the threads and the killer, close it."""
    left, stop = iter(range(args.runs)), threading.Event()
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
            record.violate(f"{open_sessions} sessions are still counted as open")


def guarded(record: Record, call: Callable[[], None]) -> None:
    """Record what a thread raises as a violation: a sandbox may raise nothing but SandboxError."""
    try:
        call()
    except Exception as error:  # whatever it is, it is a finding, and the other threads go on
        record.violate(f"{type(error).__name__} came out of the sandbox: {error}")


def watch(record: Record, workers: list[threading.Thread], runs: int) -> None:
    """Wait for the threads, print progress, and compare memory after a third of the runs with memory at the end."""
    level, reported = 0, time.monotonic()
    while any(thread.is_alive() for thread in workers):
        time.sleep(0.1)
        done = record.ended()
        if not level and done > runs / 3:
            level = resident_bytes()
        if time.monotonic() - reported > 10:
            reported = time.monotonic()
            print(f"{done} done, {len(record.violations)} violations", file=sys.stderr, flush=True)
    for thread in workers:
        thread.join()
    grown = resident_bytes() - level
    record.counts["grown KiB"] = max(0, grown) >> 10
    if level and grown > GROWTH_BYTES:
        record.violate(f"the memory of this process grew by {grown >> 20} MiB")


def leftovers(before: dict[str, int], backend: str) -> list[str]:
    """Wait until no more resources are held than before; return what is left over at the end."""
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
