"""The cases that also act on the host: listeners, threads, markers and counts."""

import errno
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

from agentrl.sandboxes.base import Result, Sandbox, SandboxClosed

from .model import Case, Violation, must, shown
from .programs import SECRET

_Error = TypeVar("_Error", bound=Exception)
_GONE_S: Final = 5.0
# What a sandbox may set as it likes; everything else that equals the host's value came from the host.
_OWN_VARIABLES: Final = (
    *("PATH", "HOME", "LANG", "LC_", "PYTHON", "LD_LIBRARY_PATH"),
    *("OMP_", "OPENBLAS_", "MKL_", "NUMEXPR_", "MALLOC_"),
)
_CONNECT: Final = """
import socket
s = socket.socket(socket.{family}, socket.SOCK_STREAM)
s.settimeout(1)
try:
    s.connect({address!r})
    print("CONNECTED")
except OSError as error:
    print("no", error.errno)
"""
_BUSY: Final = """
import time
until = time.process_time() + 0.15
while time.process_time() < until: pass
"""


def _ok(result: Result) -> Result:
    must(result.status == "ok", shown(result))
    return result


def _raises(kind: type[_Error], call: Callable[[], object], what: str) -> _Error:
    try:
        seen = call()
    except kind as error:
        return error
    raise Violation(f"{what} was accepted and gave {seen!r}")


@contextmanager
def _listening(family: socket.AddressFamily, address: str | tuple[str, int]) -> Generator[socket.socket]:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind(address)
        server.listen()
        yield server


def _must_not_connect(sandbox: Sandbox, family: str, address: object) -> None:
    result = _ok(sandbox.run(_CONNECT.format(family=family, address=address)))
    must("CONNECTED" not in result.stdout, shown(result))


def host_port_is_out_of_reach(sandbox: Sandbox) -> None:
    """A service on the host's loopback can't be reached."""
    with _listening(socket.AF_INET, ("127.0.0.1", 0)) as server:
        _must_not_connect(sandbox, "AF_INET", server.getsockname())


def host_abstract_socket_is_out_of_reach(sandbox: Sandbox) -> None:
    """A service on an abstract unix socket of the host can't be reached."""
    name = f"\0agentrl-{os.getpid()}-{time.monotonic_ns()}"
    with _listening(socket.AF_UNIX, name):
        _must_not_connect(sandbox, "AF_UNIX", name)


def abstract_socket_of_another_session(sandbox: Sandbox) -> None:
    """An abstract unix socket of another session can't be reached."""
    serve = "import socket\ns = socket.socket(socket.AF_UNIX)\ns.bind('\\0beside')\ns.listen()"
    with sandbox.session() as server:
        _ok(server.run(serve, transaction=False))
        _must_not_connect(sandbox, "AF_UNIX", "\0beside")


def host_environment_is_unknown(sandbox: Sandbox) -> None:
    """No variable of the host's environment, and not its name, reaches a program."""
    result = _ok(sandbox.run("import os\nfor k, v in os.environ.items(): print(k + '=' + v, end='\\0')"))
    seen = dict(part.split("=", 1) for part in result.stdout.split("\0") if "=" in part)
    leaked = {k for k, v in seen.items() if os.environ.get(k) == v and not k.startswith(_OWN_VARIABLES)}
    must(not leaked, f"variables of the host: {sorted(leaked)}")


def host_name_is_unknown(sandbox: Sandbox) -> None:
    """The machine's name is not the program's business."""
    result = _ok(sandbox.run("import os\nos.uname().nodename"))
    must(result.value != repr(os.uname().nodename), shown(result))


def read_file_follows_no_link(sandbox: Sandbox) -> None:
    """``read_file`` reads as the program, and follows no link of the program's, wherever it points."""
    with tempfile.TemporaryDirectory(prefix="canary-") as folder, sandbox.session() as session:
        canary = Path(folder) / "secret"
        canary.write_text(SECRET)
        links = (str(canary), "/proc/1/environ", "/etc/shadow", "/tmp/f")
        _ok(session.run(f"import os\nfor n, to in enumerate({links!r}): os.symlink(to, str(n))"))
        _ok(session.run("os.mkdir('d')\nos.symlink('d', 'e')\nfor name in ('f', 'd/f'): open(name, 'w').write('x')"))
        must((content := session.read_file("d/f")) == b"x", f"{content!r}")
        for path in (str(canary), f"/proc/{os.getpid()}/environ"):
            _raises(OSError, lambda path=path: session.read_file(path), f"reading {path}")
        for path in ("0", "1", "2", "/tmp/3", "e/f", "/tmp/e/f"):
            number = _raises(OSError, lambda path=path: session.read_file(path), f"reading {path}").errno
            must(number == errno.ELOOP, f"error {number} for {path}")


