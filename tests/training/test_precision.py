"""``model.dtype`` is the type of computation: what is trained and saved is float32, so that small steps add up."""

import asyncio
import copy
from dataclasses import replace

import pytest
import torch

from agentrl.engines.transformers import TransformersEngine
from agentrl.policy import cast_copy
from agentrl.trainer import Trainer

from .conftest import Make


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_small_steps_change_nearly_every_weight(small: Make, dtype: str) -> None:
    """In bfloat16 an update of 1e-6 moves one weight in fifty: the others are too large to feel it."""
    made = small(f"model.dtype={dtype}", "optim.lr=1e-6", "optim.warmup=0", "rollout.temperature=1.0")
    engine = TransformersEngine(cast_copy(made.parts.model, getattr(torch, dtype)), slots=12, max_length=256)
    trainer = Trainer(made.config, replace(made.parts, engine=engine), made.players)
    before = copy.deepcopy(dict(made.parts.model.named_parameters()))
    for number in (1, 2):
        result = asyncio.run(trainer.step(number))
        assert result.metrics["grad_norm"] > 0
    moved = total = coarse = 0
    for name, weights in made.parts.model.named_parameters():
        assert weights.dtype == torch.float32
        seen = weights.grad is None and trainer.optimizer.state[weights]["exp_avg"] != 0
        moved += int(((weights != before[name]) & seen).sum())
        total += int(seen.sum())
        coarse += int((weights.bfloat16() != before[name].bfloat16()).sum())
    assert moved > 0.99 * total > 0.9 * 0.99 * sum(weights.numel() for weights in before.values())
    assert coarse < 0.2 * total, "bfloat16 alone would show these steps: they are no test of it"
    # The engine samples from what was trained.
    sampled = dict(engine._model.named_parameters())
    assert all(torch.equal(sampled[name], w.to(sampled[name].dtype)) for name, w in made.parts.model.named_parameters())
