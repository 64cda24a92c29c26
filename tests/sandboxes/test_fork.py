"""A session and its forks: the same past, different futures."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from agentrl.sandboxes import Limits, Sandbox, Session
from agentrl.sandboxes.base import ForkRefused, SandboxClosed
from agentrl.sandboxes.host.local import LocalSandbox

from .conftest import alive


@pytest.fixture
def pair(session: Session) -> Iterator[tuple[Session, Session]]:
    session.run("x = [1]\nopen('/tmp/f', 'w').write('one')\nopen('/dev/shm/s', 'w').write('shm')")
    with session.fork() as fork:
        yield session, fork


def test_output_goes_to_whoever_printed_it(pair: tuple[Session, Session]) -> None:
    session, fork = pair
    printing = (
        "import sys\nprint('out', x)\nprint('err', file=sys.stderr)\nos = __import__('os')\nos.system('echo child')"
    )
    for printer in (fork, session, fork):
        result = printer.run(printing)
        assert (sorted(result.stdout.splitlines()), result.stderr) == (["child", "out [1]"], "err\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("x.append(2)\nwhile True: pass", "timeout"),
        ("x.append(2)\nimport os\nos._exit(3)", "exit"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "killed"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
        ("while True: print('y' * 10000)", "output_limit"),
    ],
)
def test_an_end_of_one_rolls_back_that_one_only(pair: tuple[Session, Session], code: str, status: str) -> None:
    for ended, other in (pair, pair[::-1]):
        # Output is stopped by the host, which needs time for that.
        result = ended.run(code, timeout=0.4 if status == "timeout" else 30)
        assert (result.status, result.state) == (status, "rolled_back")
        assert other.run("x").value == ended.run("x").value == "[1]"


def test_what_one_used_is_not_charged_to_the_other(pair: tuple[Session, Session]) -> None:
    # An orphan, whose time is counted with all that pid 1 has reaped.
    burn = "if os.fork() == 0:\n        while time.process_time() < 0.3: pass"
    code = f"import os, time\nr, w = os.pipe()\nif os.fork() == 0:\n    {burn}\n    os._exit(0)\nos.close(w)\n"
    code += "os.read(r, 1)\ntime.sleep(0.1)"
    assert pair[0].run(code).cpu_s > 0.2
    assert pair[1].run("x").cpu_s < 0.2


def test_fork_of_a_fork_and_the_ancestors_close_first(session: Session) -> None:
    session.run("x = 1")
    with session.fork() as child:
        child.run("x += 1\nopen('/tmp/f', 'w').write('child')")
        with child.fork() as grandchild:
            session.close()
            child.close()
            with pytest.raises(SandboxClosed, match="closed"):
                session.fork()
            assert grandchild.run("x += 1\n(x, open('/tmp/f').read())").value == "(3, 'child')"
            with grandchild.fork() as last:
                assert last.run("x").value == "3"
            assert grandchild.run("x").value == "3"


def children(pid: int) -> set[int]:
    return alive({child.pid for child in psutil.Process(pid).children()})


def test_a_family_ends_with_its_last_member(sandbox: Sandbox) -> None:
    before = children(os.getpid())
    with LocalSandbox(Limits(), ready=0) as own:
        (launcher,) = children(os.getpid()) - before
        (zygote,) = children(launcher)
        original = own.session()
        original.run("1")
        forks = [original.fork() for _ in range(3)]
        # One pid 1 for all of them.
        assert len(children(zygote)) == 1
        for member in (original, *forks):
            assert len(children(zygote)) == 1
            member.close()
        while children(zygote):
            time.sleep(0.01)


@pytest.mark.slow
def test_closed_forks_make_room(session: Session) -> None:
    session.run("x = 1")
    for number in range(70):
        with session.fork() as fork:
            assert fork.run(f"x += {number}\nx").value == str(1 + number)


def test_files_that_are_open_are_the_forks_own(session: Session) -> None:
    session.run(
        "f = open('/tmp/f', 'w+')\nf.write('abc')\nf.flush()\nimport os\nos.mkdir('/tmp/d')\nos.chdir('/tmp/d')"
    )
    with session.fork() as fork:
        for writer, letter in ((fork, "F"), (session, "S")):
            writer.run(f"f.write('{letter}')\nf.flush()")
            assert writer.run("(open('/tmp/f').read(), os.getcwd())").value == f"('abc{letter}', '/tmp/d')"


DRAW = "import random\nrandom.random()"


@pytest.mark.parametrize(("before", "draws"), [("", DRAW), (DRAW, f"{DRAW}\n{DRAW}"), ("while True: pass", DRAW)])
def test_random_state_is_copied_and_then_apart(sandbox: Sandbox, before: str, draws: str) -> None:
    with sandbox.session(seed=4) as session:
        if before:
            session.run(before, timeout=0.1 if "while" in before else None)
        with session.fork() as fork:
            assert fork.run(DRAW).value == session.run(DRAW).value == sandbox.run(draws, seed=4).value


def test_replay_of_a_fork_runs_the_common_past_too(session: Session) -> None:
    session.run("x = [1]")
    with session.fork() as fork:
        session.run("x.append('session')")
        fork.run("x.append('fork')")
        with fork.replay() as again:
            assert again.run("x").value == "[1, 'fork']"


def test_threads_can_not_be_copied_and_refused_forks_leave_nothing_open(session: Session) -> None:
    session.run("import threading\nstop = threading.Event()\nt = threading.Thread(target=stop.wait)\nt.start()\nx = 1")
    for _ in range(300):
        with pytest.raises(ForkRefused, match="threads"):
            session.fork()
    assert session.run("stop.set()\nt.join()\nx").value == "1"
    with session.fork() as fork:
        assert fork.run("x").value == "1"


def test_background_processes_stay_with_the_session(session: Session) -> None:
    session.run("import subprocess\np = subprocess.Popen(['sleep', '600'])")
    with session.fork() as fork:
        assert fork.run("import os\nsum(n.isdigit() for n in os.listdir('/proc')) >= 3").value == "True"
        assert fork.run("import os\nos._exit(0)").state == "rolled_back"
        assert session.run("p.poll() is None").value == "True"


def test_one_that_kills_the_other_is_seen(pair: tuple[Session, Session]) -> None:
    session, fork = pair
    code = "import os\nfor n in filter(str.isdigit, os.listdir('/proc')):\n"
    code += "    if int(n) not in (1, os.getpid()): os.kill(int(n), 9)"
    assert fork.run(code).status == "ok"
    result = session.run("x")
    # The signal may come round a moment later than the cell.
    assert (result.status, result.exc_type, result.state) in {("error", "NameError", "lost"), ("killed", None, "lost")}
    assert fork.run("x").value == "[1]"


def test_what_rests_can_not_be_woken_by_the_other(pair: tuple[Session, Session]) -> None:
    session, fork = pair
    session.run("import subprocess\np = subprocess.Popen(['/bin/sh', '-c', 'while :; do :; done'])")
    code = """
