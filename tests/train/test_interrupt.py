"""Ctrl-C or SIGTERM at any moment: exit code 130 or 143, a line that tells how to go on, and a run that can."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.runs.folder import checkpoints, read_jsonl

from ..forked import Command, Server, is_alive
from .conftest import AUDITED, Train

STOPPABLE = (
    AUDITED
    + """
import gymnasium, psutil
from agentrl.envs.generated.arithmetic import Arithmetic
from torch.optim.optimizer import register_optimizer_step_pre_hook

class Stoppable(Arithmetic):
    def reward(self, episode):
        sys.audit("graded", self.split)
        return {"correct": max(sum(map(ord, episode.final)) % 5 / 6, *super().reward(episode).values())}

def reach(number):
    if number:
        Path("left").write_text(" ".join(str(one.pid) for one in psutil.Process().children(recursive=True)))
        os.killpg(os.getpid(), number)  # as a terminal does: to the sandbox's processes too

gymnasium.register("test/Stoppable-v0", entry_point=Stoppable)
register_optimizer_step_pre_hook(lambda *_: sys.audit("updated"))
"""
)
"""Sends its group the signals of the plan; 0 is none."""
LEARNING = ("0 ^open .*/metrics.jsonl a", "2 ^updated")
INSTANTS = {
    "off": (
        # As the event loop is made; with the gold player; while the warm start learns.
        *("0 ^fcntl.flock", "2 ^socket.__new__", "2 ^graded train", "2 ^updated"),
        # While it saves, evaluates, plays and learns; and while it saves later.
        *(r"2 ^open .*/\.step-000000\.tmp None", "2 ^graded test", "2 ^graded train", *LEARNING),
        *(r"2 ^open .*/\.step-000003\.tmp None", r"15 ^os\.rename .*/\.step-000004\.tmp "),
    ),
    "lag": LEARNING,
    "inflight": LEARNING,
}


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def check_ended(command: Command, folder: Path, code: int) -> None:
    assert command.wait() == code, command.err
    assert "Traceback" not in command.err and "Exception" not in command.err, command.err
    assert command.err.splitlines()[-1].startswith("agentrl: stopped"), command.err
    assert command.err.splitlines()[-1].endswith("; go on with: agentrl train --resume runs/r")
    await_end(folder)


def await_end(folder: Path) -> None:
    """Wait for the end of what it had started as the signal came."""
    left = {*map(int, (folder / "left").read_text().split())}
    while any(map(is_alive, left)):
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("mode", INSTANTS)
def test_interrupted_run_can_go_on(train: Train, server: Server, tmp_path: Path, mode: str) -> None:
    (tmp_path / "stoppable.py").write_text(STOPPABLE)
    plan, run = tmp_path / "plan.txt", tmp_path / "runs" / "r"
    plan.write_text("\n".join(INSTANTS[mode]))
    settings = ("sft.steps=2", "sft.tasks=2", "sft.stop_at=1.0") if mode == "off" else ("eval.every=0", "eval.tasks=1")
    settings += ("env.id=stoppable:test/Stoppable-v0", f"rollout.overlap={mode}", "save.every=3")
    command = train("r", *settings)
    for instant in INSTANTS[mode]:
        if (number := int(instant.split()[0])) == 0:
            continue
        check_ended(command, tmp_path, 128 + number)
        assert (run / "report.html").exists()
        if rows := read_jsonl(run / "metrics.jsonl"):
            assert checkpoints(run)[-1].name == f"step-{rows[-1]['step']:06d}", "no finished step is lost"
        command = server.start(tmp_path, "train", "--resume", "runs/r")
    command.done()
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4]


def test_impatience_changes_nothing(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    command = train("r", "optim.steps=4000", "eval.tasks=1")
    command.until(lambda: lines(run / "metrics.jsonl") >= 1)
    (tmp_path / "left").write_text(" ".join(map(str, command.descendants())))
    for wait_s in (0.0, 0.0, 0.02, 0.02, 0.2, 0.2):
        if command.running:
            os.killpg(command.pid, signal.SIGINT)
        time.sleep(wait_s)
    check_ended(command, tmp_path, 130)
    assert checkpoints(run) and (run / "report.html").exists()


@pytest.mark.slow
def test_a_thread_that_learns_has_as_many_threads_as_the_run() -> None:
    code = """
import asyncio, os, torch
from agentrl.train.interrupts import in_thread

def learn():
    before = len(os.listdir("/proc/self/task"))
    few @ many
    return len(os.listdir("/proc/self/task")) - before

torch.set_num_threads(1)
few, many = torch.ones(257, 512), torch.ones(512, 512)
print(asyncio.run(in_thread(learn)))
"""
    told = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "3"}, capture_output=True, text=True
    )
    assert told.stdout == "0\n", told.stderr


def test_interrupted_imports_leave_nothing(tmp_path: Path) -> None:
    # The command line's own module is in: from here on it is agentrl that answers for an interrupt.
    code = """
import signal, sys, agentrl.cli

sys.addaudithook(lambda event, names: event == "import" and names[0] == "torch.nn" and signal.raise_signal(2))
sys.exit(agentrl.cli.main())
"""
    words = [sys.executable, "-c", code, "train", "--preset", "quickstart"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.removeprefix("loading PyTorch …\n")) == (130, "agentrl: interrupted\n")
    assert not list(tmp_path.iterdir())


def test_interrupted_evaluation_ends_quietly(server: Server, warm: Path, tmp_path: Path) -> None:
    (tmp_path / "stoppable.py").write_text(STOPPABLE)
    (tmp_path / "plan.txt").write_text("2 ^graded test")
    env = ("--env", "stoppable:test/Stoppable-v0")
    command = server.start(tmp_path, "eval", str(warm), *env, "--tasks", "50", "--set", "rollout.concurrency=8")
    assert command.wait() == 130
    assert command.err == (
        "agentrl: stopped, and no episode is kept: with --out FOLDER they are, and the same command goes on\n"
    )
    await_end(tmp_path)
