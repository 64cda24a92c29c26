"""The program begins before the package is imported, so that a Ctrl-C in the imports ends it in one line too."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..conftest import ROOT

# As the installed program does it; the line says that Python itself is up, and its Ctrl-C is ours.
PROGRAM = "import sys; from agentrl_start import main; print('up', flush=True); sys.exit(main())"


def start(tmp_path: Path, code: str = PROGRAM) -> subprocess.Popen[str]:
    command, env = [sys.executable, "-c", code, "list"], os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **pipes)


@pytest.mark.parametrize("pause_s", [0.01, 0.05, 0.1, 0.2, 0.3])
def test_ctrl_c_while_python_imports(tmp_path: Path, pause_s: float) -> None:
    process = start(tmp_path)
    assert process.stdout and process.stdout.readline() == "up\n"
    time.sleep(pause_s)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    if "agentrl/Arithmetic-v0" not in out:  # on a fast machine it has said all before it is interrupted
        assert (process.returncode, err) == (130, "agentrl: interrupted\n")
    assert err in ("", "agentrl: interrupted\n")


def test_an_import_that_swallows_exceptions_is_ended_too(tmp_path: Path) -> None:
    swallow = """
import os, signal, sys, types
import agentrl_start
class Finder:
    def find_spec(self, name, *rest):
        if name == "gymnasium":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(10**9): pass
            except BaseException:
                pass
sys.meta_path.insert(0, Finder())
sys.exit(agentrl_start.main())
"""
    process = start(tmp_path, swallow)
    assert process.communicate() == ("", "agentrl: interrupted\n")
    assert process.returncode == 130


@pytest.mark.slow
def test_ctrl_c_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    ignoring = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {PROGRAM}"
    process = start(tmp_path, ignoring)
    assert process.stdout and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "") and "agentrl/Arithmetic-v0" in out
