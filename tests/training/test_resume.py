"""A run that goes on: every step after is the step of a run that never stopped, to the version of its weights."""

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from agentrl.config import load_config
from agentrl.display import Display
from agentrl.pipeline import resume, train
from agentrl.records import read_episodes
from agentrl.runfolder import checkpoints

from .conftest import SMALL, rows_of, weights_of


@pytest.mark.usefixtures("shout")
def test_steps_after_a_resumption_are_those_of_a_run_that_never_stopped(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "small.toml").write_text(SMALL)
    settings = [
        *("model.path=model", "optim.steps=3", "save.every=1", "save.episodes_every=1", "eval.tasks=1"),
        *("rollout.concurrency=1", "optim.schedule=linear", "optim.warmup=6", "optim.max_sampled_tokens=400"),
    ]
    display = Display(Console(file=io.StringIO()))
    whole = train(load_config(path="small.toml", overrides=settings), display)
    other = shutil.copytree(whole, whole.with_name("other"))
    for checkpoint in checkpoints(other)[2:]:
        shutil.rmtree(checkpoint)
    resume(other, display)
    torch.set_num_threads(threads)
    assert rows_of(whole) == rows_of(other)
    assert len(rows_of(whole)) == 3
    for step in (1, 2, 3):
        one, again = (
            [record.trajectory.segments for record in read_episodes(run / "episodes" / f"step-{step:06d}.jsonl.zst")]
            for run in (whole, other)
        )
        assert one == again
        assert {part.version for segments in again for part in segments if part.trained} == {step - 1}
    before, after = weights_of(whole), weights_of(other)
    assert all(torch.equal(before[name], after[name]) for name in before)
