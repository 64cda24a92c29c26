"""Sessions that are made in advance: they must be fast, and nothing else may tell them from others."""

import errno
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

import pytest

from agentrl.sandboxes import Limits, SandboxError
from agentrl.sandboxes.base import SandboxClosed
from agentrl.sandboxes.docker.pool import ContainerPool
from agentrl.sandboxes.host import zygote
from agentrl.sandboxes.host.local import LocalSandbox

from .conftest import await_ready, below, pid_ones


@pytest.mark.parametrize("ready", [0, 1, 3, None])
def test_the_pool_has_the_size_that_was_asked_for(ready: int | None) -> None:
    size = 2 * len(os.sched_getaffinity(0)) if ready is None else ready
    with LocalSandbox(Limits(), ready=ready) as own:
        await_ready(own, size)
        assert own.run("6 * 7").value == "42"
        await_ready(own, size)
    with pytest.raises(ValueError, match="negative"):
        LocalSandbox(Limits(), ready=-1)


def test_too_many_descriptors_under_way_end_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    send, hard = socket.send_fds, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    crowded = [True] * 3

    def send_fds(*arguments: Any) -> int:
        if crowded and crowded.pop():
            raise OSError(errno.ETOOMANYREFS, "too many")
        return send(*arguments)

    monkeypatch.setattr(socket, "send_fds", send_fds)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    with LocalSandbox(Limits(), ready=0) as own, own.session() as session:
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert session.run("x = 1").attempts == 1 and not crowded
        crowded += [True] * 1000
        monkeypatch.setattr(zygote, "_PATIENCE_S", 0.0)
        with pytest.raises(SandboxError, match="no session can be asked for"):
            own.run("1")
        assert (session.run("x").value, session.run("x").attempts) == ("1", 1)


def test_closing_while_others_take_raises_and_leaves_nothing() -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    own = LocalSandbox(Limits(), ready=2)

    def hammer(_: int) -> int:
        done = 0
        while True:
            try:
                done += own.run("1").status == "ok"
            except SandboxError:
                return done

    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(hammer, n) for n in range(6)]
        time.sleep(0.5)
        own.close()
        assert sum(call.result() for call in running) > 0
    assert own.health().ready == 0
    # Threads and files of earlier tests may have ended meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= descriptors and threading.active_count() <= threads


def test_dead_ready_sessions_are_not_handed_out() -> None:
    shared = pid_ones("session")
    with LocalSandbox(Limits(), ready=2) as own:
        await_ready(own, 2)
        own.run("1")
        time.sleep(0.3)
        killed = pid_ones("session") - shared
        for pid in killed:
            with suppress(ProcessLookupError):  # the session of the run above, which has just ended
                os.kill(pid, 9)
        assert killed
        while killed & below(os.getpid()):
            time.sleep(0.02)
        assert [own.run("1").status for _ in range(4)] == ["ok"] * 4
        assert own.counters().faults == 0


def test_closing_wakes_a_call_that_waits_for_a_core() -> None:
    with LocalSandbox(Limits(), ready=2) as own:
        for _ in range(64):
            if not own.slots.acquire(blocking=False):
                break
        session = own.session()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(session.run, "1")
            time.sleep(0.2)
            session.close()
            with pytest.raises(SandboxClosed, match="closed during the call"):
                waiting.result()


class Slow:
    """What takes a moment to make, as a container does."""

    alive, made = True, 0.0

    def dispose(self) -> None:
        self.alive = False


class Broken(Slow):
    def dispose(self) -> None:
        raise ValueError("I/O operation on closed file")


def test_a_removal_that_breaks_does_not_hold_up_the_end() -> None:
    kinds = iter([Broken])
    pool = ContainerPool(lambda _: cast(Any, next(kinds, Slow)()), 1, threading.Semaphore(1))
    with pytest.raises(ValueError, match="closed file"):
        pool.give_back(pool.take(), False)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive() and pool.total == 0


def test_containers_take_time_to_make_and_come_back() -> None:
    made: list[Slow] = []
    fails = False

    def make(_: object) -> Any:
        time.sleep(0.02)
        if fails:
            raise SandboxError("no engine")
        made.append(Slow())
        return made[-1]

    pool = ContainerPool(make, 2, threading.Semaphore(2))
    with ThreadPoolExecutor(5) as threads:
        members: list[Any] = list(threads.map(lambda _: pool.take(), range(5)))
    assert len(set(members)) == len(made) == 5, "one for each caller that waits"
    for member, usable in zip(members, (True, False, True, True, True), strict=True):
        pool.give_back(member, usable)
    assert [member.alive for member in members] == [True, False, True, False, False], "two are kept"
    members[0].alive = False
    assert pool.take() is members[2]
    fails = True
    with pytest.raises(SandboxError, match="no engine"):
        while True:
            pool.take()
    assert pool.fault == "no engine"
    pool.close()
    assert not members[2].alive and pool.total == 0
