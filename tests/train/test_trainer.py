"""A training step: the engine gets what it learned, and its rate and settings are those of the config."""

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.config import load_config
from agentrl.errors import ConfigError, UnknownNameError
from agentrl.train.step import StepResult, Trainer, check_training_config
from agentrl.types import Trajectory

from .conftest import Make, Small


def trainer_of(run: Small) -> tuple[Trainer, list[dict[str, Tensor]]]:
    """A trainer, and the gradient of each of its updates."""
    trainer = run.trainer()
    gradients: list[dict[str, Tensor]] = []

    def keep(*_: Any) -> None:
        named = run.parts.model.named_parameters()
        gradients.append({name: weights.grad.clone() for name, weights in named if weights.grad is not None})

    trainer.learner.optimizer.register_step_pre_hook(keep)
    return trainer, gradients


def step(trainer: Trainer, number: int = 1) -> StepResult:
    return asyncio.run(trainer.step(number))


def weights_of(run: Small) -> dict[str, Tensor]:
    return {name: weights.detach().clone() for name, weights in run.parts.model.named_parameters()}


def log_probs_of(model: Any, episode: Trajectory, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs of all tokens wherever one was sampled [n, V], and which it was [n], from transformers' own attention
    on this row alone."""
    tokens = torch.tensor(episode.token_ids)
    trained = torch.tensor([segment.trained for segment in episode.segments for _ in segment.token_ids])
    places = torch.nonzero(trained)[:, 0]
    logits = model(tokens[None]).logits[0, places - 1].float()
    return torch.log_softmax(logits / temperature, dim=-1), tokens[places]


def logp_of(model: Any, episode: Trajectory, temperature: float = 1.0) -> Tensor:
    """Log-probs of an episode's sampled tokens [n]."""
    logp, tokens = log_probs_of(model, episode, temperature)
    return logp.gather(1, tokens[:, None])[:, 0]


@torch.no_grad()
def energy_of(model: Any, episode: Trajectory, temperature: float = 1.0) -> Tensor:
    """‖onehot(y) − π‖² of an episode's sampled tokens [n]."""
    logp, tokens = log_probs_of(model, episode, temperature)
    return (torch.nn.functional.one_hot(tokens, logp.shape[1]) - logp.exp()).square().sum(1)


def test_same_seed_same_step_and_another_seed_another(small: Make) -> None:
    seen = [step(trainer_of(small(f"run.seed={seed}"))[0]) for seed in (0, 0, 1)]
    tokens = [[one.token_ids for one in result.trajectories] for result in seen]
    assert tokens[0] == tokens[1] != tokens[2]


# 12 rows: more minibatches than rows leave some of them empty.
@pytest.mark.parametrize(("minibatches", "updates"), [(1, 1), (50, 12)])
def test_updates_after_the_first_meet_ratios_other_than_one(small: Make, minibatches: int, updates: int) -> None:
    trainer, gradients = trainer_of(small(f"optim.minibatches={minibatches}", "optim.lr=1e-3"))
    metrics = step(trainer).metrics
    assert len(gradients) == trainer.updates == updates
    assert (metrics["log_ratio_abs_max"] < 1e-4) is (abs(metrics["ratio_mean"] - 1) < 1e-5) is (updates == 1)


def test_learning_rate_falls_with_the_budget_of_tokens(small: Make) -> None:
    first = step(trainer_of(small())[0]).metrics["sampled_tokens"]
    budget = int(1.5 * first)

    def limited(steps: int) -> Small:
        limits = f"optim.steps={steps}", f"optim.max_sampled_tokens={budget}"
        return small("optim.schedule=linear", "optim.minibatches=3", "optim.lr=1e-3", *limits)

    # What the second step samples beyond the budget does not count, so that its last update learns too.
    share = first / budget
    wanted = [1e-3 * (1 - spent) for spent in (0, share / 3, 2 * share / 3)]
    wanted += [1e-3 * (1 - share) * (3 - update) / 3 for update in range(3)]
    assert rates_of(limited(1000), steps=2) == pytest.approx(wanted)
    assert rates_of(limited(1), steps=1) == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3]), "whichever limit is nearer"


def rates_of(run: Small, steps: int) -> list[float]:
    """The learning rate of each update."""
    trainer, _ = trainer_of(run)
    rates, optimizer = list[float](), trainer.learner.optimizer
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    sampled = sum(step(trainer, number).metrics["sampled_tokens"] for number in range(1, steps + 1))
    assert trainer.sampled_tokens == sampled
    return rates


@pytest.mark.parametrize(
    ("override", "kind", "wanted"),
    [
        ("rollout.top_p=0.9", ConfigError, "an episode is sampled from the policy's whole distribution"),
        ("algo.advantage=otbb", UnknownNameError, "no advantage is called 'otbb'; did you mean 'otb'?"),
        ("algo.loss=ppo", UnknownNameError, "no loss is called 'ppo'; did you mean 'ppo_clip'?"),
        ("algo.advantage=rloo rollout.group_size=1", ConfigError, "'rloo' compares the episodes of a task, and roll"),
        ("algo.loss_options.powr=1", ConfigError, "has no option 'powr'; did you mean 'power'?"),
        ("algo.loss_options.power=high", ConfigError, "wrong type"),
        ("algo.loss_options.power=-1", ConfigError, "power"),
        ("algo.loss_options.aggregate=mean", UnknownNameError, "no aggregation is called 'mean'"),
        ("algo.loss_options.aggregate=token_sum_const", ConfigError, "needs max_tokens"),
        ("algo.loss_options.weights=1", ConfigError, "wrong type"),
        ("algo.advantage_options.tail=carried", UnknownNameError, "no tail is called 'carried'"),
        ("algo.advantage_options.tale=zero", ConfigError, "has no option 'tale'; did you mean 'tail'?"),
        ("optim.max_tokens=100", ConfigError, "can't hold an episode of rollout.episode_tokens=2048"),
        ("algo.energy_ratio=old algo.correction=none", ConfigError, "by algo.correction, which is 'none'"),
        ("algo.energy_ratio=old algo.advantage=grpo", ConfigError, "advantage 'grpo' can't do"),
        ("algo.energy_ratio=true algo.advantage=ogb", ConfigError, "advantage 'ogb' can't do"),
        ("algo.rejection.token=[2,1]", ConfigError, "the bounds of a ratio must rise from 0 up"),
        ("rollout.overlong_buffer=256", ConfigError, "leaves no length without a penalty"),
    ],
)
def test_settings_that_training_refuses(override: str, kind: type[Exception], wanted: str) -> None:
    with pytest.raises(kind) as caught:
        check_training_config(load_config(overrides=override.split()))
    assert wanted in str(caught.value) and "\n" not in str(caught.value)


def test_prompts_without_room_are_an_error(small: Make) -> None:
    with pytest.raises(ConfigError, match=r"no prompt leaves room for a turn within rollout\.episode_tokens=8"):
        step(trainer_of(small("rollout.episode_tokens=8"))[0])
