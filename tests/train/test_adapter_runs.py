"""Runs that train adapters or keep an average: they go on exactly, and every reader of checkpoints sees their model."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.cli import main
from agentrl.config import Config, with_overrides
from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import RunFolderError, UsageError
from agentrl.eval.command import EvalRequest
from agentrl.eval.command import run as evaluate
from agentrl.models.load import load_model
from agentrl.models.lora import base_of
from agentrl.runs.checkpoint import export, model_at
from agentrl.runs.folder import checkpoints, read_jsonl
from agentrl.runs.shards import Shards, shard_name
from agentrl.train.learner import Learner
from agentrl.train.run import resume, train

from .conftest import OnDisk, quiet, rows_of

LORA = ("lora.rank=2", "lora.alpha=8", "optim.average=0.5", "optim.lr=1e-2", "algo.kl_coef=0.1")
ONE = shard_name(0, 1)
TINY = "model.tiny={hidden=32,heads=2,layers=2}"
OWN = ("model.path=''", TINY, "sft.steps=2", "sft.episodes=4")


@pytest.fixture
def config(on_disk: OnDisk) -> Config:
    return on_disk("optim.steps=3", "save.every=1", "eval.tasks=2", "run.deterministic=true", *LORA)


def tensors(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint that hold weights or moments."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.safetensors")}


def check_goes_on(whole: Path, after: int, *overrides: str) -> None:
    """The run, cut back to the checkpoint of step ``after`` and moved, ends as it did."""
    other = shutil.copytree(whole, whole.with_name(f"cut-{after}"))
    for path in checkpoints(other)[after + 1 :]:
        shutil.rmtree(path)
    resume(other, quiet(), overrides)
    assert rows_of(other) == rows_of(whole) and len(rows_of(whole)) == 3
    assert [row["kl_reference"] > 1e-3 for row in rows_of(other)] == [False, True, True]
    assert rows_of(other, "evals.jsonl") == rows_of(whole, "evals.jsonl")
    for one, again in zip(checkpoints(whole), checkpoints(other), strict=True):
        assert tensors(one) == tensors(again), one.name
    shutil.rmtree(other)


def check_readers(run: Path) -> None:
    """The run's own last evaluation is that of its checkpoint, and of what is exported."""
    last = read_jsonl(run / "evals.jsonl")[-1]
    assert main(["export", str(run), "whole"]) == 0
    settings = ("eval.tasks=2",)
    for path, config in ((run, None), (checkpoints(run)[-1], None), (Path("whole"), Path("small.toml"))):
        (found,) = evaluate(EvalRequest(path=str(path), config=config, overrides=settings if config else ()), quiet())
        row = found.whole.row()
        assert {name: last[name] for name in row} == row, path
    exported, own = AutoModelForCausalLM.from_pretrained("whole"), load_model(checkpoints(run)[-1])
    weights = dict(exported.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in own.named_parameters())
    assert AutoTokenizer.from_pretrained("whole").chat_template
    with pytest.raises(UsageError, match=r"'whole' can't be made .*: name another one"):
        export(str(run), Path("whole"), "float32", print)
    assert main(["export", str(run), "half", "--dtype", "bfloat16"]) == 0
    assert AutoModelForCausalLM.from_pretrained("half").dtype == torch.bfloat16


@pytest.mark.slow
def test_adapters_beside_a_model_of_ones_own(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learner, "keep_reference", None)  # which would copy the model
    run = train(config, quiet())
    for path in checkpoints(run):
        held = {file.name for file in path.iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "optimizer"} < held
        assert not {"config.json", "model.safetensors"} & held and base_of(path) == str(Path("model").resolve())
    # Fresh ones first, then others: the average of what was trained, which is saved beside it.
    names = [" ".join(Shards(path / "optimizer").names) for path in checkpoints(run)]
    assert [".trained" in held for held in names] == [False, True, True, True]
    check_goes_on(run, 0)
    check_goes_on(run, 2, "optim.gradient_checkpointing=true")
    check_readers(run)
    # Trained beside other weights they would be another policy: neither resumed nor evaluated.
    other = AutoModelForCausalLM.from_pretrained("model")
    other.model.norm.weight.data += 0.01
    other.save_pretrained("model")
    shutil.rmtree(checkpoints(run)[-1])
    for again in (lambda: resume(run), lambda: evaluate(EvalRequest(path=str(run)))):
        with pytest.raises(UsageError, match="trained beside other weights than"):
            again()


@pytest.mark.slow
def test_adapters_after_a_warm_start_of_the_whole_model(config: Config) -> None:
    config = with_overrides(config, [*OWN, "model.dtype=bfloat16"])
    run = train(config, quiet())
    first, *later = checkpoints(run)
    assert "model.safetensors" in tensors(first), "the adapters' base: it is nowhere else"
    assert all(set(tensors(path)) == {"adapter_model.safetensors", f"optimizer/{ONE}"} for path in later)
    assert {base_of(path) for path in later} == {str(first.resolve())}
    check_goes_on(run, 0)
    check_goes_on(run, 1)
    # A new run can begin where this one ended; its own adapters belong to the merged model then.
    config = with_overrides(config, ["run.name=next", f"model.path={run}", "sft.steps=0", "optim.steps=1"])
    onward = train(config, quiet())
    merged, begun = (dict(load_model(path).named_parameters()) for path in (later[-1], checkpoints(onward)[0]))
    assert all(torch.equal(weight, begun[name]) for name, weight in merged.items())
    assert base_of(checkpoints(onward)[-1]) == str(checkpoints(onward)[0].resolve())
    # A bit of the base is a bit of all: no checkpoint is whole any more.
    data = (first / "model.safetensors").read_bytes()
    (first / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    told = r"step-000003 has the adapters of .*step-000000, which holds another model"
    with pytest.raises(RunFolderError, match=told):
        model_at(str(run), print)


@pytest.mark.slow
def test_weights_are_averaged_for_evaluation_alone(config: Config) -> None:
    config = with_overrides(config, ["lora.rank=0", "eval.every=1", "save.episodes_every=1"])
    load, seen = TransformersEngine.load_weights, dict[int, set[float]]()

    async def noting(self: Any, named_tensors: Any, version: int) -> None:
        tensors = list(named_tensors)
        seen.setdefault(version, set()).add(sum(float(one.detach().double().sum()) for _, one in tensors))
        await load(self, tensors, version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersEngine, "load_weights", noting)
        averaged = train(config, quiet())
    assert min(seen) < -1 and all(len(sums) == 1 for sums in seen.values()), "a version names one set of weights"
    plain = train(with_overrides(config, ["optim.average=0.0", "run.name=plain"]))
    assert rows_of(averaged) == rows_of(plain), "training does not see it"
    check_goes_on(averaged, 1)
    one, other = (dict(load_model(checkpoints(run)[-1]).named_parameters()) for run in (averaged, plain))
    assert not any(torch.equal(weight, other[name]) for name, weight in one.items())
    check_readers(averaged)


def test_layers_that_are_not_there_are_refused_before_anything_is_written(config: Config) -> None:
    with pytest.raises(UsageError, match=r"lora.targets names no linear layer 'q_prj'; did you mean 'q_proj'"):
        train(with_overrides(config, [*OWN, 'lora.targets=["q_prj"]']))
    assert not Path("runs").exists()
