"""What a run will need, against what it takes: counted on real models, and as the peak of fresh processes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import Config, load_config, with_overrides
from agentrl.models.cache import key_sizes
from agentrl.runs.assemble import adapt, assemble, model_config, task_source
from agentrl.train import memory
from agentrl.train.memory import needs
from agentrl.train.probe import Costs, Plane, _Live, _pack, _Probe, _small, measure
from agentrl.train.step import make_learner

from .conftest import setting

pytestmark = pytest.mark.usefixtures("one_thread")


def sized(hidden: int, layers: int, heads: int, episode_tokens: int) -> list[str]:
    shape = {"hidden": hidden, "layers": layers, "heads": heads}
    settings = [f"model.tiny.{name}={size}" for name, size in shape.items()]
    return [*settings, f"rollout.episode_tokens={episode_tokens}", "run.threads=1", "rollout.concurrency=4"]


def small(*overrides: str) -> Config:
    return load_config(overrides=[*sized(32, 3, 4, 64), "rollout.turn_tokens=32", *overrides])


def test_plane_by_hand() -> None:
    # 10 + 3 a layer + 0.5 a token + 0.25 a layer and token.
    def value(layers: float, tokens: float) -> float:
        return 10 + 3 * layers + 0.5 * tokens + 0.25 * layers * tokens

    plane = Plane(corners=(value(1, 8), value(1, 16), value(2, 8), value(2, 16)), tokens=8)
    for layers, tokens in ((1, 8), (2, 16), (36, 9024), (1.5, 0)):
        assert plane.at(layers, tokens) == pytest.approx(value(layers, tokens))
    noisy = Plane(corners=(1.0, 1.0, 0.5, 0.5), tokens=8)
    assert noisy.at(4, 8) == 0.5 and noisy.at(30, 800) == 375, "noise gives no seconds that do not grow with the work"
    assert Plane(corners=(1.0, 3.0, 2.0, 6.0), tokens=8).at(1, 2) == 0.25, "nor negative ones for less work"


def test_live_bytes_by_hand(model: Any) -> None:
    with _Live(model) as live:
        first = torch.ones(1000)
        view = first[10:].add_(1.0)
        second = first * 2 + view.sum()
        del first, view
        third = torch.ones(100)
        weight = torch.zeros(32, 32)
    # first, first * 2 and its sum with a number, which is 4 bytes, are there at once; a weight's shape is not counted.
    assert live.peak == 3 * 4000 + 4
    assert len(second) + len(third) + len(weight) > 0


LORA, ONE_LAYER = "lora.rank=4", "model.tiny.layers=1"


@pytest.mark.parametrize(
    "more", [[], ["model.dtype=bfloat16"], ["optim.max_tokens=64"], [LORA], [LORA, "sft.steps=1"], [ONE_LAYER]]
)
def test_activations_of_another_model_and_a_longer_pack_are_foretold(more: list[str], tokenizer: Any) -> None:
    config = small("model.tiny.layers=5", *more)
    layers, shape = config.model.tiny["layers"], model_config(config, tokenizer)
    costs = measure(config, shape, "cpu")
    measured = _Probe(config, _small(shape, layers, "cpu")).activations(487)
    assert costs.activations.at(layers, 487) == pytest.approx(measured, rel=0.02)
    again = with_overrides(config, ["optim.gradient_checkpointing=true"])
    measured_again = _Probe(again, _small(shape, layers, "cpu")).activations(487)
    assert costs.recomputed and costs.recomputed.at(layers, 487) == pytest.approx(measured_again, rel=0.02)
    assert measured_again < 0.7 * measured or layers == 1


@pytest.mark.usefixtures("costs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [[], [LORA], [LORA, 'lora.targets=["q_proj", "down_proj"]']])
def test_counts_are_those_of_the_real_parts(dtype: str, lora: list[str]) -> None:
    config = small(
        f"model.dtype={dtype}", "optim.average=0.9", "algo.kl_coef=0.1", "engine.options.native=false", *lora
    )
    source = task_source(config, "train")
    parts = assemble(config, source)
    if lora:
        adapt(config, parts.model, base="base", saved=None)
    found = needs(config, model_config(config, parts.tokenizer)).memory
    learner = make_learner(config, parts.model)
    if not lora:
        learner.keep_reference()
    seen: list[int] = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.extend(one.grad.nbytes for one in learner.trained))
    learner.update([_pack(config, 20)], lambda _, stats: stats.logp.sum(), 1e-3)
    moments = [part for state in learner.optimizer.state.values() for part in state.values() if part.ndim]
    assert found["weights"] == sum(weight.nbytes for weight in parts.model.parameters())
    assert found["gradients"] == sum(seen)
    assert found["optimizer"] == sum(part.nbytes for part in moments)
    assert found["average"] == sum(part.nbytes for part in learner._average)
    reference = learner._reference.parameters() if learner._reference else ()
    assert found["reference"] == sum(one.nbytes for one in reference)
    assert found["engine's weights"] == sum(weight.nbytes for weight in parts.engine._compute._model.parameters())
    # 4 rows of padded keys, 3 layers, keys and values, 2 heads of 8 numbers.
    assert found["engine's cache"] == 4 * key_sizes()[0] * 3 * 2 * 2 * 8 * (4 if dtype == "float32" else 2)
    rest = {"process", "engine's cache", "head", "activations", "allocator"}
    assert set(found) == rest | {"weights", "gradients", "optimizer", "average", "reference", "engine's weights"}
    if lora:
        taught, whole = (
            needs(with_overrides(config, [other]), model_config(config, parts.tokenizer)).memory["optimizer"]
            for other in ("sft.steps=1", "lora.rank=0")
        )
        assert taught == whole > 4 * found["optimizer"], "a warm start trains all weights"


FLAT = Plane(corners=(1000.0, 2000.0, 2000.0, 4000.0), tokens=100)
"""10 bytes, or seconds, a layer and token."""


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Costs(activations=FLAT, recomputed=None, score=FLAT, update=FLAT, generate=FLAT, rows=4)
    monkeypatch.setattr(memory, "measure", lambda *_: known)
    monkeypatch.setattr(memory, "_resident", lambda: 100_000_000)


@pytest.mark.usefixtures("costs")
def test_step_by_hand(tokenizer: Any) -> None:
    config = small("rollout.tasks=2", "rollout.group_size=8", "optim.minibatches=4", "optim.epochs=2")
    found = needs(config, model_config(config, tokenizer))
    assert found.tokens == 2 * 8 * 64
    # 3 layers: 1024 tokens of 4 rows, 1024 of a batch, and eight updates by a quarter of it.
    assert found.seconds == {"generate": 10 * 3 * 256, "score": 10 * 3 * 1024, "update": 8 * 10 * 3 * 256}
    assert found.memory["activations"] == 10 * 3 * 8192 and found.memory["process"] == 100_000_000 + memory._LATER
    assert found.total == sum(found.memory.values()) and found.limit and found.remedy == ""


@pytest.mark.usefixtures("costs")
@pytest.mark.parametrize(
    ("less", "overrides", "wanted"),
    [
        (0, [], ""),
        (10, [], "optimizer is the first that does not fit; all fits with optim.max_tokens=4096"),
        (450_000, [], "is the first that does not fit; all fits with optim.max_tokens=512"),
        (518_000, [], "all fits with optim.max_tokens=64 and rollout.concurrency=2"),
        (10, ["rollout.concurrency=4000"], "engine's cache is the first that does not fit; all fits with rollout.con"),
        (2_000_000, [], "and all does not even with optim.max_tokens=64 and rollout.concurrency=1: take a"),
    ],
)
def test_what_does_not_fit_and_what_makes_it_fit(less: int, overrides: list[str], wanted: str, tokenizer: Any) -> None:
    config = small(*overrides)
    shape = model_config(config, tokenizer)
    total = needs(config, shape).total
    if overrides:
        less = total - sum(list(needs(config, shape).memory.values())[:4]) + less
    remedy = needs(config, shape, total - less).remedy
    assert wanted in remedy if wanted else remedy == ""
    if "all fits with" in remedy:
        changed = small(*overrides, *remedy.partition("all fits with ")[2].split(" and "))
        assert needs(changed, shape, total - less).remedy == "", "the settings that it names do it"


@pytest.mark.parametrize(
    ("less", "wanted"),
    [
        (10, "all fits with optim.gradient_checkpointing=true"),
        (240_000, "all fits with optim.gradient_checkpointing=true and optim.max_tokens=4096"),
        (3_000_000, "concurrency=1: train adapters beside frozen weights, which fit with lora.rank=16, or take"),
        (90_000_000, "rollout.concurrency=1: take a smaller model"),
    ],
)
def test_what_is_learned_changes_last(
    less: int, wanted: str, tokenizer: Any, costs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small("model.tiny.hidden=256")
    less_kept = Plane(corners=(500.0, 1000.0, 1000.0, 2000.0), tokens=100)
    known = replace(memory.measure(config, model_config(config, tokenizer), "cpu"), recomputed=less_kept)
    monkeypatch.setattr(memory, "measure", lambda *_: known)
    shape = model_config(config, tokenizer)
    assert needs(config, shape, needs(config, shape).total - less).remedy.find(wanted) > 0


@pytest.mark.usefixtures("costs")
def test_vllm_takes_its_share_whatever_it_needs(tokenizer: Any) -> None:
    config = small("engine.name=vllm", "engine.options.memory=0.25")
    found = needs(config, model_config(config, tokenizer), 10**9).memory
    assert found["engine's weights"] + found["engine's cache"] == 25 * 10**7


@pytest.mark.usefixtures("costs")
def test_a_device_that_is_not_here_has_no_times_and_no_limit(tokenizer: Any) -> None:
    config = small("model.device=cuda:97")
    found = needs(config, model_config(config, tokenizer))
    assert found.seconds == {} and found.limit is None and found.remedy == ""
    assert found.memory["allocator"] == 0
    assert "does not fit" in needs(config, model_config(config, tokenizer), 1000).remedy


SHAPES = {
    "wide and shallow": [*sized(512, 2, 8, 256), "optim.max_tokens=2048"],
    "deep and narrow": [*sized(64, 24, 4, 256), "optim.max_tokens=2048"],
    "one long row": [*sized(128, 6, 4, 4096), "optim.max_tokens=4096"],
}
RUN = """
import asyncio, json, sys
import torch
from agentrl.batch import Batch
from agentrl.config import load_config
from agentrl.engines.base import Sampling
from agentrl.runs.assemble import adapt, assemble, task_source
from agentrl.train import run
from agentrl.train.step import make_learner

