"""A test that hangs is ended at its deadline, with its stacks on standard error, and the others run."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

HANGING = """
import os, select, subprocess, sys, threading, time
from pathlib import Path
import pytest

pytestmark = pytest.mark.timeout(1)
SLEEPER = [sys.executable, "-c", "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"]


def test_select():
    select.select([], [], [])

def test_lock():
    lock = threading.Lock()
    with lock:
        lock.acquire()

def test_child():
    subprocess.Popen(SLEEPER).wait()

@pytest.fixture
def late():
    yield
    threading.Event().wait()

def test_fixture(late):
    pass

def test_stubborn():
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

def test_held_interpreter():
    9 ** 9 ** 9

def test_quick():
    pass
"""
CONFTEST = """
import importlib.util
spec = importlib.util.spec_from_file_location("deadlines", {path!r})
deadlines = importlib.util.module_from_spec(spec)
spec.loader.exec_module(deadlines)

def pytest_configure(config):
    config.pluginmanager.register(deadlines)
"""


@pytest.mark.slow
def test_every_wait_ends_at_its_deadline(require: Callable[[bool, str], None], tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    (tmp_path / "conftest.py").write_text(CONFTEST.format(path=str(Path(__file__).with_name("deadlines.py"))))
    words = ("-m", "pytest", "-n", "1", "--max-worker-restart", "9", "-p", "no:cacheprovider")
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "= 5 failed, 2 passed, 1 error in " in done.stdout, done.stdout + done.stderr
    assert "time.sleep(600)" in done.stderr, "the child's command is shown"
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    stopper = Path("/proc/sys/kernel/yama/ptrace_scope")
    require(
        os.getuid() == 0 or not stopper.exists() or stopper.read_text() == "0\n", "no process may look into another one"
    )
    names = {"select", "lock", "child", "late", "stubborn", "held_interpreter"}
    assert names <= set(re.findall(r" (?:test_)?(\w+) \(\S*test_hanging\.py:\d+\)", done.stderr)), done.stderr
