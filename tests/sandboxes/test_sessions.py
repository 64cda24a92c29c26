import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from agentrl.sandboxes import Sandbox, SandboxClosed, Session, open_sandbox
from agentrl.sandboxes.host import sessions
from agentrl.sandboxes.inside import wire


def test_threads_survive_between_cells_but_can_not_be_rolled_back(session: Session) -> None:
    session.run("import threading, time\nstop = threading.Event()\nt = threading.Thread(target=stop.wait)\nt.start()")
    assert session.run("t.is_alive()").value == "True"
    assert session.run("import os; os._exit(1)").state == "lost"
    assert session.run("1 + 1").value == "2"


def test_background_processes_sleep_between_cells_and_go_on_with_the_next(session: Session) -> None:
    session.run("import subprocess\np = subprocess.Popen(['/bin/sh', '-c', 'while :; do :; done'])")
    before = session.run("import time\ntime.sleep(0.1)\np.poll() is None")
    assert before.value == "True"
    assert session.run("p.kill(); p.wait()").value == "-9"


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


def test_wait_sees_no_processes_of_ours(session: Session) -> None:
    session.run("x = 1")
    assert session.run("import os\nos.wait()").exc_type == "ChildProcessError"


def test_forked_child_that_comes_out_of_the_cell_ends(session: Session) -> None:
    assert session.run("import os\npid = os.fork()\nx = pid").status == "ok"
    assert session.run("os.waitpid(pid, 0)[1]").value == "0"


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


def test_the_snapshot_does_not_count_as_the_programs_memory(session: Session) -> None:
    session.run("x = bytearray(300 << 20)")
    assert session.run("for i in range(0, len(x), 4096): x[i] = 1\nimport time; time.sleep(0.1)").status == "ok"


def test_an_exception_that_can_not_be_shown_is_still_an_error(session: Session) -> None:
    result = session.run("import traceback\ntraceback.format_exception = 3\n1 / 0")
    assert (result.status, result.exc_type) == ("error", "ZeroDivisionError")
    assert result.traceback == "(an exception that can't be shown: TypeError)"


def test_a_cell_sees_the_last_cells_children_again_after_transaction_false(session: Session) -> None:
    session.run("import subprocess\np = subprocess.Popen(['sleep', '600'])", transaction=False)
    result = session.run("p.poll() is None", transaction=True)
    assert (result.value, result.state) == ("True", "kept")
    assert session.run("import os; os._exit(1)").state == "rolled_back"


def test_a_program_that_dies_between_cells_loses_its_state_only(session: Session) -> None:
    session.run("x = 1", transaction=False)
    session.run("import signal, os\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(1))\nsignal.setitimer(0, 0.05)")
    threading.Event().wait(0.2)
    assert session.run("1 + 1").value == "2"


@pytest.mark.parametrize("code", ["bytearray(1 << 30)", "kept = []\nwhile True: kept.append(b'x' * (16 << 20))"])
def test_memory_is_taken_back_whichever_limit_came_first(session: Session, code: str) -> None:
    """The first asks for too much at once, so Python itself raises; the second is met by the watchdog, or by Python."""
    session.run("x = 1")
    result = session.run(f"x = 2\n{code}")
    assert (result.status, result.state) == ("memory", "rolled_back")
    assert session.run("x").value == "1"
    assert session.run("bytearray(1 << 30)", transaction=False).state == "lost"
    assert session.run("x").exc_type == "NameError"
