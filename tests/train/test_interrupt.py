"""Ctrl-C or SIGTERM at any moment: exit code 130 or 143, a line that tells how to go on, and a run that can.

``agentrl eval``: every episode is in its file as it ends, and the same command goes on after a kill.
"""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

import agentrl
from agentrl.runs.folder import checkpoints, read_jsonl
from agentrl.runs.records import EPISODES, read_begun, read_episodes
from agentrl.types import Trajectory

from ..conftest import python
from ..forked import Command, Server, is_alive
from .conftest import AUDITED, TOY, Train, setting

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
    last = command.err.splitlines()[-1]
    assert last.startswith("agentrl: stopped") and last.endswith("; go on with: agentrl train --resume runs/r")
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
from agentrl.train.interrupts import run_in_thread

def learn():
    before = len(os.listdir("/proc/self/task"))
    few @ many
    return len(os.listdir("/proc/self/task")) - before

torch.set_num_threads(1)
few, many = torch.ones(257, 512), torch.ones(512, 512)
print(asyncio.run(run_in_thread(learn)))
"""
    assert python("-c", code, OMP_NUM_THREADS="3").stdout == "0\n"


@pytest.mark.slow
def test_interrupted_imports_leave_nothing(tmp_path: Path) -> None:
    # The command line's own module is in: from here on it is agentrl that answers for an interrupt.
    code = """
import signal, sys, agentrl.cli

sys.addaudithook(lambda event, names: event == "import" and names[0] == "torch.nn" and signal.raise_signal(2))
sys.exit(agentrl.cli.main())
"""
    done = python("-c", code, "train", "--preset", "quickstart", folder=tmp_path, status=130)
    assert done.stderr.removeprefix("loading PyTorch …\n") == "agentrl: interrupted\n"
    assert not list(tmp_path.iterdir())


def test_interrupted_evaluation_ends_quietly(server: Server, warm: Path, tmp_path: Path) -> None:
    (tmp_path / "stoppable.py").write_text(STOPPABLE)
    (tmp_path / "plan.txt").write_text("2 ^graded test")
    env = ("--env", "stoppable:test/Stoppable-v0")
    command = server.start(tmp_path, "eval", str(warm), *env, "--tasks", "50", "--set", "rollout.concurrency=8")
    assert command.wait() == 130
    message = "agentrl: stopped, and no episode is saved: with --out FOLDER they are, and the same command resumes\n"
    assert command.err == message
    await_end(tmp_path)


BRIEF = (
    "rollout.turn_tokens=24",
    "rollout.episode_tokens=128",
    "rollout.concurrency=6",
    "rollout.truncated.turn=answer",
)


def evaluate(server: Server, folder: Path, model: Path, *words: str) -> Command:
    return server.start(folder, "eval", str(model), "--preset", "quickstart", *setting(*BRIEF), *words)


@pytest.fixture
def bare(warm: Path, tmp_path: Path) -> Path:
    """The warm model in no run folder."""
    shutil.copytree(warm, tmp_path / "model")
    return Path("model")


MORTAL = f"""
import os, signal
from pathlib import Path
import gymnasium
from agentrl.envs.generated.arithmetic import Arithmetic
from agentrl.runs.records import read_begun

lives, out = Path("lives.txt"), Path("e") / {EPISODES!r}

