import math
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from agentrl.sandboxes import Sandbox, SandboxClosed, Session, open_sandbox
from agentrl.sandboxes.host import sessions
from agentrl.sandboxes.inside import wire


@pytest.mark.slow
def test_a_late_word_of_the_host_leaves_nothing_running() -> None:
    """A kill that comes right after the answer; where it comes later still, the session is stopped already."""
    watch = """
import threading, time
gap = 0.0
def watch():
    global gap
    last = time.monotonic()
    while True:
        now = time.monotonic()
        gap, last = max(gap, now - last), now
        time.sleep(0.001)
threading.Thread(target=watch, daemon=True).start()
"""
    with open_sandbox("local") as own, own.session() as session:
        assert isinstance(session, sessions.WorkerSession)
        session.run(watch, transaction=False)
        for _ in range(10):
            session.run("gap = 0.0", transaction=False)
            worker = session._worker
            assert worker is not None
            worker._channel.sendall(wire.pack({"t": "kill", "reason": "late"}))
            time.sleep(0.2)
            assert float(session.run("time.sleep(0.05)\ngap", transaction=False).value or 0) > 0.15


def test_replay_does_not_bring_back_what_was_lost(sandbox: Sandbox) -> None:
    with sandbox.session() as session:
        session.run("x = 1\nopen('kept', 'w').close()", transaction=False)
        assert session.run("import os; os._exit(1)", transaction=False).state == "lost"
        session.run("y = 2")
        with session.replay() as again, again.replay() as once_more:
            assert once_more.run("import os\n('x' in globals(), y, os.path.exists('kept'))").value == "(False, 2, True)"


@pytest.mark.parametrize("timeout", [0.0, -1.0, math.inf, math.nan])
def test_a_timeout_is_a_time(session: Session, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be positive and finite"):
        session.run("1", timeout=timeout)
    assert session.run("1 + 1", timeout=1e9).value == "2"


def test_an_answer_that_nobody_waited_for_is_not_the_next_cells(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sandbox.session() as session:
        session.run("1")
        monkeypatch.setattr("agentrl.sandboxes.host.worker.Worker._receive", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            session.run("'late'")
        monkeypatch.undo()
        with pytest.raises(SandboxClosed):
            session.run("'next'")


def test_a_session_that_many_close_is_counted_once() -> None:
    with open_sandbox("local", ready=0) as own, ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            session = own.session()
            list(pool.map(lambda _, session=session: session.close(), range(32)))
        assert own.health().sessions == 0
