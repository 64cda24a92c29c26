"""The options of a step, off by default, all at once and against loops: T ≠ 1, packs, and an engine ≠ the trainer.

A step's rate and settings are those of the config.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.batch import as_batch
from agentrl.config import load_config
from agentrl.errors import ConfigError, UnknownNameError
from agentrl.rollout.player import EpisodeLimits
from agentrl.train.step import check_training_config, learning_rate
from agentrl.types import Group, Segment, Stop

from ..algos import reference as slow
from .conftest import Make, Small, log_probs_of, step, trainer_of, trajectory, turn
from .test_whole_step import CONSTANT, TEMPERATURE, Pool, Slow, check_update, loud, make_watched  # noqa: F401

KL, ENTROPY, BUFFER, TURN, EPISODE = 0.3, 0.05, 12, 20, 90
BOUNDS = {"token": (0.75, 1.3), "sequence": (0.5, 2.5), "geometric": (0.9, 1.2)}
ALL = (
    *(f"algo.kl_coef={KL}", f"algo.entropy_coef={ENTROPY}", "algo.advantage_options.weights=old"),
    *(f"algo.rejection.{level}={list(pair)}" for level, pair in BOUNDS.items()),
    *("rollout.truncated.mask=true", f"rollout.truncated.penalty={BUFFER}"),
    *(f"rollout.turn_tokens={TURN}", f"rollout.episode_tokens={EPISODE}"),
    *("env.args.max_turns=2", "rollout.group_size=8", "optim.max_grad_norm=0.1"),
)


class Options(Slow):
    """The loops, with every option."""

    aggregate = "seq_mean_token_mean"

    def shape(self) -> int:
        """Let long episodes cost something; how many are long."""
        before = copy.deepcopy(self.rewards)
        for rewards, episode in zip(self.rewards, self.episodes, strict=True):
            room = min(TURN - max(len(part.token_ids) for part in episode.sampled), EPISODE - len(episode.token_ids))
            rewards[-1] -= max(0.0, 1 - (0 if episode.stop is Stop.TOKEN_LIMIT else room) / BUFFER)
        return sum(a != b for a, b in zip(before, self.rewards, strict=True))

    def loss_mask(self, old: list[list[float]]) -> list[list[bool]]:
        steps = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(old, self.sampler, strict=True)]
        return [
            [not rejected and not episode.stop.truncated for rejected in row]
            for row, episode in zip(slow.rejected(steps, BOUNDS), self.episodes, strict=True)
        ]

    def beside(self, row: int, other: list[list[float]]) -> Tensor:
        every, _ = log_probs_of(self.model, self.episodes[row], TEMPERATURE)
        entropy = -(every.exp() * every).sum(1)
        x = torch.tensor(other[row]) - self.logp(row)
        terms = KL * (x.exp() - 1 - x) - ENTROPY * entropy
        return terms.sum() / (len(x) if self.aggregate == "seq_mean_token_mean" else CONSTANT)


CONSTANT_LENGTH = {"aggregate": "token_sum_const", "max_tokens": CONSTANT}


@pytest.mark.slow
@pytest.mark.parametrize(("max_tokens", "options"), [(195, {}), (5000, CONSTANT_LENGTH)])
def test_step_with_every_option_is_that_of_loops(watch: Any, reference: Any, max_tokens: int, options: Any) -> None:
    how = [f"algo.loss_options.{name}={value}" for name, value in options.items()]
    watched = watch(*ALL, *how, f"optim.max_tokens={max_tokens}", noise=0.15, calling=True)
    frozen = copy.deepcopy(reference)
    with torch.no_grad():
        for weights in frozen.parameters():
            weights += 0.02 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(weights.numel()))
    shifted = copy.deepcopy(watched.trainer.learner.model)
    shifted.load_state_dict(frozen.state_dict())
    watched.trainer.learner.keep_reference(shifted)
    result = watched.step(1)
    ours, pool = Options(reference, result), Pool()
    ours.aggregate = options.get("aggregate", ours.aggregate)
    assert 0 < ours.shape() < len(ours.rewards)
    other = Options(frozen, result).all_logp()
    old = ours.all_logp()
    weights, mask = ours.weights(old, "sequence"), ours.loss_mask(old)
    credit = [[a * keep for a, keep in zip(*pair, strict=True)] for pair in zip(ours.otb(weights), mask, strict=True)]
    for mine, theirs in zip(result.advantages, credit, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    rows = [row for row, keep in enumerate(mask) if any(keep)]
    stops = {episode.stop for episode in result.trajectories}
    assert len(stops) > 1 and 4 < len(rows) < len(mask) and any(not all(mask[row]) for row in rows), "each has its say"
    assert result.metrics["tokens_masked"] == sum(not keep for keep in slow.flat(mask))
    drift = [torch.tensor(a) - torch.tensor(b) for a, b in zip(other, old, strict=True)]
    kl = torch.cat([x.exp() - 1 - x for x in drift]).mean()
    assert result.metrics["kl_reference"] == pytest.approx(kl.item(), rel=1e-3) and kl > 1e-3
    losses: list[float] = []
    for at, update in enumerate(watched.updates):
        beside = lambda row: ours.beside(row, other)
        losses += check_update(ours, update, old, credit, weights, pool, ours.aggregate, beside)[:1]
        if at % 3 == 2:
            seen = slow.flat([slow.flat(update.packs) for update in watched.updates[at - 2 : at + 1]])
            assert sorted(seen) == rows, "rows without a token to train on are in no minibatch"
    assert len(losses) == 6 and result.metrics["loss"] == pytest.approx(sum(losses) / 6, abs=1e-4)
    pool.check(result.metrics)


@pytest.mark.parametrize(
    ("limit", "turns", "stop", "cost"),
    [
        (0, (4,), Stop.TERMINATED, 0.0),
        (0, (10,), Stop.TERMINATED, 0.0),
        (0, (15, 2), Stop.TERMINATED, 0.5),
        (0, (20,), Stop.TURN_CUT, 1.0),
        (30, (4, 5), Stop.TURN_LIMIT, 0.4),  # 44 tokens of 50
        (27, (15, 0), Stop.TERMINATED, 0.7),  # 5 tokens of the turn are left and 3 of the episode
        (26, (9,), Stop.TOKEN_LIMIT, 1.0),
    ],
)
def test_overlong_costs_by_the_nearer_limit(limit: int, turns: tuple[int, ...], stop: Stop, cost: float) -> None:
    limits = EpisodeLimits(episode_tokens=50, penalty=10)
    begin, *later = (turn((7,) * n) for n in turns)
    episode = trajectory(Segment("prompt", (1,) * 5), begin, Segment("tool", (2,) * limit), *later, stop=stop)
    assert limits.penalty_of(episode.rows, stop, 20) == pytest.approx(cost)
    penalized = as_batch([Group((replace(episode, penalty=cost),))])
    assert penalized.rewards.tolist() == pytest.approx([0.0] * (sum(turns) - 1) + [-cost])


def test_a_step_that_masks_everything_updates_nothing(small: Make) -> None:
    trainer, updates = trainer_of(small('rollout.truncated={mask=true,turn="end"}', "algo.kl_coef=0.1"))
    metrics = step(trainer).metrics
    assert not updates and trainer.updates == 0 and "loss" not in metrics
    assert metrics["tokens_masked"] == metrics["sampled_tokens"] and metrics["advantage_abs"] == 0
    assert metrics["kl_reference"] == 0, "the policy is its own reference before it learns"


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ("cosine", [0.5, 0.9619398, 0.8535534, 0.6913417, 0.5, 0.3086583, 0.1464466, 0.0380602]),
    ],
)
def test_schedules_after_a_warmup(schedule: str, wanted: list[float]) -> None:
    settings = ("optim.lr=2", "optim.warmup=2", "optim.steps=2", "optim.minibatches=2", "optim.epochs=2")
    optim = load_config(overrides=[*settings, f"optim.schedule={schedule}"]).optim
    assert [learning_rate(optim, update) / 2 for update in range(1, 9)] == pytest.approx(wanted)
    if schedule == "cosine":
        assert learning_rate(optim, 3, spent=0.75) / 2 == pytest.approx(0.1464466), "whichever is nearer its end"
        assert learning_rate(optim, 9) == learning_rate(optim, 3, spent=1.0) == 0


def test_same_seed_same_step_and_another_seed_another(small: Make) -> None:
    seen = [step(trainer_of(small(f"run.seed={seed}"))[0]) for seed in (0, 0, 1)]
    tokens = [[episode.token_ids for episode in result.trajectories] for result in seen]
    assert tokens[0] == tokens[1] != tokens[2]


# 12 rows: more minibatches than rows leave some of them empty.
@pytest.mark.parametrize(("minibatches", "updates"), [(1, 1), (50, 12)])
def test_updates_after_the_first_meet_ratios_other_than_one(small: Make, minibatches: int, updates: int) -> None:
    trainer, seen = trainer_of(small(f"optim.minibatches={minibatches}", "optim.lr=1e-3"))
    metrics = step(trainer).metrics
    assert len(seen) == trainer.updates == updates
    assert (metrics["log_ratio_abs_max"] < 1e-4) is (abs(metrics["ratio_mean"] - 1) < 1e-5) is (updates == 1)


def test_learning_rate_falls_with_the_budget_of_tokens(small: Make) -> None:
    sampled = step(trainer_of(small())[0]).metrics["sampled_tokens"]
    budget = int(1.5 * sampled)

    def limited(steps: int) -> Small:
        limits = f"optim.steps={steps}", f"optim.max_sampled_tokens={budget}"
        return small("optim.schedule=linear", "optim.minibatches=3", "optim.lr=1e-3", *limits)

    # What the second step samples beyond the budget does not count, so that its last update learns too.
    share = sampled / budget
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
        ("algo.advantage_options.weights=old algo.correction=none", ConfigError, "by algo.correction, which is 'none'"),
        ("algo.advantage_options.weights=old algo.advantage=grpo", ConfigError, "'grpo' has no option 'weights'"),
        ("algo.advantage_options.weights=cumulative algo.advantage=ogb", ConfigError, "'ogb' has no option 'weights'"),
        (
            "algo.advantage_options.weights=new",
            UnknownNameError,
            "no energy weight is called 'new'; choose one of cum",
        ),
        ("algo.advantage_options.weights=true", UnknownNameError, "no energy weight is called 'True'"),
        ("algo.rejection.token=[2,1]", ConfigError, "the bounds of a ratio must rise from 0 up"),
        ("rollout.truncated.penalty=256", ConfigError, "leaves no length without a penalty"),
    ],
)
def test_settings_that_training_refuses(override: str, kind: type[Exception], wanted: str) -> None:
    with pytest.raises(kind) as caught:
        check_training_config(load_config(overrides=override.split()))
    assert wanted in str(caught.value) and "\n" not in str(caught.value)


def test_prompts_without_room_are_an_error(small: Make) -> None:
    with pytest.raises(ConfigError, match=r"no prompt leaves room for a turn within rollout\.episode_tokens=8"):
        step(trainer_of(small("rollout.episode_tokens=8"))[0])