class Mortal(Arithmetic):
    def reward(self, episode):
        if lives.exists() and out.exists() and len(read_begun(out)[1]) >= int(lives.read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reward(episode)

gymnasium.register("test/Mortal-v0", entry_point=Mortal)
"""
"""Kills its process when so many episodes are saved as a file says."""


@pytest.mark.slow
def test_killed_evaluation_goes_on_as_if_nothing_had_been(server: Server, bare: Path, tmp_path: Path) -> None:
    (tmp_path / "mortal.py").write_text(MORTAL)
    out, lives = tmp_path / "e" / EPISODES, tmp_path / "lives.txt"
    words = (*setting("env.id=mortal:test/Mortal-v0"), "--tasks", "12", "--attempts", "2")
    whole = evaluate(server, tmp_path, bare, *words, "--out", "whole").done()
    seen: list[list[Trajectory]] = [[]]
    for many in (3, 5, 14):
        lives.write_text(str(many))
        assert evaluate(server, tmp_path, bare, *words, "--out", "e").wait() == -signal.SIGKILL
        seen.append([record.trajectory for record in read_begun(out)[1]])
        assert seen[-1][: len(seen[-2])] == seen[-2], "nothing was played again"
        assert many <= len(seen[-1]) < 24
    lives.unlink()
    out.write_bytes(out.read_bytes()[:-7])  # it was writing
    again = evaluate(server, tmp_path, bare, *words, "--out", "e").done()
    assert again.out == whole.out and "level:1" in whole.out
    records = list(agentrl.read_episodes(tmp_path / "e"))
    assert len({(record.trajectory.task_id, record.trajectory.attempt) for record in records}) == 24 == len(records)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "e")]
    assert summaries[0] == summaries[1]
    for other, name in (
        (("--seed", "1"), "with seed 0 and not 1"),
        (("--greedy",), "with temperature 1.0 and not 0.0"),
        (("--set", "rollout.turn_tokens=25"), "with turn_tokens 24 and not 25"),
        (("--set", "env.args.level=2"), "with env_args {"),
        (("--set", "env.args.dialect=hermes"), "with env_args {"),
    ):
        refused = evaluate(server, tmp_path, bare, *words, *other, "--out", "e")
        assert refused.wait() == 2 and refused.err.count("\n") == 1
        assert name in refused.err and "holds episodes of another evaluation" in refused.err


@pytest.mark.slow
def test_more_can_be_played_but_not_with_other_weights(server: Server, bare: Path, warm: Path, tmp_path: Path) -> None:
    evaluate(server, tmp_path, bare, "--tasks", "2", "--out", "e").done()
    more = evaluate(server, tmp_path, bare, "--tasks", "4", "--attempts", "2", "--out", "e", "--json").done()
    assert (json.loads(more.out)["tasks"], json.loads(more.out)["attempts"]) == (4, 2)
    assert len(list(read_episodes(tmp_path / "e"))) == 8
    settings = setting("sft.steps=3", "eval.tasks=1", "optim.steps=0")
    server.start(tmp_path, "train", str(warm.parents[3] / "warm.toml"), "--name", "other", *settings).done()
    (tmp_path / "runs" / "other" / "checkpoints" / "step-000000").rename(tmp_path / "others")
    refused = evaluate(server, tmp_path, Path("others"), "--out", "e")
    assert refused.wait() == 2 and "with weights '" in refused.err
    assert len(list(read_episodes(tmp_path / "e"))) == 8


@pytest.mark.slow
def test_ctrl_c_says_what_is_saved(server: Server, bare: Path, tmp_path: Path) -> None:
    words, out = ("--tasks", "2000", "--out", "e"), tmp_path / "e" / EPISODES
    command = evaluate(server, tmp_path, bare, *words)
    command.until(lambda: out.exists() and len(read_begun(out)[1]) >= 3)
    os.killpg(command.pid, signal.SIGINT)
    assert command.wait() == 130
    task_ids = [record.trajectory.task_id for record in read_episodes(out)]
    message = f"agentrl: stopped, {len(task_ids)} episodes are saved in e; resume with the same command"
    assert command.err.splitlines()[-1] == message
    again = evaluate(server, tmp_path, bare, "--tasks", "5", "--out", "e")
    assert again.wait() == 0
    after = [record.trajectory.task_id for record in read_episodes(out)]
    assert after[: len(task_ids)] == task_ids, "what was not asked for stays"
    # Those that were under way when it was stopped may be of the first five.
    assert sorted(after[len(task_ids) :]) == sorted({f"test-1:{number}" for number in range(5)} - {*task_ids})


@pytest.mark.slow
def test_a_split_of_fewer_tasks_says_so(server: Server, bare: Path, tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "toy.toml").write_text("[env]\nid = 'toy:test/Toy-v0'\n[rollout]\nturn_tokens = 5\n")
    words = ("eval", str(bare), "--config", "toy.toml", "--json", "--tasks")
    command = server.start(tmp_path, *words, "1000")
    # On a busy machine lines of progress follow.
    assert command.wait() == 0 and command.err.startswith("the split 'test' has 12 tasks, not 1000\n")
    assert json.loads(command.out)["tasks"] == 12
    assert server.start(tmp_path, *words, "12").done().err == ""
    # A prompt with a number of one digit has 26 tokens, and with one of two digits 27.
    words = (*words, "12", "--out", "e", "--set")
    refused = server.start(tmp_path, *words, "rollout.episode_tokens=26")
    assert refused.wait() == 2 and "no episode had room for a turn: their prompts have 26 tokens or more" in refused.err
    errors = server.start(tmp_path, *words, "rollout.episode_tokens=27").done().err
    assert "warning: 2 episodes count as failed, since their prompts left no" in errors