def read_file_returns_what_was_written(sandbox: Sandbox) -> None:
    """``read_file`` returns bytes, from an offset of zero up to the bound."""
    with sandbox.session() as session:
        _ok(session.run("open('f', 'wb').write(bytes(range(256)) * 8000)\nopen('big', 'wb').truncate(20 << 20)"))
        content, part = session.read_file("/tmp/f", 1 << 22), session.read_file("f", 10)
        must(content == bytes(range(256)) * 8000, f"{len(content)} other bytes")
        must((part, session.read_file("f", 0)) == (bytes(range(10)), b""), f"{part!r}")
        must(session.read_file("big", 700_000) == bytes(700_000), "other bytes of a large file")


def _survivors(marker: str) -> list[str]:
    pids: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marker.encode() in (folder / "cmdline").read_bytes():
                pids.append(folder.name)
    return pids


def _must_vanish(marker: str) -> None:
    until = time.monotonic() + _GONE_S
    while pids := _survivors(marker):
        must(time.monotonic() < until, f"processes {pids} outlived their session")
        time.sleep(0.05)


def _daemon(marker: str) -> str:
    inner = f"if os.fork() == 0:\n        os.execv('/bin/sleep', ['sleep', '{marker}'])"
    return f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    {inner}\n    os._exit(0)\ntime.sleep(0.2)\n"


def _marker() -> str:
    # Seconds of a sleep that nobody else asks for.
    return f"9{time.monotonic_ns() % 10**9:09d}"


def daemon_dies_with_a_one_shot(sandbox: Sandbox) -> None:
    """Double fork and setsid do not outlive a one-shot run, whichever way it ends."""
    for ending, status in (("", "ok"), ("while True: pass", "timeout"), ("os._exit(1)", "exit")):
        marker = _marker()
        result = sandbox.run(_daemon(marker) + ending, timeout=0.6)
        must(result.status == status, shown(result))
        _must_vanish(marker)


def daemon_dies_with_its_session(sandbox: Sandbox) -> None:
    """A session that is closed leaves no process."""
    marker = _marker()
    with sandbox.session() as session:
        _ok(session.run(_daemon(marker)))
    _must_vanish(marker)


def daemon_dies_with_a_failed_cell(sandbox: Sandbox) -> None:
    """A cell that failed leaves no process, although the session goes on."""
    marker = _marker()
    with sandbox.session() as session:
        _ok(session.run("x = 1"))
        must((result := session.run(_daemon(marker) + "os._exit(1)")).status == "exit", shown(result))
        _must_vanish(marker)
        must((result := session.run("x")).value == "1", shown(result))


def timeouts_leave_no_zombie(sandbox: Sandbox) -> None:
    """The host's process has no more zombies after some timeouts than before."""

    def zombies() -> int:
        count = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_bytes().rpartition(b")")[2].split()
                count += fields[0] == b"Z" and int(fields[1]) == os.getpid()
        return count

    before = zombies()
    for _ in range(4):
        must((result := sandbox.run("while True: pass", timeout=0.1)).status == "timeout", shown(result))
    must(zombies() <= before, f"{zombies()} zombies after, {before} before")


