"""Grading processes: none is left behind, and a missing package is named."""

import os
import sys
import textwrap

import psutil
import pytest

from ...conftest import python


def run(script: str, status: int = 0) -> str:
    """What a program of its own prints; it must end in silence, and with this status."""
    done = python("-W", "error", "-c", textwrap.dedent(script), status=status, PYTHONPATH=os.pathsep.join(sys.path))
    assert not done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("pass", 0), ("os.kill(os.getpid(), 9)", -9)])
def test_a_program_that_ends_leaves_no_process(end: str, status: int) -> None:
    script = f"""
        import os, psutil
        from agentrl.grading.latex import same_answer
        assert same_answer("2x", "x+x")
        print(*[process.pid for process in psutil.Process().children(recursive=True)], flush=True)
        {end}
    """
    printed = run(script, status)
    pids = [int(pid) for pid in printed.split()]
    assert len(pids) == 2
    assert not psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])[1]


@pytest.mark.slow
def test_a_forked_child_has_graders_of_its_own() -> None:
    printed = run("""
        import os, psutil
        from agentrl.grading.latex import close_graders, same_answer
        assert same_answer("2x", "x+x")
        child = os.fork()
        if not child:
            assert same_answer("3x", "x+x+x") and not same_answer("3x", "x+x")
            print(len(psutil.Process().children(recursive=True)), flush=True)
            close_graders()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert same_answer("4x", "x+3x")
    """)
    assert printed == "2\n"


def test_missing_package_is_named() -> None:
    printed = run("""
        import sys
        sys.modules["math_verify"] = None
        import agentrl
        from agentrl.errors import UsageError
        for name in ("agentrl/Math-v0", "agentrl/MathPython-v0"):
            try:
                agentrl.make(name)
            except UsageError as error:
                print(error)
    """)
    assert printed == "grading mathematics needs math-verify: pip install 'agentrl[math]'\n" * 2
