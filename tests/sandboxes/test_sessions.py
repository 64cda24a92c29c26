import math
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from agentrl.sandboxes import Sandbox, SandboxClosed, SandboxError, Session, open_sandbox

from .conftest import count_side_by_side


def test_variables_functions_and_files_are_kept(session: Session) -> None:
    assert session.run("import math\nx = 2\ndef f(y): return x * y\nopen('/tmp/f', 'w').write('hi')").value == "2"
    assert session.run("f(math.floor(3.5))").value == "6"
    assert session.run("open('/tmp/f').read()").value == "'hi'"


def test_sessions_share_nothing(sandbox: Sandbox) -> None:
    with sandbox.session() as one, sandbox.session() as two:
        one.run("x = 1\nimport math\nmath.pi = 3\nopen('/tmp/f', 'w').close()")
        assert two.run("x").exc_type == "NameError"
        assert two.run("import os, math\n(os.listdir('/tmp'), math.pi > 3.1)").value == "([], True)"


def test_exception_keeps_what_was_done_before_it(session: Session) -> None:
    session.run("x = 1")
    result = session.run("x = 2\n1 / 0")
    assert (result.status, result.state) == ("error", "kept")
    assert session.run("x").value == "2"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("x = 2\nwhile True: pass", "timeout"),
        ("x = 2\nimport os\nos._exit(0)", "exit"),
        ("x = 2\nimport os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "killed"),
        ("x = 2\nwhile True: print('y' * 10000)", "output_limit"),
        ("x = 2\nimport os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
        ("x = 2\nimport os\nos.killpg(0, 9)", "killed"),
    ],
)
def test_transaction_rolls_back_what_did_not_end_by_itself(session: Session, code: str, status: str) -> None:
    assert session.run("x = 1\nl = [1]").state == "kept"
    assert session.run("l.append(2)").state == "kept"
    for _ in range(2):
        result = session.run(code, timeout=0.5)
        assert (result.status, result.state) == (status, "rolled_back")
        assert session.run("(x, l)").value == "(1, [1, 2])"


def test_first_cell_rolls_back_to_a_fresh_and_seeded_interpreter(sandbox: Sandbox) -> None:
    with sandbox.session(seed=5) as session, sandbox.session(seed=5) as other:
        assert session.run("x = 1\nwhile True: pass", timeout=0.2).state == "rolled_back"
        assert session.run("x").exc_type == "NameError"
        draw = "import random\nrandom.random()"
        assert session.run(draw).value == other.run(draw).value


def test_rollback_restores_the_random_state(session: Session) -> None:
    session.run("import random")
    session.run("random.random()\nwhile True: pass", timeout=0.2)
    assert session.run("random.random()").value == "0.8444218515250481"


def test_without_a_transaction_state_is_lost(session: Session) -> None:
    session.run("x = 1", transaction=False)
    assert session.run("x").value == "1"
    assert session.run("import os; os._exit(1)", transaction=False).state == "lost"
    assert session.run("x").exc_type == "NameError"


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


def test_wait_sees_no_processes_of_ours(session: Session) -> None:
    session.run("x = 1")
    assert session.run("import os\nos.wait()").exc_type == "ChildProcessError"


def test_forked_child_that_comes_out_of_the_cell_ends(session: Session) -> None:
    assert session.run("import os\npid = os.fork()\nx = pid").status == "ok"
    assert session.run("os.waitpid(pid, 0)[1]").value == "0"


def test_replaced_output_streams_are_put_back(session: Session) -> None:
    session.run("import sys, os\nsys.stdout.close()\nos.dup2(os.open('/dev/null', os.O_WRONLY), 2)")
    result = session.run("print('out')\nprint('err', file=sys.stderr)")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")


def test_output_of_one_cell_is_not_in_the_next(session: Session) -> None:
    assert session.run("print('a')").stdout == "a\n"
    assert session.run("print('b')").stdout == "b\n"


def test_read_file(session: Session) -> None:
    session.run("open('/tmp/big', 'wb').write(bytes(range(256)) * 4096)")
    assert session.read_file("/tmp/big") == bytes(range(256)) * 4096
    assert session.read_file("big", 5) == b"\x00\x01\x02\x03\x04"
    with pytest.raises(FileNotFoundError):
        session.read_file("/tmp/none")
    with pytest.raises(FileNotFoundError):
        session.read_file("/etc/passwd")


def test_replay_runs_the_kept_cells_again(sandbox: Sandbox) -> None:
    with sandbox.session(seed=9) as session:
        session.run("import random\nx = random.random()")
        session.run("x = 0\nwhile True: pass", timeout=0.2)
        session.run("y = random.random()\n1 / 0")
        expected = session.run("(x, y)").value
        with session.replay() as again:
            session.run("x = 'changed'")
            assert again.run("(x, y)").value == expected


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
        monkeypatch.setattr("agentrl.sandboxes.worker.Worker._hear", Mock(side_effect=KeyboardInterrupt))
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


def test_sabotage_of_the_result_channel_costs_the_state_only(session: Session) -> None:
    session.run("x = 1")
    code = "import os\nfor fd in range(3, 1024):\n    try: os.write(fd, b'\\xff' * 64)\n    except OSError: pass"
    result = session.run(code, timeout=0.3)
    assert (result.status, result.state) == ("timeout", "rolled_back")
    assert session.run("x").value == "1"


def test_a_closed_session_says_so(sandbox: Sandbox) -> None:
    session = sandbox.session()
    session.close()
    session.close()
    with pytest.raises(SandboxError, match="closed"):
        session.run("1")


def test_closing_wakes_a_call_in_another_thread(sandbox: Sandbox) -> None:
    session = sandbox.session()
    session.run("1")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(session.run, "import time\ntime.sleep(3600)", 3600)
        threading.Event().wait(0.2)
        session.close()
        with pytest.raises(SandboxError, match="closed during the call"):
            running.result()


def test_many_threads_at_once(sandbox: Sandbox) -> None:
    count_side_by_side(sandbox, threads=16, sessions=32)


def test_one_session_from_many_threads_takes_turns(session: Session) -> None:
    session.run("n = 0")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: session.run("n += 1"), range(24)))
    assert session.run("n").value == "24"


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