def waiting_is_not_running(sandbox: Sandbox) -> None:
    """Many programs at once each get their own time: what they wait for a core is reported, and counts for nobody."""
    # A program may take three times its CPU limit, which is twice what it needs; the last ones wait for twice as long.
    many = 12 * len(os.sched_getaffinity(0))
    with ExitStack() as stack, ThreadPoolExecutor(many) as pool:
        sessions = [stack.enter_context(sandbox.session()) for _ in range(many)]
        for session in sessions:
            _ok(session.run("1"))
        # Measured first: on a machine that others use as well, everything takes longer for no fault of the sandbox.
        enough = max(0.4, 2 * _ok(sessions[0].run(_BUSY, timeout=10)).wall_s)
        began = time.monotonic()
        results = list(pool.map(lambda session: session.run(_BUSY, enough), sessions))
        passed_s, queue_s = time.monotonic() - began, max(result.queue_s for result in results)
    failed = [shown(result) for result in results if result.status != "ok"]
    must(len(failed) <= many // 8, f"{len(failed)} of {many} with {enough:.2f} s each: {failed[:1]}")
    must(0.3 < queue_s < passed_s, f"the longest wait was reported as {queue_s:.2f} s of {passed_s:.2f} s")


def sessions_do_not_mix(sandbox: Sandbox) -> None:
    """Sessions that run at the same time have their own variables, files and processes."""

    def play(number: int) -> str:
        with sandbox.session() as session:
            session.run(f"import os, time\nx = {number}\nopen('/tmp/own', 'w').write(str(x))")
            session.run("time.sleep(0.05)\nx += 100")
            seen = session.run("(x, open('/tmp/own').read(), sorted(os.listdir('/tmp')))")
            return "" if seen.value == f"({number + 100}, '{number}', ['own'])" else shown(seen)

    with ThreadPoolExecutor(6) as pool:
        wrong = [text for text in pool.map(play, range(12)) if text]
    must(not wrong, f"{wrong[:2]}")


def one_session_many_threads(sandbox: Sandbox) -> None:
    """Calls of one session from several threads wait for each other."""
    count = "m = n\nimport time\ntime.sleep(0.01)\nn = m + 1"
    with sandbox.session() as session, ThreadPoolExecutor(4) as pool:
        _ok(session.run("n = 0"))
        for call in [pool.submit(session.run, count) for _ in range(12)]:
            _ok(call.result())
        must((result := session.run("n")).value == "12", shown(result))


def close_ends_a_running_cell(sandbox: Sandbox) -> None:
    """Closing a session from another thread ends the call that runs, as a fault and not as a result."""
    session = sandbox.session()
    _ok(session.run("x = 1"))
    timer = threading.Timer(0.3, session.close)
    timer.start()
    began = time.monotonic()
    _raises(SandboxClosed, lambda: session.run("import time; time.sleep(60)", timeout=20), "a call during close()")
    timer.join()
    must(time.monotonic() - began < 10, "the call went on after close()")


def closed_session_says_so(sandbox: Sandbox) -> None:
    """A closed session raises, which is no fault, and closing it twice is allowed."""
    session, before = sandbox.session(), sandbox.counters().faults
    session.close()
    session.close()
    _raises(SandboxClosed, lambda: session.run("1"), "a cell of a closed session")
    must(sandbox.counters().faults == before, "the owner's close() was counted as a fault")


def nonsense_is_refused(sandbox: Sandbox) -> None:
    """Code beyond the limit, and timeouts that are not positive and finite, are mistakes of the caller."""
    _raises(ValueError, lambda: sandbox.run("#" * (sandbox.limits.code_bytes + 1)), "code beyond the limit")
    with sandbox.session() as session:
        for wrong in (0.0, -1.0, float("nan"), float("inf")):
            for run in (sandbox.run, session.run):
                _raises(ValueError, lambda run=run, wrong=wrong: run("1", timeout=wrong), f"a timeout of {wrong}")
        must((result := session.run("1 + 1", timeout=1e9)).value == "2", shown(result))


def replay_repeats_the_session(sandbox: Sandbox) -> None:
    """A replay in a fresh session, and a replay of that, have the same variables and random numbers."""
    with sandbox.session(seed=11) as session:
        session.run("import random, numpy as np\na = random.random(), np.random.rand()")
        session.run("a = 0\nimport os; os._exit(1)")
        ended = session.run("random.random(); np.random.rand()\nwhile True: pass", timeout=0.2)
        must((ended.status, ended.state) == ("timeout", "rolled_back"), shown(ended))
        session.run("b = random.random(), np.random.rand()\n1 / 0")
        with session.replay() as again, again.replay() as thrice:
            look = "(a, b, random.random(), np.random.rand(), hash('x'))"
            values = [_ok(played.run(look)).value for played in (session, again, thrice)]
    must(values[0] == values[1] == values[2], f"{values}")


def replay_does_not_bring_back_what_was_lost(sandbox: Sandbox) -> None:
    """Variables that an end without a rollback lost are lost in a replay too; files are there."""
    with sandbox.session() as session:
        session.run("x = 1\nopen('kept', 'w').close()", transaction=False)
        must((result := session.run("import os; os._exit(1)", transaction=False)).state == "lost", shown(result))
        session.run("y = 2")
        with session.replay() as again, again.replay() as thrice:
            result = thrice.run("import os\n('x' in globals(), y, os.path.exists('kept'))")
    must(result.value == "(False, 2, True)", shown(result))


def seeds_differ(sandbox: Sandbox) -> None:
    """The same seed gives the same numbers, another seed others."""
    code = "import random, numpy\n(random.random(), float(numpy.random.rand()))"
    value, other, again = (sandbox.run(code, seed=seed).value for seed in (1, 2, 1))
    must(value == again and value != other, f"seed 1: {value} and {again}; seed 2: {other}")


def failures_are_no_faults(sandbox: Sandbox) -> None:
    """A program that fails is no fault of the machinery, and is not counted as one."""
    before = sandbox.counters().faults
    for code in ("while True: pass", "import os; os._exit(9)", "import os; os.kill(os.getpid(), 9)", "1 / 0"):
        sandbox.run(code, timeout=0.2)
    health = sandbox.health()
    must(sandbox.counters().faults == before, f"{sandbox.counters().faults - before} faults were counted")
    must(health.ok and health.backend == sandbox.backend, f"{health}")


def fork_copies_and_separates(sandbox: Sandbox) -> None:
    """A fork has the variables and files of its origin; from then on neither sees what the other does."""
    look = "import os\n(x, {name: open('/tmp/' + name).read() for name in os.listdir('/tmp')}, os.listdir('/dev/shm'))"
    with sandbox.session() as origin:
        _ok(origin.run("x = [1]\nopen('/tmp/f', 'w').write('a')\nopen('/dev/shm/s', 'w').write('shm')"))
        with origin.fork() as copy:
            _ok(copy.run("x.append(2)\nopen('/tmp/f', 'a').write('b')"))
            _ok(origin.run("x.append(3)\nimport os\nos.remove('/tmp/f')\nos.remove('/dev/shm/s')"))
            must((result := origin.run(look)).value == "([1, 3], {}, [])", f"origin: {shown(result)}")
            must((result := copy.run(look)).value == "([1, 2], {'f': 'ab'}, ['s'])", f"copy: {shown(result)}")
            must((content := copy.read_file("f")) == b"ab", f"copy: {content!r}")
        must((result := origin.run("x")).value == "[1, 3]", f"origin after the copy's end: {shown(result)}")


_CASES: Final[tuple[tuple[str, Callable[[Sandbox], None], str], ...]] = (
    ("net", host_port_is_out_of_reach, "The trainer's own services listen there."),
    ("net", host_abstract_socket_is_out_of_reach, "Abstract sockets have no file modes; only a namespace hides them."),
    ("net", abstract_socket_of_another_session, "Two programs that meet can pass answers on."),
    ("leak", host_environment_is_unknown, "Environments hold keys and tokens."),
    ("leak", host_name_is_unknown, "A program that knows where it runs can behave otherwise there."),
    ("fs", read_file_follows_no_link, "A trusted reader that follows links hands out the host's files."),
    ("works", read_file_returns_what_was_written, "Files are results too."),
    ("process", daemon_dies_with_a_one_shot, "Survivors use cores and memory for as long as the training lasts."),
    ("process", daemon_dies_with_its_session, "Survivors use cores and memory for as long as the training lasts."),
    ("process", daemon_dies_with_a_failed_cell, "A rollback that leaves processes is none."),
    ("trap", timeouts_leave_no_zombie, "Elsewhere a zombie for each timeout filled the process table in hours."),
    ("trap", waiting_is_not_running, "Under load, waiting time that counts makes correct programs time out."),
    ("concurrency", sessions_do_not_mix, "Rollouts run side by side."),
    ("concurrency", one_session_many_threads, "Two cells at once would mix their results."),
    ("concurrency", close_ends_a_running_cell, "Cancelling a rollout must not wait for its program."),
    ("concurrency", closed_session_says_so, "A result from a session that is gone would be invented."),
    ("input", nonsense_is_refused, "A caller's mistake must not be scored as the program's."),
    ("determinism", replay_repeats_the_session, "A finding that can't be replayed can't be examined."),
    ("determinism", replay_does_not_bring_back_what_was_lost, "Else the replay knows more than its original."),
    ("determinism", seeds_differ, "The same numbers in every episode are no samples."),
    ("trap", failures_are_no_faults, "Elsewhere 61.7% of runs ended as UnknownError, and nobody noticed."),
    ("state", fork_copies_and_separates, "Branches of a rollout must not see each other."),
)


def load() -> tuple[Case, ...]:
    """Return every case of this file."""
    return tuple(
        Case(name=play.__name__, group=group, expected=(play.__doc__ or "").strip(), why=why, play=play)
        for group, play, why in _CASES
    )