import os, signal
for n in map(int, filter(str.isdigit, os.listdir('/proc'))):
    try: os.kill(n, signal.SIGCONT)
    except PermissionError: pass
    else: print('woken', n)
"""
    assert (fork.run(code).status, fork.run(code).stdout) == ("ok", "")
    assert session.run("(x, p.poll())").value == "([1], None)"


@pytest.mark.slow
def test_fork_while_the_other_runs_waits_for_its_turn(pair: tuple[Session, Session]) -> None:
    session, fork = pair
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(fork.run, "import time\ntime.sleep(2)")
        time.sleep(0.5)
        result = session.run("x")
        assert slow.result().status == "ok"
    assert result.value == "[1]" and result.queue_s > 0.5


def test_files_that_a_program_made_to_hinder_the_copy(session: Session) -> None:
    code = """
import os, socket
os.symlink('/etc/shadow', 'link'); os.symlink('/proc/1', 'pid1'); os.symlink('.', 'loop')
os.mkfifo('pipe'); s = socket.socket(socket.AF_UNIX); s.bind('socket')
os.makedirs('closed/inner'); open('closed/inner/f', 'w').write('deep'); os.chmod('closed/inner/f', 0)
os.chmod('closed/inner', 0); os.chmod('closed', 0)
open('bad\\udcff\\nname', 'w').write('odd')
open('sparse', 'wb').truncate(30 << 20); open('end', 'wb').write(b'x' * 3_000_000)
os.link('end', 'also')
for _ in range(3000): os.mkdir('d'); os.chdir('d')
open('bottom', 'w').write('b')
os.chdir('/tmp')
made = os.stat('end').st_mtime_ns
"""
    assert session.run(code).status == "ok"
    with session.fork() as fork:
        look = """
import os
os.chmod('closed', 0o700); os.chmod('closed/inner', 0o700)
names = ['link', 'pid1', 'loop', 'pipe', 'closed', 'bad\\udcff\\nname', 'sparse', 'end', 'also', 'd']
print(sorted(os.listdir('/tmp')) == sorted(names))
print(os.readlink('link'), os.readlink('pid1'), oct(os.stat('pipe').st_mode), os.stat('closed/inner/f').st_mode & 0o777)
print(os.stat('sparse').st_size, os.stat('sparse').st_blocks, os.stat('end').st_nlink, os.path.samefile('end', 'also'))
print(open('end', 'rb').read() == b'x' * 3_000_000, os.stat('end').st_mtime_ns == made)
for _ in range(3000): os.chdir('d')
print(open('bottom').read())
"""
        result = fork.run(look)
        assert result.stdout == f"True\n/etc/shadow /proc/1 0o10644 0\n{30 << 20} 0 2 True\nTrue True\nb\n", result


def test_a_folder_that_is_full_can_be_copied(sandbox: Sandbox) -> None:
    with LocalSandbox(Limits(tmp_bytes=1 << 20, tmp_inodes=64), ready=0) as small, small.session() as session:
        session.run("n = 0\ntry:\n    while True: open(f'f{n}', 'wb').write(b'x' * 4096); n += 1\nexcept OSError: pass")
        with session.fork() as fork:
            code = "import os\nsum(os.path.getsize(name) for name in os.listdir('.')) >= n * 4096 > 0"
            assert fork.run(code).value == "True"


def test_the_others_files_can_not_be_reached_by_name(pair: tuple[Session, Session]) -> None:
    assert pair[1].run("import os\nos.listdir('/opt/agentrl')").exc_type == "PermissionError"
    assert pair[1].run("os.chmod('/opt/agentrl', 0o777)").exc_type in ("OSError", "PermissionError")
