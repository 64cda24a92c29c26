"""How a sweep does its runs, with processes that follow a script and a clock that does not wait."""

import fcntl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import pytest

from agentrl.eval.sweep import work
from agentrl.eval.sweep.plan import SweepPlan
from agentrl.eval.sweep.work import Sweep

from .test_sweep import planned, write_rows

TICK_S = 60


class Clock:
    """Stands in for the module ``time``; each time that somebody sleeps it calls ``passed`` with what it shows."""

    def __init__(self) -> None:
        self.now = 0.0
        self.passed: Callable[[float], object] = lambda now: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += TICK_S
        self.passed(self.now)


class Scripted:
    """A process that ends with ``code`` when it was looked at for the second time."""

    def __init__(self, code: int) -> None:
        self._codes = [code, None]

    def poll(self) -> int | None:
        return self._codes.pop() if len(self._codes) > 1 else self._codes[0]

    def send_signal(self, sig: int, /) -> None:
        """It ends by itself."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(work, "time", clock)
    return clock


@pytest.fixture
def plan(tmp_path: Path) -> SweepPlan:
    """Three runs without a warm start."""
    return planned("algo.loss=ctpo,gspo,dapo", overrides=["sft.steps=0"], tokens=100, out=tmp_path / "out")


def play(plan: SweepPlan, *ends: tuple[int, int]) -> tuple[Sweep, list[str]]:
    """Do the runs, each with the tokens that it samples and its exit code; gives the sweep and what it told."""
    progress: list[str] = []
    script = iter(ends)

    def start(words: Sequence[str], log: IO[bytes]) -> Scripted:
        tokens, code = next(script)
        (run,) = (run for run in plan.runs if run.name in words)
        write_rows(run, [{"step": 1, "sampled_tokens": tokens}], [{"step": 1, "success": 0.5, "tasks": 8}])
        return Scripted(code)

    sweep = Sweep(plan, 1, progress.append, start)
    sweep.work()
    return sweep, progress


def test_a_failed_run_is_not_taken_for_trained_when_time_is_estimated(plan: SweepPlan, clock: Clock) -> None:
    _, progress = play(plan, (25, 1), (100, 0), (100, 0))
    # Two minutes for a quarter of a run: two of them take sixteen. Then four for one and a quarter, and one to do.
    ended = [line.rpartition(", ")[2] for line in progress if "failed" in line or "success" in line]
    assert ended == ["about 16 min left", "about 3 min left", "about 0 s left"]


@pytest.mark.parametrize(
    ("number", "wanted"), [(9, "ended by signal 9 (Killed)"), (35, "ended by signal 35 (Real-time signal 1)")]
)
def test_signals_that_end_a_run_are_named(plan: SweepPlan, clock: Clock, number: int, wanted: str) -> None:
    sweep, _ = play(plan, (50, -number), (100, 0), (100, 0))
    assert sweep.ends["ctpo-seed0"].error == wanted
    assert [end.exit_code for end in sweep.ends.values()] == [-number, 0, 0]


@pytest.mark.parametrize(("lets_go_s", "code"), [(90, 0), (1e9, 2)])
def test_run_waits_for_one_that_has_no_folder(plan: SweepPlan, clock: Clock, lets_go_s: float, code: int) -> None:
    # As a sweep leaves it that was killed while its process was loading PyTorch.
    logs = plan.out / "logs"
    logs.mkdir(parents=True)
    with (logs / "ctpo-seed0.log").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        clock.passed = lambda now: fcntl.flock(held, fcntl.LOCK_UN) if now >= lets_go_s else None
        sweep, progress = play(plan, (100, 0), (100, 0), (100, 0))
    begun = [line.split()[1] for line in progress if "begins" in line]
    assert begun == (["gspo-seed0:", "ctpo-seed0:", "dapo-seed0:"] if code == 0 else ["gspo-seed0:", "dapo-seed0:"])
    assert sweep.ends["ctpo-seed0"].exit_code == code
    assert ("does not let go of it" in sweep.ends["ctpo-seed0"].error) is (code == 2)
