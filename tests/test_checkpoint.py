"""Checkpoints: transformers loads them, and a kill leaves whole ones only."""

import contextlib
import copy
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from agentrl.checkpoint import load_optimizer, load_state, save_checkpoint
from agentrl.errors import RunFolderError
from agentrl.runfolder import checkpoints


def trained(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A copy of the model and its optimizer after one update."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)
    sum(weights.square().sum() for weights in own.parameters()).backward()
    optimizer.step()
    return own, optimizer


def test_transformers_loads_it(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    own, optimizer = trained(model)
    path = tmp_path / "run" / "checkpoints" / "step-000007"
    save_checkpoint(path, own, tokenizer, optimizer=optimizer, state={"step": 7})
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(weights, loaded.state_dict()[name]) for name, weights in own.state_dict().items())
    again = AutoTokenizer.from_pretrained(path)
    chat = [{"role": "user", "content": "What is 12 + 30? <|im_end|> é"}]
    assert again.apply_chat_template(chat)["input_ids"] == tokenizer.apply_chat_template(chat)["input_ids"]
    assert again.eos_token_id == tokenizer.eos_token_id
    assert load_state(path) == {"step": 7}
    fresh = torch.optim.AdamW(loaded.parameters(), lr=1.0)
    load_optimizer(path, fresh)
    for mine, theirs in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert fresh.param_groups[0]["lr"] == 1e-3
    assert checkpoints(tmp_path / "run") == [path] and [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_checkpoint_that_is_there_is_left_as_it_is(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "step-000001"
    save_checkpoint(path, model, tokenizer, state={"step": 1})
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    save_checkpoint(path, trained(model)[0], tokenizer, state={"step": 2})
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_rubbish_of_a_killed_save_is_no_obstacle(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / ".step-000001.tmp" / "deep").mkdir(parents=True)
    save_checkpoint(tmp_path / "step-000001", model, tokenizer, state={"step": 1})
    assert not (tmp_path / "step-000001" / "deep").exists() and not (tmp_path / ".step-000001.tmp").exists()


def test_other_folders_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is no checkpoint of a run"):
        load_state(tmp_path)
    (tmp_path / "trainer.json").write_text("{")
    with pytest.raises(RunFolderError, match="is no checkpoint of a run"):
        load_state(tmp_path)


def save_for_ever(folder: Path, model: Any, tokenizer: Any, optimizer: torch.optim.Optimizer) -> None:
    """What a child process does until it is killed."""
    # No progress bars: their lock is shared with this process, and killed while it holds it the child would keep it.
    disable_progress_bar()
    # The child must not run into pytest, whatever happens here.
    with contextlib.suppress(BaseException):
        for step in range(1, 10_000):
            save_checkpoint(folder / f"step-{step:06d}", model, tokenizer, optimizer=optimizer, state={"step": step})
    os._exit(1)


def test_killed_at_any_instant_leaves_whole_ones(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    own, optimizer = trained(model)
    whole: set[str] = set()
    chance = random.Random(0)
    for attempt in range(12):
        folder = tmp_path / str(attempt) / "checkpoints"
        pid = os.fork()
        if pid == 0:
            save_for_ever(folder, own, tokenizer, optimizer)
        while attempt == 0 and not checkpoints(folder.parent):
            time.sleep(0.001)
        time.sleep(0.01 + chance.random() * 0.15)
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        saved = checkpoints(folder.parent)
        assert [load_state(path)["step"] for path in saved] == list(range(1, len(saved) + 1))
        for path in saved:
            whole |= {file.name for file in path.iterdir()}
            assert {file.name for file in path.iterdir()} == whole
    last = saved[-1] if saved else checkpoints(tmp_path / "0")[-1]
    loaded = AutoModelForCausalLM.from_pretrained(last).state_dict()
    assert all(torch.equal(weights, loaded[name]) for name, weights in own.state_dict().items())
