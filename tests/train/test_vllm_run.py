"""Runs with vLLM as their engine: steps of the quickstart, and some that are played while the trainer learns."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.runs.folder import read_jsonl
from agentrl.runs.records import read_episodes
from agentrl.runs.settings import read_config

from ..conftest import python
from .conftest import setting

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
Require = Callable[[bool, str], None]


def trained(require: Require, folder: Path, *settings: str) -> Path:
    """The folder of a run of the quickstart with vLLM, whose log-probs the trainer has found to be its own."""
    require(importlib.util.find_spec("vllm") is not None, "needs vLLM: pip install 'agentrl[vllm]'")
    words = setting("engine.name=vllm", "engine.options.memory=0.1", "eval.every=0", *settings)
    done = python("-m", "agentrl", "train", "--preset", "quickstart", "--name", "it", *words, folder=folder)
    assert done.stdout == "runs/it\n", done.stderr
    run = folder / "runs" / "it"
    rows = read_jsonl(run / "metrics.jsonl")
    assert len(rows) == read_config(run).optim.steps
    assert all(row["logp_diff_max"] < 1e-4 and row["groups_lost"] == 0 for row in rows)
    return run


def test_the_quickstart_learns_with_vllm(require: Require, tmp_path: Path) -> None:
    # vLLM's kernels for a CPU know no heads narrower than 32.
    run = trained(require, tmp_path, "model.tiny.heads=4", "optim.steps=20")
    begin, *_, end = [row["success"] for row in read_jsonl(run / "evals.jsonl")]
    assert end > max(0.85, begin + 0.05)
    (record, *_) = read_episodes(run / "episodes" / "step-000020.jsonl.zst")
    assert record.trajectory.sampled[0].versions == (19,)


@pytest.mark.parametrize("mode", ["lag", "inflight"])
def test_steps_are_played_while_the_trainer_learns(require: Require, tmp_path: Path, mode: str) -> None:
    # It knows nothing and wins nothing: the entropy's gradient makes each version of its weights another one.
    run = trained(
        require, tmp_path, f"rollout.overlap={mode}", "algo.entropy_coef=1.0", "model.tiny.hidden=64",
        "model.tiny.heads=2",
        "env.id=agentrl/Countdown-v0", "env.args={tool=false}", "rollout.episode_tokens=400", "sft.steps=0",
        "eval.tasks=4", "optim.steps=6", "save.episodes_every=1",
    )  # fmt: skip
    played = [read_episodes(path) for path in sorted((run / "episodes").glob("step-*"))]
    steps = [
        [{version for turn in record.trajectory.sampled for version in turn.versions} for record in records]
        for records in played
    ]
    for step, versions in enumerate(steps):
        assert set().union(*versions) <= {step - 1, step}, "of the step's own weights, or those before them"
    assert any(step - 1 in versions for step, episodes in enumerate(steps) for versions in episodes if step)
    if mode == "lag":
        assert all(len(versions) == 1 for episodes in steps for versions in episodes), "nothing is sampled meanwhile"
