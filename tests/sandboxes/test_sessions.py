import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from agentrl.sandboxes import Sandbox, SandboxClosed, open_sandbox
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


def test_ok_has_output_and_value(sandbox: Sandbox) -> None:
    result = sandbox.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    assert (result.status, result.stdout, result.stderr, result.value) == ("ok", "out\n", "err\n", "42")
    assert (result.exc_type, result.traceback, result.exit_code, result.signal) == (None, None, None, None)
    assert (result.truncated, result.attempts, result.backend) == (False, 1, "local")
    assert 0 < result.cpu_s < 2 and result.wall_s > 0 and result.queue_s > 0 and result.max_rss > 1 << 20


def test_a_program_that_is_killed_is_tried_once_more(sandbox: Sandbox) -> None:
    killed = sandbox.run("import os\nos.kill(os.getpid(), 9)")
    assert (killed.status, killed.signal, killed.attempts) == ("killed", 9, 2)
