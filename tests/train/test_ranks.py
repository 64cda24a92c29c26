"""The processes of a run with several ranks: it is a run on one, whatever becomes of them."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from agentrl.config import parse_config
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.models.load import load_model
from agentrl.models.lora import base_of
from agentrl.runs.folder import checkpoints
from agentrl.train.ranks import check_ranks, is_follower, ranks

from ..forked import Command, Server, is_alive
from .conftest import ARITHMETIC, TOY, rows_of, setting
from .test_sharded import apart


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"run": {"ranks": [4, 3]}}, r"run.ranks=\[4, 3\]: the second must divide the first"),
        ({"run": {"ranks": 2}, "model": {"device": "cuda:1"}}, "set model.device='cuda', not 'cuda:1'"),
    ],
)
def test_settings_that_ranks_cannot_follow(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_ranks(parse_config(settings))


def test_other_processes_than_the_run_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert is_follower()
    with pytest.raises(ConfigError, match=r"4 processes were started together, .*: set run.ranks=4"):
        check_ranks(parse_config({}))


def test_rank_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    words = "rank 1 has ended: it said nothing; the run goes on from its last checkpoint"
    with pytest.raises(InfrastructureError, match=words), ranks(parse_config({"run": {"ranks": 2}})):
        pass


def test_rank_that_is_killed_before_it_has_joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (killed := tmp_path / "killed").write_text(
        '#!/bin/sh\nfolder=$(dirname "${AGENTRL_RANKS#file://}")\ntouch "$folder/1.ready"\nkill -9 $$\n'
    )
    killed.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(killed))
    words = "rank 1 was killed by SIGKILL; the run goes on from its last checkpoint"
    with pytest.raises(InfrastructureError, match=words), ranks(parse_config({"run": {"ranks": 2}})):
        pass


@pytest.fixture
def start(server: Server, tmp_path: Path) -> Callable[..., Command]:
    """Start ``agentrl train`` with a toy environment: ``start("name", "run.ranks=2")``."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "run.toml").write_text(ARITHMETIC)
    settings = ("env.id='toy:test/Toy-v0'", "sft.steps=2", "sft.tasks=8", "optim.average=0.5", "algo.kl_coef=0.1")
    settings += ("rollout.concurrency=6", "rollout.turn_tokens=8", "eval.tasks=1")

    def begin(name: str, *overrides: str) -> Command:
        return server.start(tmp_path, "train", "run.toml", "--name", name, *setting(*settings, *overrides))

    return begin


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [(), pytest.param(("lora.rank=2", "lora.alpha=8"), marks=pytest.mark.ci)])
def test_whole_run_on_two_ranks_is_that_on_one(
    start: Callable[..., Command], server: Server, tmp_path: Path, adapters: tuple[str, ...]
) -> None:
    start("one", "optim.steps=3", *adapters).done()
    command = start("two", "optim.steps=2", "run.ranks=2", *adapters).done()
    assert command.out == "runs/two\n" and command.err.count("step 0 (") == 1
    server.start(tmp_path, "train", "--resume", "runs/two", *setting("optim.steps=3", "run.ranks=1")).done()
    one, two = (rows_of(tmp_path / "runs" / name) for name in ("one", "two"))
    assert len(one) == len(two) == 3 and all(row["grad_norm"] > 0 for row in one)
    for mine, wanted in zip(two, one, strict=True):
        # What rows share is computed once in a pack, and two ranks have other packs.
        assert mine.pop("update_flops") > 0 < wanted.pop("update_flops")
        assert mine == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    weights = [load_model(checkpoints(tmp_path / "runs" / name)[-1]).state_dict() for name in ("one", "two")]
    assert weights[0].keys() == weights[1].keys() and apart(weights[1], weights[0]) < 1e-3
    if adapters:
        last = checkpoints(tmp_path / "runs" / "two")[1]
        base = AutoModelForCausalLM.from_pretrained(base_of(last) or "")
        peft = PeftModel.from_pretrained(base, last).merge_and_unload().state_dict()
        assert apart(peft, load_model(last).state_dict()) < 1e-6


@pytest.mark.slow
def test_two_ranks_play_ahead_as_one_does(start: Callable[..., Command], tmp_path: Path) -> None:
    short = ("optim.steps=3", "eval.every=0", "save.every=0")
    start("one", *short, "rollout.overlap=lag").done()
    start("two", *short, "rollout.overlap=lag", "run.ranks=2").done()
    start("flying", *short, "optim.average=0", "rollout.overlap=inflight", "run.ranks=2").done()
    one, two, flying = (rows_of(tmp_path / "runs" / name) for name in ("one", "two", "flying"))
    assert [[row["staleness_max"] for row in rows] for rows in (one, two)] == [[0, 1, 1]] * 2
    assert [row["reward_mean"] for row in two] == [row["reward_mean"] for row in one]
    assert [row["grad_norm"] for row in two] == pytest.approx([row["grad_norm"] for row in one], rel=1e-3)
    assert len(flying) == 3 and max(row["staleness_max"] for row in flying) <= 1


@pytest.mark.slow
def test_rank_that_is_killed_ends_the_run_which_goes_on_later(
    start: Callable[..., Command], server: Server, tmp_path: Path
) -> None:
    command = start("it", "optim.steps=100000", "run.ranks=3", "eval.every=0")
    metrics = tmp_path / "runs" / "it" / "metrics.jsonl"
    command.until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    ranks = command.descendants()
    assert len(ranks) == 2
    os.kill(max(ranks), signal.SIGKILL)
    assert command.wait() == 1 and not any(map(is_alive, ranks))
    assert "rank 2 was killed by SIGKILL; the run goes on from its last checkpoint" in command.err.splitlines()[-1]
    server.start(tmp_path, "train", "--resume", "runs/it", *setting("optim.steps=2", "run.ranks=1")).done()
