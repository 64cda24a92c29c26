"""Checkpoints: transformers loads them, a kill leaves whole ones only, and damaged ones are passed over by name."""

import copy
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.config import load_config
from agentrl.errors import RunFolderError, UsageError
from agentrl.runs.checkpoint import damage, load_optimizer, load_state, model_at, newest, save_checkpoint
from agentrl.runs.folder import checkpoints, numbered
from agentrl.runs.shards import Shards, shard_name, write_shards

from ..forked import Server

Save = Callable[[Path, int], None]


def state(step: int) -> dict[str, object]:
    return {"step": step, "updates": 2 * step, "records": {}}


def trained(model: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A copy of the model and its optimizer after one update."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-3)
    sum(weights.square().sum() for weights in own.parameters()).backward()
    optimizer.step()
    return own, optimizer


def held_by(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """An optimizer's state."""
    return {f"{index}.{kind}": data for index, own in enumerate(optimizer.state.values()) for kind, data in own.items()}


def written(optimizer: torch.optim.Optimizer) -> Callable[[Path], None]:
    """What writes an optimizer's state into a folder."""
    held = held_by(optimizer)
    return lambda folder: write_shards(folder, held)


def test_transformers_loads_it(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    own, optimizer = trained(model)
    path = tmp_path / "run" / "checkpoints" / "step-000007"
    save_checkpoint(path, own, tokenizer, optimizer=written(optimizer), state=state(7))
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(weights, loaded.state_dict()[name]) for name, weights in own.state_dict().items())
    again = AutoTokenizer.from_pretrained(path)
    chat = [{"role": "user", "content": "What is 12 + 30? <|im_end|> é"}]
    assert again.apply_chat_template(chat)["input_ids"] == tokenizer.apply_chat_template(chat)["input_ids"]
    assert again.eos_token_id == tokenizer.eos_token_id
    assert load_state(path) == state(7)
    restored: dict[str, Any] = {}
    load_optimizer(path, lambda folder: restored.update(load_file(folder / shard_name(0, 1))))
    for number, mine in enumerate(optimizer.state.values()):
        assert all(torch.equal(moment, restored[f"{number}.{kind}"]) for kind, moment in mine.items())
    sums = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=path, capture_output=True)
    assert (sums.returncode, sums.stdout) == (0, b"")
    assert checkpoints(tmp_path / "run") == [path] and [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.fixture
def save(model: Any, tokenizer: Any) -> Save:
    return lambda path, step: save_checkpoint(path, model, tokenizer, state=state(step))


def test_a_checkpoint_replaces_rubbish_alone(save: Save, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    path, killed = tmp_path / "step-000001", tmp_path / ".step-000001.tmp"
    (killed / "deep").mkdir(parents=True)
    save(path, 1)
    assert not (path / "deep").exists() and not killed.exists()
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    save_checkpoint(path, trained(model)[0], tokenizer, state=state(2))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_other_folders_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is no checkpoint of a run"):
        load_state(tmp_path)
    for text in ("{", "{}", "[]", '{"step": 1}', '{"step": null, "updates": 1}', '{"step": 1e999}', "[" * 200_000):
        (tmp_path / "trainer.json").write_text(text)
        with pytest.raises(RunFolderError, match="is no checkpoint of a run"):
            load_state(tmp_path)


@pytest.mark.parametrize("name", ["{away}", "../away", "pipe"])
def test_checksums_of_other_files_are_not_computed(tmp_path: Path, name: str) -> None:
    (path := tmp_path / "step-000001").mkdir()
    # Who opens a pipe waits for a writer.
    for pipe in (tmp_path / "away", path / "pipe"):
        os.mkfifo(pipe)
    (path / "SHA256SUMS").write_text(f"{'0' * 64}  {name.format(away=tmp_path / 'away')}\n")
    assert damage(path).startswith("lacks the file ")


def test_adapters_that_are_their_own_base(tmp_path: Path) -> None:
    mine, other = paths = [tmp_path / f"step-{step:06d}" for step in (1, 2)]
    for path, base in zip(paths, (other, mine), strict=True):
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
        sum_ = hashlib.sha256((path / "adapter_config.json").read_bytes()).hexdigest()
        (path / "SHA256SUMS").write_text(f"{sum_}  adapter_config.json\n")
    assert damage(mine).endswith(f"has adapters that belong to {mine}, which has its own from there")


SAVE_FOR_EVER = """
import sys
from pathlib import Path
import torch
from agentrl.runs.checkpoint import save_checkpoint
from agentrl.runs.shards import write_shards

model, tokenizer, held = torch.load(sys.argv[1], weights_only=False)
for step in range(1, 10_000):
    state = {"step": step, "updates": 2 * step, "records": {}}
    path = Path(sys.argv[2], f"step-{step:06d}")
    save_checkpoint(path, model, tokenizer, optimizer=lambda folder: write_shards(folder, held), state=state)
"""


def check_passed_over(run: Path, *words: str) -> None:
    """The newest is not taken but the one before it, and the reason is told; by its own name it is refused."""
    warnings: list[str] = []
    *_, before, last = numbered(run)
    assert newest(run, warnings.append) == (before, [last])
    assert model_at(str(before), warnings.append) == str(before)
    assert len(warnings) == 1 and all(word in warnings[0] for word in (last.name, before.name, *words)), warnings
    if last.is_dir():
        with pytest.raises(RunFolderError, match=f"{last.name}' .*: name another one, or put an intact copy back"):
            model_at(str(last), warnings.append)


def check_damage_is_found(run: Path) -> None:
    """Each file of the newest checkpoint in turn: one bit of it other, its end cut off, or all of it gone."""
    last = checkpoints(run)[-1]
    for file in sorted(file for file in last.rglob("*") if file.is_file()):
        data = file.read_bytes()
        middle = len(data) // 2
        for broken in (data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :], data[:-9], b"", None):
            file.unlink()
            if broken is not None:
                file.write_bytes(broken)
            # A list that lacks a name is known by the file that is not on it.
            check_passed_over(run, *([file.name] if file.name != "SHA256SUMS" else []))
        file.write_bytes(data)
    assert newest(run, lambda _: None) == (last, [])


Spoil = Callable[[Path, Path], object]
NINTH = "step-000009"
SPOILED: list[tuple[Spoil, str]] = [
    (lambda older, two: shutil.copy(older / "trainer.json", two), "another trainer.json"),
    (lambda older, two: (two / "adapter_config.json").write_text("{}"), "another adapter_config.json"),
    (lambda older, two: shutil.copytree(older, two.with_name(NINTH)), f"{NINTH} is of step-000001"),
    (lambda older, two: two.with_name(NINTH).mkdir(), f"{NINTH} can't be read"),
    (lambda older, two: two.with_name(NINTH).write_text("x"), f"{NINTH} can't be read"),
    (lambda older, two: two.with_name(NINTH).symlink_to("nowhere"), f"{NINTH} can't be read"),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILED)
def test_what_was_not_saved_there_is_passed_over(save: Save, tmp_path: Path, spoil: Spoil, words: str) -> None:
    saved = [tmp_path / "checkpoints" / f"step-{step:06d}" for step in (1, 2)]
    for step, path in enumerate(saved, start=1):
        save(path, step)
    spoil(*saved)
    check_passed_over(tmp_path, words)


def test_one_without_checksums_or_optimizer_is_refused(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step-000001"
    save_checkpoint(path, model, tokenizer, state={"step": 1, "updates": 2})
    with pytest.raises(RunFolderError, match=r"optimizer can't be read .*: put an intact copy back"):
        load_optimizer(path, Shards)
    (path / "SHA256SUMS").unlink()
    with pytest.raises(RunFolderError, match="has no SHA256SUMS"):
        model_at(str(path), print)


def test_a_preset_without_its_model_names_the_script(here: Path) -> None:
    path = load_config(preset="smollm2-135m").model.path
    with pytest.raises(UsageError, match=rf"no folder '{path}' here: scripts/get_smollm2.sh of the repository makes"):
        model_at(path, print)


@pytest.mark.slow
def test_killed_at_any_instant_leaves_whole_ones(server: Server, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    own, optimizer = trained(model)
    torch.save((own, tokenizer, held_by(optimizer)), tmp_path / "all.pt")
    whole: set[str] = set()
    chance = random.Random(0)
    for attempt in range(8):
        folder = tmp_path / str(attempt) / "checkpoints"
        saving = server.begin("-c", SAVE_FOR_EVER, tmp_path / "all.pt", folder, cwd=tmp_path)
        saving.until(lambda at=folder, least=0 if attempt else 2: at.exists() and len(checkpoints(at.parent)) >= least)
        time.sleep(0.01 + chance.random() * 0.15)
        os.kill(saving.pid, signal.SIGKILL)
        assert saving.wait() == -signal.SIGKILL
        saved = checkpoints(folder.parent)
        assert [load_state(path)["step"] for path in saved] == list(range(1, len(saved) + 1))
        for path in saved:
            whole |= {file.name for file in path.rglob("*")}
            assert {file.name for file in path.rglob("*")} == whole
        if attempt == 0:
            check_damage_is_found(folder.parent)
    last = saved[-1] if saved else checkpoints(tmp_path / "0")[-1]
    loaded = AutoModelForCausalLM.from_pretrained(last).state_dict()
    assert all(torch.equal(weights, loaded[name]) for name, weights in own.state_dict().items())
