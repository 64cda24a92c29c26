"""Time in which a session is ready to run and gets no core is not its own."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.sandboxes import Sandbox, open_sandbox
from agentrl.sandboxes.base import Limits
from agentrl.sandboxes.host import worker
from agentrl.sandboxes.host.worker import Worker, WorkerDied
from agentrl.sandboxes.inside import clock as clock_module
from agentrl.sandboxes.inside import processes, wire
from agentrl.sandboxes.inside.account import Account
from agentrl.sandboxes.inside.clock import STRETCH, SessionClock
from agentrl.sandboxes.inside.running_cell import RunningCell


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock and threads' waits that tests set."""
    made = SimpleNamespace(now=100.0, delays={})
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(processes, "run_delays", lambda keep: made.delays)
    return made


def own_time(clock: SessionClock) -> float:
    """What the clock shows, to a hundredth of a second."""
    return next(n for n in range(10**6) if not clock.has_passed(n / 100, ())) / 100


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        # An idle machine has the plain clock.
        ([(101.0, {2: 0.0}), (102.0, {2: 0.0, 3: 0.0}), (104.5, {})], [1.0, 2.0, 4.5]),
        # Waits come off. In the end the process has ended, and its successor waited as well.
        ([(101.0, {2: 0.25}), (102.0, {2: 0.75}), (103.0, {3: 0.5})], [0.75, 1.25, 1.75]),
        # Of threads that wait for each other the longest wait counts.
        ([(101.0, dict.fromkeys(range(2, 40), 0.5))], [0.5]),
        # No wait is saved for later.
        ([(101.0, {2: 50.0}), (104.0, {2: 50.0})], [1 / STRETCH, 3.0]),
    ],
)
def test_own_time(kernel: Any, steps: list[tuple[float, dict[int, float]]], shown: list[float]) -> None:
    clock = SessionClock()
    for (kernel.now, kernel.delays), expected in zip(steps, shown, strict=True):
        assert own_time(clock) == expected
    clock.start()
    kernel.now += 2.0
    assert own_time(clock) == 2.0


def test_what_is_asked_often_is_not_looked_up_each_time(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    monkeypatch.setattr(processes, "run_delays", lambda keep: looks.append(kernel.now) or {2: kernel.now - 100})
    clock = SessionClock()
    for _ in range(500):
        kernel.now += 0.001
        assert not clock.has_passed(1.0, ())
    assert len(looks) < 60


@pytest.mark.parametrize(("used", "copying", "ends"), [(0.3, True, False), (0.3, False, True), (0.9, True, True)])
def test_a_cell_is_not_charged_for_the_copy_before_it(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, used: float, copying: bool, ends: bool
) -> None:
    account, cell = Account(memory=1), RunningCell(order={"cpu": 0.2, "wall": 10.0})
    monkeypatch.setattr(processes, "usage", lambda excluded: processes.Usage(cpu_s=used + account._since, rss=0))
    assert account.overrun(cell, (), copying=copying) == ("timeout" if ends else None)


@pytest.mark.slow
def test_the_host_waits_as_long_as_it_hears_that_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_BACKSTOP_S", 1.0)
    made = Worker(Limits())
    channel = socket.socket(fileno=os.dup(made.remote[0]))
    made.close_remote(started=True)

    def answer(words: int) -> None:
        for _ in range(words):
            time.sleep(0.25)
            channel.sendall(wire.pack({"t": "waiting"}))
        if words:
            channel.sendall(wire.pack({"t": "waiting"}) + wire.pack({"t": "done"}))

    for words in (6, 0):
        speaker = threading.Thread(target=answer, args=(words,))
        speaker.start()
        if words:
            assert made.ask({"t": "run", "wall": 0.1})[0] == {"t": "done"}
        else:
            with pytest.raises(WorkerDied, match="no answer in time"):
                made.ask({"t": "run", "wall": 0.1})
        speaker.join()
    made.dispose()
    channel.close()


@pytest.mark.slow
def test_a_session_tells_that_it_watches(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_BACKSTOP_S", -2.0)
    assert sandbox.run("import time\ntime.sleep(3)", timeout=1.5).attempts == 1


NEIGHBOURS = 8
"""Processes that want the crowded sandbox's core until the file ends, each in a scheduling group of its own."""


@pytest.fixture(scope="module")
def crowded(sandbox: Sandbox) -> Generator[Sandbox]:
    """A sandbox on one core that others want as well; asks for the shared one only to be skipped with it."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    loop = [sys.executable, "-S", "-c", "while True: pass"]
    neighbours: list[subprocess.Popen[bytes]] = []
    try:
        with open_sandbox("local") as opened:
            opened.run("1")
            neighbours += [subprocess.Popen(loop, start_new_session=True) for _ in range(NEIGHBOURS)]
            yield opened
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
        os.sched_setaffinity(0, cores)


BUSY = "started = time.process_time()\nwhile time.process_time() < started + 0.2: pass"
CHILD = "until = time.process_time() + 0.04\n    while time.process_time() < until: pass\n    os._exit(0)"
CHILDREN = f"import os\nfor _ in range(5):\n  pid = os.fork()\n  if pid == 0:\n    {CHILD}\n  os.waitpid(pid, 0)"


@pytest.mark.slow
@pytest.mark.parametrize("code", [BUSY, CHILDREN], ids=["itself", "its children"])
def test_a_program_that_waits_for_a_core_is_no_timeout(crowded: Sandbox, code: str) -> None:
    result = crowded.run(f"import time\n{code}", timeout=0.4)
    assert result.status == "ok"
    assert result.wall_s > 1.2, "there was no crowd"


@pytest.mark.slow
def test_an_endless_loop_in_a_crowd_ends_by_the_time_that_it_used(crowded: Sandbox) -> None:
    result = crowded.run("while True: pass", timeout=0.1)
    assert result.status == "timeout"
    assert result.cpu_s > 0.09 or result.wall_s > 0.3 * STRETCH


def test_who_sleeps_in_a_crowd_pays_for_it(crowded: Sandbox) -> None:
    result = crowded.run("import time\ntime.sleep(600)", timeout=0.2)
    assert result.status == "timeout" and result.cpu_s < 0.2
    assert 0.6 <= result.wall_s < 0.6 * STRETCH


@pytest.mark.slow
def test_a_session_is_copied_in_a_crowd(crowded: Sandbox) -> None:
    with crowded.session() as session:
        session.run("x = 1")
        rolled_back = session.run("x = 2\nwhile True: pass", timeout=0.1)
        assert (rolled_back.status, rolled_back.state, session.run("x").value) == ("timeout", "rolled_back", "1")
        with session.fork() as forked:
            assert forked.run("x").value == "1"
