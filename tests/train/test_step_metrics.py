"""What a step says by position in the episode, and OTB's energies weighted by the cumulative ratio."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.train.step import StepResult, check_training_config
from agentrl.types import Trajectory

from ..algos import reference as slow
from .conftest import Make
from .test_trainer import logp_of, step, trainer_of, weights_of

WIDE = tuple(f"algo.loss_options.clip_{side}=9" for side in ("low", "high", "dual"))
"""A window that nothing leaves."""


def edge_of(t: int) -> int:
    """The lower edge of the bin of t = 1, 2, …: 1, 2, 2, 4, 4, 4, 4, 8 …"""
    return 2 ** int(math.log2(t) + 1e-9)


def counts(result: StepResult) -> dict[int, int]:
    """Sampled tokens of each bin."""
    edges = [edge_of(t) for one in result.trajectories for t in range(1, one.n_sampled + 1)]
    return {edge: edges.count(edge) for edge in edges}


def pooled(result: StepResult, name: str) -> float:
    """The mean over all tokens, from those of the bins."""
    bins = counts(result)
    return sum(count * result.metrics[f"{name}_t{edge}"] for edge, count in bins.items()) / sum(bins.values())


def test_credit_by_position_is_that_of_the_episodes(small: Make) -> None:
    result = step(trainer_of(small())[0])
    sums: dict[int, float] = {}
    for credit in result.advantages:
        for t, one in enumerate(credit, start=1):
            sums[edge_of(t)] = sums.get(edge_of(t), 0.0) + abs(one)
    assert len(sums) > 2
    for edge, count in counts(result).items():
        assert result.metrics[f"advantage_abs_t{edge}"] == pytest.approx(sums[edge] / count, abs=1e-6)
    for name in ("advantage_abs", "energy"):
        assert pooled(result, name) == pytest.approx(result.metrics[name], abs=1e-6)
    longest = max(counts(result))
    assert f"energy_t{2 * longest}" not in result.metrics, "a bin without a token has no mean"


@pytest.mark.parametrize("loss", ["ctpo", "ppo_clip"])
def test_updates_by_position_pool_to_what_the_loss_says(small: Make, loss: str) -> None:
    many = ("optim.minibatches=1", "optim.epochs=3", "optim.lr=3e-3", "algo.loss_options.aggregate=token_mean")
    result = step(trainer_of(small(*many, f"algo.loss={loss}", "algo.advantage=otb"))[0])
    assert 0 < result.metrics["clip_fraction"] < 1
    assert pooled(result, "clip_fraction") == pytest.approx(result.metrics["clip_fraction"], abs=1e-6)
    if loss == "ctpo":
        assert pooled(result, "S_mean") == pytest.approx(result.metrics["S_mean"], abs=1e-5)
    stds = [result.metrics[f"S_std_t{edge}"] for edge in sorted(counts(result))]
    assert 0 < stds[0] < stds[-1], "it grows with the tokens that it sums over"


def test_before_any_update_nothing_has_moved(small: Make) -> None:
    metrics = step(trainer_of(small("optim.minibatches=1"))[0]).metrics
    for name in ("S_mean", "S_std", "clip_fraction"):
        assert abs(metrics[f"{name}_t1"]) < 1e-5 and abs(metrics[f"{name}_t4"]) < 1e-4
    assert metrics["weight_ess"] == pytest.approx(1.0, abs=1e-6)


def test_energy_ratio_changes_nothing_while_the_policy_is_the_sampler(small: Make) -> None:
    once = ("optim.minibatches=1", "optim.epochs=1")
    plain, weighted = (step(trainer_of(small(*once, f"algo.energy_ratio={on}"))[0]) for on in ("false", "true"))
    for one, other in zip(plain.advantages, weighted.advantages, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_energy_ratio_credits_each_epoch_by_the_policy_as_it_is(small: Make, reference: Any) -> None:
    twice = ("optim.minibatches=1", "optim.epochs=2", "optim.lr=2e-4", "algo.energy_ratio=true", "algo.correction=none")
    run = small(*twice, *WIDE)
    trainer, gradients = trainer_of(run)
    weights: list[dict[str, Tensor]] = []
    trainer.learner.optimizer.register_step_post_hook(lambda *_: weights.append(weights_of(run)))
    result = step(trainer)
    model = copy.deepcopy(reference)
    model.load_state_dict(weights[0], strict=False)
    credit = credit_at(model, result)
    assert any(abs(a - b) > 1e-3 for new, old in zip(credit, result.advantages, strict=True)
               for a, b in zip(new, old, strict=True)), "the first epoch's credit would do as well"  # fmt: skip
    losses: list[Tensor] = []
    for episode, row in zip(result.trajectories, credit, strict=True):
        logp = logp_of(model, episode)
        ratio = (logp.detach() - sampler_logp(episode)).cumsum(0).exp()
        losses.append(-(torch.tensor(row) * ratio * logp).mean())
    torch.stack(losses).mean().backward()
    for name, parameter in model.named_parameters():
        scale = float(gradients[1][name].norm())
        torch.testing.assert_close(gradients[1][name], parameter.grad, rtol=1e-3, atol=1e-4 * scale, msg=name)


def sampler_logp(episode: Trajectory) -> Tensor:
    return torch.tensor([lp for part in episode.sampled for lp in part.logprobs or ()])


def credit_at(model: Any, result: StepResult) -> list[list[float]]:
    """OTB with w_t·(Π_{j≤t} θ/sampler)², in loops, for a model θ."""
    rewards, energy, ratios, group = [], [], [], []
    for episode in result.trajectories:
        paid = [0.0] * episode.n_sampled
        paid[-1] = episode.ret
        tokens = torch.tensor(episode.token_ids)
        sources = [segment.trained for segment in episode.segments for _ in segment.token_ids]
        trained = [place for place, keep in enumerate(sources) if keep]
        with torch.no_grad():
            probs = torch.softmax(model(tokens[None]).logits[0], dim=-1)[torch.tensor(trained) - 1]
            moved = logp_of(model, episode) - sampler_logp(episode)
        picked = torch.nn.functional.one_hot(tokens[trained], probs.shape[1])
        rewards.append(paid)
        energy.append((picked - probs).square().sum(1).tolist())
        ratios.append([min(math.exp(math.fsum(moved[: t + 1].tolist())), 5.0) for t in range(len(moved))])
        group.append(episode.task_id)
    return slow.otb(rewards, energy, group, weights=ratios)


@pytest.mark.parametrize("advantage", ["group_mean", "ogb", "rloo"])
def test_energy_ratio_is_refused_where_no_energy_is_weighted(advantage: str) -> None:
    config = load_config(overrides=[f"algo.advantage={advantage}", "algo.energy_ratio=true"])
    with pytest.raises(ConfigError, match=f"advantage '{advantage}' can't do"):
        check_training_config(config)
