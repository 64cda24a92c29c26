"""``model.dtype`` is the type of computation: what is trained and saved is float32, so that small steps add up."""

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.batch import whole
from agentrl.engines.base import Completion, Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.models.load import ROUNDING, cast_copy
from agentrl.models.tiny import make_model
from agentrl.train.score import score
from agentrl.train.sft import oracle_episodes, warm_start
from agentrl.types import Group, Segment, Stop, Trajectory

from ..engines.asking import ragged, together
from .conftest import Make

WARM = (
    *("sft.steps=50", "sft.episodes=4", "sft.lr=4e-3", "optim.lr=1e-3", "optim.warmup=0", "rollout.tasks=6"),
    *("rollout.group_size=8", "optim.max_tokens=2000", "rollout.concurrency=48"),
)


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


@pytest.mark.slow
def test_bfloat16_and_float32_learn_alike(small: Make, tokenizer: Any) -> None:
    """A short warm start and four steps, from one seed: the same losses, near to the same rewards and weights."""
    seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for dtype in ("float32", "bfloat16"):
        made = small(f"model.dtype={dtype}", *WARM)
        model = make_model(tokenizer, hidden=32, layers=2, heads=4, seed=0)
        before = vector(model)
        engine = TransformersEngine(cast_copy(model, getattr(torch, dtype)), slots=64, max_length=256)
        made = replace(made, parts=replace(made.parts, model=model, engine=engine))
        groups = asyncio.run(oracle_episodes(made.config, made.parts.renderer, made.players, made.mix))
        losses: list[float] = []
        warm_start(made.config, model, groups, lambda step, losses=losses: losses.append(step.loss))
        trainer, rows = made.trainer(), list[dict[str, float]]()
        asyncio.run(engine.load_weights(trainer.learner.weights(), 0))
        rows = [asyncio.run(trainer.step(number)).metrics for number in range(1, 5)]
        assert all(row["weight_ess"] > 0.99 for row in rows)
        rewards = torch.tensor([row["reward_mean"] for row in rows])
        seen[dtype] = torch.tensor(losses), rewards, vector(model) - before
    (loss, reward, moved), (other_loss, other_reward, other_moved) = seen.values()
    assert loss[-1] < loss[0] / 4 and reward[-1] > reward[0] and other_reward[-1] > other_reward[0]
    torch.testing.assert_close(loss, other_loss, rtol=0.03, atol=0.01)
    torch.testing.assert_close(reward, other_reward, rtol=0, atol=0.1)
    assert float(torch.cosine_similarity(moved, other_moved, dim=0)) > 0.98


def episode(prompt: tuple[int, ...], done: Completion) -> Group:
    segments = (Segment("prompt", prompt), Segment("policy", done.token_ids, done.logprobs, 0))
    return Group((Trajectory(task_id="a", seed=0, segments=segments, rewards=(0.0,), stop=Stop.TERMINATED),))


def vector(model: Any) -> Tensor:
    return torch.cat([weights.detach().flatten() for weights in model.parameters()]).clone()


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_engine_and_trainer_are_as_near_as_measured(
    small: Make, tokenizer: Any, dtype: torch.dtype, largest: float
) -> None:
    """The figures beside ``ROUNDING``, on a model as it is initialised, at another temperature than 1."""
    model = make_model(tokenizer, hidden=64, layers=4, heads=4, seed=0)
    engine = TransformersEngine(cast_copy(model, dtype), slots=16, max_length=256)
    assert engine.rounding == ROUNDING[dtype] >= 5 * largest, "the check must stay silent on rounding alone"
    prompts = ragged(16)
    done = together(*(engine.generate(one, Sampling(temperature=0.7, max_tokens=64), seed=1) for one in prompts))
    batch = whole([episode(*one) for one in zip(prompts, done, strict=True)])
    with torch.no_grad():
        apart = score(model, batch, temperature=0.7, dtype=dtype).logp.double() - batch.sampler_logp
    assert float(apart.abs().max()) < largest
    # No bias: errors of a row add up as independent ones, √n times that of a token.
    assert abs(float(apart.mean())) < 4 * float(apart.std()) / len(apart) ** 0.5
