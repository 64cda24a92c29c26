"""Ctrl-C or SIGTERM at any moment: exit code 130 or 143, a line that tells how to go on, and a run that can."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.runs.folder import checkpoints, read_jsonl

from ..forked import Command, Server, is_alive
from .conftest import Train


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When to interrupt, and the settings that make that moment long enough to be met."""

    ready: Callable[[Path], bool]
    settings: dict[str, str]
    pause_s: float = 0.0


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


MOMENTS = {
    "making the folder": Moment(ready=lambda run: (run / "config.toml").exists(), settings={}),
    "oracle episodes": Moment(
        ready=lambda run: (run / "config.toml").exists(),
        settings={"sft.steps": "1", "sft.tasks": "4000", "env.id": "agentrl/Arithmetic-v0"},
        pause_s=1.0,
    ),
    "warm start": Moment(
        ready=lambda run: (run / "config.toml").exists(),
        settings={"sft.steps": "100000", "sft.tasks": "2", "env.id": "agentrl/Arithmetic-v0"},
        pause_s=3.0,
    ),
    "saving": Moment(ready=lambda run: any(run.glob("checkpoints/.step-*.tmp")), settings={}),
    "evaluation": Moment(ready=lambda run: bool(checkpoints(run)), settings={"eval.tasks": "4000"}, pause_s=0.3),
    "training": Moment(
        ready=lambda run: lines(run / "metrics.jsonl") >= 2, settings={"optim.steps": "4000", "save.every": "0"}
    ),
    **{
        mode: Moment(
            ready=lambda run: lines(run / "metrics.jsonl") >= 2,
            settings={"optim.steps": "4000", "save.every": "0", "rollout.overlap": mode},
        )
        for mode in ("lag", "inflight")
    },
    "later saving": Moment(
        ready=lambda run: lines(run / "metrics.jsonl") >= 2 and any(run.glob("checkpoints/.step-*.tmp")),
        settings={"optim.steps": "4000", "save.every": "1"},
    ),
}


def shorten(run: Path) -> None:
    """Leave little to do for whoever resumes."""
    text = (run / "config.toml").read_text()
    for section, key, value in (("sft", "steps", 2), ("sft", "tasks", 2), ("eval", "tasks", 2)):
        text = re.sub(rf"(\[{section}\][^\[]*?\b{key} = )\d\d\d+", rf"\g<1>{value}", text)
    saved = checkpoints(run)
    steps = int(saved[-1].name.removeprefix("step-")) + 1 if saved else 0
    (run / "config.toml").write_text(re.sub(r"(\[optim\]\nsteps = )\d+", rf"\g<1>{steps}", text))


def check_ended(command: Command, left: set[int], name: str, code: int = 130) -> None:
    assert command.wait() == code, command.err
    assert "Traceback" not in command.err and "Exception" not in command.err, command.err
    assert command.err.splitlines()[-1].startswith("agentrl: stopped"), command.err
    assert command.err.splitlines()[-1].endswith(f"; go on with: agentrl train --resume runs/{name}")
    await_end(left)


def await_end(left: set[int]) -> None:
    while any(map(is_alive, left)):
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "sig"), [*((name, signal.SIGINT) for name in MOMENTS), ("later saving", signal.SIGTERM)]
)
def test_interrupted_run_can_go_on(
    train: Train, server: Server, tmp_path: Path, name: str, sig: signal.Signals
) -> None:
    moment = MOMENTS[name]
    run = tmp_path / "runs" / "r"
    command = train("r", "optim.steps=3", *(f"{key}={value}" for key, value in moment.settings.items()))
    command.until(lambda: moment.ready(run))
    time.sleep(moment.pause_s)
    left = command.descendants()
    os.killpg(command.pid, sig)  # as a terminal does: to the sandbox's processes too
    check_ended(command, left, "r", 128 + sig)
    assert (run / "report.html").exists()
    rows = read_jsonl(run / "metrics.jsonl")
    saved = checkpoints(run)
    if rows:
        assert saved[-1].name == f"step-{rows[-1]['step']:06d}", "no finished step is lost"
    shorten(run)
    server.start(tmp_path, "train", "--resume", "runs/r").done()
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))


@pytest.mark.parametrize("wait_s", [0.0, 0.02, 0.2])
def test_impatience_changes_nothing(train: Train, tmp_path: Path, wait_s: float) -> None:
    run = tmp_path / "runs" / "r"
    command = train("r", "optim.steps=4000")
    command.until(lambda: lines(run / "metrics.jsonl") >= 1)
    left = command.descendants()
    for _ in range(5):
        if command.running:
            os.killpg(command.pid, signal.SIGINT)
        time.sleep(wait_s)
    check_ended(command, left, "r")
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


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [0.3, 1.0])
def test_interrupted_imports_leave_nothing(tmp_path: Path, pause_s: float) -> None:
    # The command line's own module is in: from here on it is agentrl that answers for an interrupt.
    code = "import sys, agentrl.cli; print('in', flush=True); sys.exit(agentrl.cli.main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", "--preset", "quickstart"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "in\n"
    time.sleep(pause_s)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err.removeprefix("loading PyTorch …\n")) == (130, "agentrl: interrupted\n")
    assert not list(tmp_path.iterdir())


MARKED = """
from pathlib import Path
import gymnasium
from agentrl.envs.generated.arithmetic import Arithmetic

class Marked(Arithmetic):
    def reward(self, episode):
        Path("begun").touch()
        return super().reward(episode)

gymnasium.register("test/Marked-v0", entry_point=Marked)
"""


def test_interrupted_evaluation_ends_quietly(server: Server, warm: Path, tmp_path: Path) -> None:
    (tmp_path / "marked.py").write_text(MARKED)
    env = ("--env", "marked:test/Marked-v0")
    command = server.start(tmp_path, "eval", str(warm), *env, "--tasks", "3000", "--set", "rollout.concurrency=8")
    command.until((tmp_path / "begun").exists)
    left = command.descendants()
    os.killpg(command.pid, signal.SIGINT)
    assert command.wait() == 130
    assert command.err == (
        "agentrl: stopped, and no episode is kept: with --out FOLDER they are, and the same command goes on\n"
    )
    await_end(left)
