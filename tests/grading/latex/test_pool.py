"""Grading processes: what one costs, how one dies, and that none is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from agentrl.errors import InfrastructureError
from agentrl.grading.latex.pool import GraderPool, _Grader  # pyright: ignore[reportPrivateUsage]

ENDLESS = r"\binom{100000000}{50000000}+x"
"""An answer that takes all the CPU time there is; what is expected has a binomial coefficient too."""
EXPECTED = r"\binom{5}{2}+x"


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    made = GraderPool(2)
    yield made
    made.close()


def zygotes() -> list[psutil.Process]:
    """The living zygotes of this process, those that start as well."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # a zombie as well
            found += [child] if "agentrl.grading.latex.worker" in child.cmdline() else []
    return found


def graders() -> list[psutil.Process]:
    """The children of all zygotes of this process."""
    return [grader for zygote in zygotes() for grader in zygote.children()]


def wait_for(found: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    """Wait until there are such processes."""
    while not (processes := found()):
        time.sleep(0.01)
    return processes


def run(script: str, code: int = 0) -> str:
    """What a program of its own prints; it must end in silence, and with this code."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "")
    return done.stdout


@pytest.mark.slow
def test_time_is_up_and_the_next_one_is_graded(pool: GraderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Mock(side_effect=_Grader.ask)
    monkeypatch.setattr(_Grader, "ask", lambda *arguments: ask(*arguments))
    began = time.process_time()
    assert pool.same(ENDLESS, EXPECTED, seconds=0.3) is False
    assert time.process_time() - began < 0.2  # it is not this process that computes
    # Nothing is gained from using up the same time twice.
    assert [call.args[1]["answer"] for call in ask.call_args_list] == [ENDLESS, r"\sqrt{8}"]
    assert pool.same(r"x+\frac{1}{2}", "x+0.5", seconds=2.0)


@pytest.mark.parametrize(("harm", "verdict"), [(psutil.Process.suspend, False), (psutil.Process.kill, True)])
def test_a_grader_stopped_is_given_up_and_one_killed_costs_nothing(
    pool: GraderPool, harm: Callable[[psutil.Process], None], verdict: bool
) -> None:
    assert pool.same("2x", "x+x", seconds=2.0)
    for process in graders():
        harm(process)
    assert pool.same("3x", "x+x+x", seconds=2.0 if verdict else 0.2) is verdict
    assert pool.same("3x", "x+x+x", seconds=2.0)
    assert not pool.same("3x", "x+x", seconds=2.0)


def test_memory_and_files_are_bounded(tmp_path: Path) -> None:
    printed = run(f"""
        from pathlib import Path
        from agentrl.grading.latex.worker import _limit
        _limit(2**31)
        for forbidden in (lambda: bytearray(3 * 2**30), lambda: Path({str(tmp_path / "x")!r}).write_text("x")):
            try:
                forbidden()
            except (MemoryError, OSError) as error:
                print(type(error).__name__)
    """)
    assert printed == "MemoryError\nOSError\n"


def test_where_no_grader_works_the_machine_is_to_blame(pool: GraderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.grading.latex.pool.MAX_BYTES", "many")
    with pytest.raises(InfrastructureError, match="every grading process dies"):
        pool.same("x^2+2x+1", "(x+1)^2", seconds=2.0)


def test_a_zygote_killed_from_outside_is_replaced(pool: GraderPool) -> None:
    assert pool.same("2x", "x+x", seconds=2.0)
    for zygote in zygotes():
        os.killpg(zygote.pid, signal.SIGKILL)
    wait_for(lambda: [one for one in psutil.Process().children() if one.status() == psutil.STATUS_ZOMBIE])
    # A new zygote imports sympy first, which a busy machine takes its time for.
    assert pool.same("3x", "x+x+x", seconds=30.0)


def test_graders_are_kept_and_replaced_now_and_then(pool: GraderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.grading.latex.pool._REQUESTS", 3)
    seen = set[int]()
    for _ in range(7):
        assert pool.same("2x", "x+x", seconds=2.0)
        seen |= {process.pid for process in graders()}
    assert len(seen) > 2


@pytest.mark.slow
def test_threads_do_not_wait_for_each_other(pool: GraderPool) -> None:
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(pool.same, ENDLESS, EXPECTED, seconds=1.5)
        for _ in range(3):
            assert pool.same("2x", "x+x", seconds=2.0)
        assert not slow.done()
    assert slow.result() is False


def test_many_threads_get_their_own_answers(pool: GraderPool) -> None:
    def ask(number: int) -> bool:
        return pool.same(f"{number}x", f"x+{number - 1 + number % 2}x", seconds=2.0)

    with ThreadPoolExecutor(20) as threads:
        assert list(threads.map(ask, range(2, 22))) == [True, False] * 10


@pytest.mark.slow
def test_closing_leaves_no_process_and_can_be_repeated() -> None:
    printed = run("""
        import psutil
        from agentrl.grading.latex import close_graders, same_answer
        for _ in range(2):
            assert same_answer("2x", "x+x")
            everyone = psutil.Process().children(recursive=True)
            close_graders()
            close_graders()
            print(len(everyone), psutil.wait_procs(everyone)[1])
    """)
    assert printed == "2 []\n" * 2


@pytest.mark.slow
def test_closing_ends_the_graders_of_a_dead_zygote() -> None:
    others = set(graders())
    made = GraderPool(1)
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(made.same, ENDLESS, EXPECTED, seconds=60.0)
        (grader,) = wait_for(lambda: list(set(graders()) - others))
        grader.parent().kill()  # pyright: ignore[reportOptionalMemberAccess]
        made.close()
    assert isinstance(asking.exception(), InfrastructureError)
    assert not psutil.wait_procs([grader], timeout=5)[1]


def test_a_pool_can_be_closed_while_its_zygote_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    others = set(zygotes())
    made = GraderPool(1)
    (zygote,) = set(zygotes()) - others
    os.killpg(zygote.pid, signal.SIGKILL)
    wait_for(lambda: [zygote] if zygote.status() == psutil.STATUS_ZOMBIE else [])
    (tmp_path / "agentrl.py").write_text("import time\ntime.sleep(100)")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    began = time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(made.same, ENDLESS, EXPECTED, seconds=60.0)
        wait_for(lambda: list(set(zygotes()) - others))
        made.close()
    assert isinstance(asking.exception(), InfrastructureError)
    assert time.monotonic() - began < 20 and set(zygotes()) == others


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("os.kill(os.getpid(), 9)", -9)])
def test_a_program_that_ends_leaves_no_process(end: str, code: int) -> None:
    script = f"""
        import os, psutil
        from agentrl.grading.latex import same_answer
        assert same_answer("2x", "x+x")
        print(*[process.pid for process in psutil.Process().children(recursive=True)], flush=True)
        {end}
    """
    printed = run(script, code)
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


def test_a_zygote_that_can_not_start_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "agentrl.py").write_text("raise ModuleNotFoundError('No module named x')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(InfrastructureError, match=r"does not start: .*No module named"):
        GraderPool(1)


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
