"""``agentrl eval``: every episode is in its file as it ends, and the same command goes on after a kill."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

import agentrl
from agentrl.runs.records import EPISODES, read_begun, read_episodes
from agentrl.types import Trajectory

from ..forked import Command, Server
from .conftest import TOY, setting

SETTINGS = ("rollout.turn_tokens=24", "rollout.episode_tokens=128", "rollout.concurrency=6", "rollout.cut_turns=answer")


def evaluate(server: Server, folder: Path, model: Path, *words: str) -> Command:
    return server.start(folder, "eval", str(model), "--preset", "quickstart", *setting(*SETTINGS), *words)


@pytest.fixture
def bare(warm: Path, tmp_path: Path) -> Path:
    """The warm model in no run folder."""
    shutil.copytree(warm, tmp_path / "model")
    return Path("model")


def lines(path: Path) -> int:
    return len(read_begun(path)[1]) if path.exists() else 0


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
    for saved in (3, 5, 14):
        lives.write_text(str(saved))
        assert evaluate(server, tmp_path, bare, *words, "--out", "e").wait() == -signal.SIGKILL
        seen.append([record.trajectory for record in read_begun(out)[1]])
        assert seen[-1][: len(seen[-2])] == seen[-2], "nothing was played again"
        assert saved <= len(seen[-1]) < 24
    lives.unlink()
    out.write_bytes(out.read_bytes()[:-7])  # it was writing
    again = evaluate(server, tmp_path, bare, *words, "--out", "e").done()
    assert again.out == whole.out and "level:1" in whole.out
    records = list(agentrl.read_episodes(tmp_path / "e"))
    assert len({(one.trajectory.task_id, one.attempt) for one in records}) == len(records) == 24
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "e")]
    last = [summary["sets"][0].pop("this_process") for summary in summaries]
    assert summaries[0] == summaries[1] and last[0]["episodes"] == 24 > last[1]["episodes"]
    assert "level:1" in (tmp_path / "e" / "report.html").read_text()
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
def test_more_can_be_played_later_but_not_with_other_weights(
    server: Server, bare: Path, warm: Path, tmp_path: Path
) -> None:
    evaluate(server, tmp_path, bare, "--tasks", "2", "--out", "e").done()
    more = evaluate(server, tmp_path, bare, "--tasks", "4", "--attempts", "2", "--out", "e", "--json").done()
    assert (json.loads(more.out)["tasks"], json.loads(more.out)["attempts"]) == (4, 2)
    assert len(list(read_episodes(tmp_path / "e"))) == 8
    settings = setting("sft.steps=3", "eval.tasks=1")
    server.start(tmp_path, "sft", str(warm.parents[3] / "warm.toml"), "--name", "other", *settings).done()
    (tmp_path / "runs" / "other" / "checkpoints" / "step-000000").rename(tmp_path / "others")
    refused = evaluate(server, tmp_path, Path("others"), "--out", "e")
    assert refused.wait() == 2 and "with weights '" in refused.err
    assert len(list(read_episodes(tmp_path / "e"))) == 8


@pytest.mark.slow
def test_ctrl_c_says_what_is_saved(server: Server, bare: Path, tmp_path: Path) -> None:
    words, out = ("--tasks", "2000", "--out", "e"), tmp_path / "e" / EPISODES
    command = evaluate(server, tmp_path, bare, *words)
    command.until(lambda: lines(out) >= 3)
    os.killpg(command.pid, signal.SIGINT)
    assert command.wait() == 130
    saved = len(list(read_episodes(out)))
    assert command.err.splitlines()[-1] == (
        f"agentrl: stopped, {saved} episodes are saved in e; go on with the same command"
    )
    again = evaluate(server, tmp_path, bare, "--tasks", "5", "--out", "e")
    assert again.wait() == 0 and len(list(read_episodes(out))) == max(saved, 5), "what was not asked for stays"


def test_a_split_of_fewer_tasks_says_so(server: Server, bare: Path, tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "toy.toml").write_text("[env]\nid = 'toy:test/Toy-v0'\n[rollout]\nturn_tokens = 5\n")
    words = ("eval", str(bare), "--config", "toy.toml", "--json", "--tasks")
    command = server.start(tmp_path, *words, "1000")
    # On a busy machine lines of progress follow.
    assert command.wait() == 0 and command.err.startswith("the split 'test' has 12 tasks, not 1000\n")
    assert json.loads(command.out)["tasks"] == 12
    command = server.start(tmp_path, *words, "12")
    assert command.wait() == 0 and command.err == ""
    # A prompt with a number of one digit has 26 tokens, and with one of two digits 27.
    words = (*words, "12", "--out", "e", "--set")
    command = server.start(tmp_path, *words, "rollout.episode_tokens=26")
    assert command.wait() == 2 and "no episode had room for a turn: their prompts have 26 tokens or more" in command.err
    command = server.start(tmp_path, *words, "rollout.episode_tokens=27")
    assert command.wait() == 0 and "warning: 2 episodes count as failed, since their prompts left no" in command.err
