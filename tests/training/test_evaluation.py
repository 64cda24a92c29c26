"""``agentrl eval``: every episode is in its file as it ends, and the same command goes on after a kill."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from agentrl.records import read_begun, read_episodes

from .conftest import Command, Server

FINITE = """
import gymnasium
from agentrl import Task, TaskList, ToolEnv

class Finite(ToolEnv):
    def tasks(self, split):
        return TaskList([Task(id=f"{split}:{n}", prompt=f"Say {n}.", answer=str(n)) for n in range(6)])

    def reward(self, episode):
        return {"correct": sum(map(ord, episode.final)) % 5 / 4}

gymnasium.register("test/Finite-v0", entry_point=Finite)
"""
SETTINGS = ("rollout.turn_tokens=24", "rollout.episode_tokens=128", "rollout.concurrency=1", "rollout.cut_turns=answer")


def evaluate(server: Server, folder: Path, model: Path, *words: str) -> Command:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    return server.start(folder, "eval", str(model), "--preset", "quickstart", *settings, *words)


@pytest.fixture
def bare(warm: Path, tmp_path: Path) -> Path:
    """The warm model in no run folder."""
    shutil.copytree(warm, tmp_path / "model")
    return Path("model")


def lines(path: Path) -> int:
    return len(read_begun(path)[1]) if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_killed_evaluation_goes_on_as_if_nothing_had_been(
    server: Server, bare: Path, tmp_path: Path, suffix: str
) -> None:
    out, words = tmp_path / f"e{suffix}", ("--tasks", "40", "--attempts", "2", "--json")
    whole = evaluate(server, tmp_path, bare, *words, "--out", f"whole{suffix}")
    assert whole.wait() == 0, whole.err
    killed = evaluate(server, tmp_path, bare, *words, "--out", out.name)
    killed.until(lambda: lines(out) >= 5)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    before = lines(out)
    assert 5 <= before < 80
    out.write_bytes(out.read_bytes()[:-7])  # it was writing
    played = [record.trajectory.task_id for record in read_begun(out)[1]]
    again = evaluate(server, tmp_path, bare, *words, "--out", out.name)
    assert again.wait() == 0, again.err
    assert json.loads(again.out) == json.loads(whole.out)
    records = list(read_episodes(out))
    assert len({(one.trajectory.task_id, one.trajectory.seed) for one in records}) == len(records) == 80
    assert [one.trajectory.task_id for one in records][: len(played)] == played
    data = out.read_bytes()
    third = evaluate(server, tmp_path, bare, *words, "--out", out.name)
    assert third.wait() == 0 and json.loads(third.out) == json.loads(whole.out), third.err
    assert [one.trajectory for one in read_episodes(out)] == [one.trajectory for one in records], "all was there"
    for other, name in (
        (("--seed", "1"), "with seed 0 and not 1"),
        (("--greedy",), "with eval.temperature 1.0 and not 0.0"),
        (("--set", "rollout.turn_tokens=25"), "with rollout.turn_tokens 24 and not 25"),
        (("--set", "env.args.level=2"), "with env.args {"),
        (("--set", "env.args.dialect=hermes"), "with dialect 'fence "),
    ):
        refused = evaluate(server, tmp_path, bare, *words, *other, "--out", out.name)
        assert refused.wait() == 2 and refused.err.count("\n") == 1
        assert name in refused.err and "holds episodes of another evaluation" in refused.err
    assert suffix != ".jsonl" or out.read_bytes() == data


@pytest.mark.slow
def test_more_can_be_played_later_but_not_with_other_weights(
    server: Server, bare: Path, warm: Path, tmp_path: Path
) -> None:
    few = evaluate(server, tmp_path, bare, "--tasks", "2", "--out", "e.jsonl")
    assert few.wait() == 0, few.err
    more = evaluate(server, tmp_path, bare, "--tasks", "4", "--attempts", "2", "--out", "e.jsonl", "--json")
    assert more.wait() == 0, more.err
    assert (json.loads(more.out)["tasks"], json.loads(more.out)["attempts"]) == (4, 2)
    assert len(list(read_episodes(tmp_path / "e.jsonl"))) == 8
    settings = ("--set", "sft.steps=3", "--set", "eval.tasks=1")
    other = server.start(tmp_path, "sft", str(warm.parents[3] / "warm.toml"), "--name", "other", *settings)
    assert other.wait() == 0, other.err
    (tmp_path / "runs" / "other" / "checkpoints" / "step-000000").rename(tmp_path / "others")
    refused = evaluate(server, tmp_path, Path("others"), "--out", "e.jsonl")
    assert refused.wait() == 2 and "with weights '" in refused.err
    assert len(list(read_episodes(tmp_path / "e.jsonl"))) == 8


def test_ctrl_c_says_what_is_saved(server: Server, bare: Path, tmp_path: Path) -> None:
    words, out = ("--tasks", "2000", "--out", "e.jsonl.zst"), tmp_path / "e.jsonl.zst"
    command = evaluate(server, tmp_path, bare, *words)
    command.until(lambda: lines(out) >= 3)
    os.killpg(command.pid, signal.SIGINT)
    assert command.wait() == 130
    saved = len(list(read_episodes(out)))
    assert command.err.splitlines()[-1] == (
        f"agentrl: stopped, {saved} episodes are saved in e.jsonl.zst; go on with the same command"
    )
    again = evaluate(server, tmp_path, bare, "--tasks", "5", "--out", "e.jsonl.zst")
    assert again.wait() == 0 and len(list(read_episodes(out))) == max(saved, 5), "what was not asked for stays"


def test_a_split_of_fewer_tasks_says_so(server: Server, bare: Path, tmp_path: Path) -> None:
    (tmp_path / "finite.py").write_text(FINITE)
    (tmp_path / "finite.toml").write_text("[env]\nid = 'finite:test/Finite-v0'\n[rollout]\nturn_tokens = 5\n")
    words = ("eval", str(bare), "--config", "finite.toml", "--json", "--tasks")
    command = server.start(tmp_path, *words, "1000")
    assert command.wait() == 0 and command.err == "the split 'test' has 6 tasks, not 1000\n"
    assert json.loads(command.out)["tasks"] == 6
    command = server.start(tmp_path, *words, "6")
    assert command.wait() == 0 and command.err == ""