config = load_config(overrides=sys.argv[1:])
parts, longest = assemble(config, task_source(config, "train")), config.rollout.episode_tokens

async def play():
    prompts = [(5, 6, 7) * ((longest - 16 - row) // 3) for row in range(config.rollout.concurrency)]
    await asyncio.gather(*(parts.engine.generate(one, Sampling(max_tokens=8), seed=1) for one in prompts))

def pack(tokens):
    lengths, room = [], tokens
    while room:
        lengths.append(min(room, longest - 37 * len(lengths) % (longest // 8)))
        room -= lengths[-1]
    lengths = torch.tensor(lengths)
    row_starts, starts = (torch.nn.functional.pad(part.cumsum(0), (1, 0)) for part in (lengths, lengths // 2))
    positions = torch.arange(tokens) - torch.repeat_interleave(row_starts[:-1], lengths)
    sampled = torch.nonzero(positions >= torch.repeat_interleave(lengths - lengths // 2, lengths))[:, 0]
    zeros = torch.zeros(len(sampled))
    # Rows that begin alike would be computed once.
    tokens = (positions + positions.eq(0).cumsum(0)) % 200
    return Batch(tokens=tokens, positions=positions, row_starts=row_starts, sampled=sampled, starts=starts,
                 group=torch.arange(len(lengths)), rewards=zeros, sampler_logp=zeros, index=torch.arange(len(sampled)))

asyncio.run(play())
if config.lora.rank:
    adapt(config, parts.model, base="base", saved=None)
learner, most = make_learner(config, parts.model), config.optim.max_tokens
# The first makes the optimizer's state; a heap has the more holes the more different packs it has held.
for sizes in ([64], [most, most], [most * 7 // 8, most * 6 // 8, most], [most, most]):
    learner.update([pack(tokens) for tokens in sizes], lambda _, stats: stats.logp.mean(), 1e-4)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""
"""The parts of a step at their largest, in the real engine and the real learner."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [[], pytest.param(["lora.rank=8", "optim.gradient_checkpointing=true"], marks=pytest.mark.ci)]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "deep and narrow" else pytest.mark.ci) for name in SHAPES]
)
def test_memory_is_what_fresh_processes_take(tmp_path: Path, name: str, options: list[str]) -> None:
    overrides = [*SHAPES[name], *options]
    (path := tmp_path / "it.toml").write_text("")
    commands = ["-m", "agentrl", "plan", str(path), "--json", *setting(*overrides)], ["-c", RUN, *overrides]
    started = [subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) for command in commands]
    plan, run = (one.communicate()[0] for one in started)
    found, taken = json.loads(plan), int(run) * 1024
    print(name, found["total"] / 2**20, taken / 2**20, found["memory"]["process"] / 2**20)
    assert found["fits"] and taken > 1.3 * found["memory"]["process"], "the process itself is not all"
    assert found["total"] == pytest.approx(taken, rel=0.15), name
