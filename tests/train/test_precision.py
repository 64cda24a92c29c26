"""``model.dtype`` is the type of computation: what is trained and saved is float32, so that small steps add up."""

import asyncio
import copy
from typing import Any

import pytest
import torch

from agentrl.batch import whole
from agentrl.engines.base import Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.models.load import ROUNDING, cast_copy
from agentrl.models.tiny import make_model
from agentrl.train.score import score
from agentrl.types import Group, Segment

from ..engines.asking import ragged, together
from .conftest import Make, trajectory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_steps_change_nearly_every_weight(small: Make, dtype: str) -> None:
    """In bfloat16 an update of 1e-6 moves one weight in fifty: the others are too large to feel it."""
    made = small(f"model.dtype={dtype}", "optim.lr=1e-6", "optim.warmup=0", "rollout.temperature=1.0")
    engine = TransformersEngine(cast_copy(made.parts.model, getattr(torch, dtype)), slots=12, max_length=256)
    trainer = made.on(engine).trainer()
    before = copy.deepcopy(dict(made.parts.model.named_parameters()))
    for number in (1, 2):
        result = asyncio.run(trainer.step(number))
        assert result.metrics["grad_norm"] > 0
    moved = total = coarse = 0
    for name, weights in made.parts.model.named_parameters():
        assert weights.dtype == torch.float32
        seen = weights.grad is None and trainer.learner.optimizer.state[weights]["exp_avg"] != 0
        moved += int(((weights != before[name]) & seen).sum())
        total += int(seen.sum())
        coarse += int((weights.bfloat16() != before[name].bfloat16()).sum())
    assert moved > 0.99 * total > 0.9 * 0.99 * sum(weights.numel() for weights in before.values())
    assert coarse < 0.2 * total, "bfloat16 alone would show these steps: they are no test of it"
    # The engine samples from what was trained.
    sampled = dict(engine._model.named_parameters())
    assert all(torch.equal(sampled[name], w.to(sampled[name].dtype)) for name, w in made.parts.model.named_parameters())


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_engine_and_trainer_are_as_near_as_measured(tokenizer: Any, dtype: torch.dtype, largest: float) -> None:
    """The figures beside ``ROUNDING``, on a model as it is initialised, at another temperature than 1."""
    model = make_model(tokenizer, hidden=64, layers=4, heads=4, seed=0)
    engine = TransformersEngine(cast_copy(model, dtype), slots=16, max_length=256)
    assert engine.rounding == ROUNDING[dtype] >= 5 * largest, "the check must stay silent on rounding alone"
    prompts = ragged(16)
    done = together(*(engine.generate(one, Sampling(temperature=0.7, max_tokens=64), seed=1) for one in prompts))
    said = (Segment("policy", one.token_ids, one.logprobs, 0) for one in done)
    told = (Segment("prompt", one) for one in prompts)
    batch = whole([Group((trajectory(*segments),)) for segments in zip(told, said, strict=True)])
    with torch.no_grad():
        apart = score(model, batch, temperature=0.7, dtype=dtype).logp.double() - batch.sampler_logp
    assert float(apart.abs().max()) < largest
    # No bias: errors of a row add up as independent ones, √n times that of a token.
    assert abs(float(apart.mean())) < 4 * float(apart.std()) / len(apart) ** 0.5
