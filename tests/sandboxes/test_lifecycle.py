import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from agentrl.sandboxes import Sandbox, SandboxError, open_sandbox

from .conftest import HOST, alive, below, pid_ones


@pytest.fixture
def own(sandbox: Sandbox) -> Iterator[Sandbox]:
    """A sandbox that a test may break, with no ready sessions; asks for the shared one only to be skipped with it."""
    with open_sandbox("local", ready=0) as opened:
        yield opened


def test_close_leaves_no_process_and_no_descriptor_behind(sandbox: Sandbox) -> None:
    before, descriptors = psutil.Process().children(), len(os.listdir("/proc/self/fd"))
    with open_sandbox("local") as opened:
        session = opened.session()
        session.run("import os, time\nfor _ in range(3):\n    if os.fork() == 0: time.sleep(600)")
        opened.run("1")
        # Another sandbox of this process may make a session just now: that is not below one of these.
        made = {child.pid for child in set(psutil.Process().children()) - set(before)}
        made |= {pid for child in made for pid in below(child)}
        assert len(made) >= 6
    assert not alive(made)
    session.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_session_close_ends_its_processes_soon(own: Sandbox) -> None:
    own.run("1")
    before = below(os.getpid())
    session = own.session()
    session.run("import os, time\nif os.fork() == 0: time.sleep(600)")
    made = alive(below(os.getpid()) - before)
    for pid in made:
        os.kill(pid, signal.SIGSTOP)
    session.close()  # and does not wait for them
    assert alive(made) == made
    for pid in made:
        with suppress(ProcessLookupError):  # it was ended by the one before
            os.kill(pid, signal.SIGCONT)
    while alive(made):
        time.sleep(0.01)


def test_a_session_that_nobody_holds_is_closed(own: Sandbox) -> None:
    session = own.session()
    session.run("x = 1")
    assert own.health().sessions == 1
    del session
    gc.collect()
    assert own.health().sessions == 0


def test_closing_the_sandbox_wakes_every_call(sandbox: Sandbox) -> None:
    opened = open_sandbox("local", ready=0)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(opened.run, "import time\ntime.sleep(3600)", timeout=3600) for _ in range(3)]
        time.sleep(0.5)
        opened.close()
        for call in calls:
            with pytest.raises(SandboxError):
                call.result()


@pytest.mark.slow
def test_everything_dies_with_the_host(own: Sandbox) -> None:
    root = Path(__file__).parents[2]
    host = subprocess.Popen([sys.executable, "-c", HOST, "local"], stdout=subprocess.PIPE, text=True, cwd=root)
    with host:
        assert host.stdout is not None and host.stdout.readline() == "up\n"
        made = below(host.pid)
        assert len(made) >= 4
        host.kill()
    while any(map(psutil.pid_exists, made)):
        time.sleep(0.02)


def test_ctrl_c_does_not_reach_the_sandbox(own: Sandbox) -> None:
    groups = {os.getpgid(pid) for pid in below(os.getpid())}
    assert os.getpgid(0) not in groups or len(groups) > 1
    for pid in below(os.getpid()):
        if b"launcher" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGINT)
    assert own.run("1 + 1").value == "2"


def test_a_dead_zygote_is_seen_counted_and_replaced(sandbox: Sandbox) -> None:
    shared = pid_ones("zygote")

    def kill() -> None:
        (mine,) = pid_ones("zygote") - shared
        os.kill(mine, signal.SIGKILL)
        # Pid 1 of a namespace ends after everything in it.
        while alive({mine}):
            time.sleep(0.01)
        assert not own.health().ok and "plain zygote dead" in own.health().detail

    with open_sandbox("local") as own:
        with own.session() as session:
            session.run("x = 1")
            assert own.health().ok and "plain zygote running" in own.health().detail
            kill()
            again = session.run("x")  # in a fresh worker, where the cells before it ran again
            assert (again.value, again.attempts, own.health().ok) == ("1", 2, True)
            kill()
            with pytest.raises(SandboxError):
                session.fork()
        assert (own.counters().faults, own.counters().reruns) == (1, 1)
        assert own.run("1 + 1").value == "2"
        assert own.health().ok and len(pid_ones("zygote") - shared) == 1
    assert pid_ones("zygote") == shared


def test_a_back_end_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no back end is called 'magic'"):
        open_sandbox("magic")
    with pytest.raises(ValueError, match="belongs to the docker back end"):
        open_sandbox("mine:small", runtime="runsc")


def test_readme_example_runs(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    readme = Path(__file__).parents[2] / "sandboxes" / "README.md"
    example = readme.read_text().partition("```python\n")[2].partition("```")[0]
    exec(example, {})
    assert capsys.readouterr().out == "ok hello\n 42\n[1]\n[1, 3] [1]\n"
