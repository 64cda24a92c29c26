"""The options of a step, off by default, all at once and against loops: T ≠ 1, packs, and an engine ≠ the trainer."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.batch import whole
from agentrl.config import load_config
from agentrl.train.credit import with_overlong_penalty
from agentrl.train.step import learning_rate
from agentrl.types import Group, Segment, Stop

from ..algos import reference as slow
from .conftest import Make, trajectory, turn
from .test_trainer import log_probs_of, step, trainer_of
from .test_whole_step import CONSTANT, TEMPERATURE, Pool, Slow, check_update, loud, make_watched  # noqa: F401

KL, ENTROPY, BUFFER, TURN, EPISODE = 0.3, 0.05, 12, 20, 90
BOUNDS = {"token": (0.75, 1.3), "sequence": (0.5, 2.5), "geometric": (0.9, 1.2)}
ALL = (
    *(f"algo.kl_coef={KL}", f"algo.entropy_coef={ENTROPY}", "algo.energy_ratio=old", "algo.mask_truncated=true"),
    *(f"algo.rejection.{level}={list(pair)}" for level, pair in BOUNDS.items()),
    *(f"rollout.overlong_buffer={BUFFER}", f"rollout.turn_tokens={TURN}", f"rollout.episode_tokens={EPISODE}"),
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

    def kept(self, old: list[list[float]]) -> list[list[bool]]:
        steps = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(old, self.sampler, strict=True)]
        return [
            [not one and not episode.stop.truncated for one in row]
            for row, episode in zip(slow.rejected(steps, BOUNDS), self.episodes, strict=True)
        ]

    def beside(self, row: int, other: list[list[float]]) -> Tensor:
        every, _ = log_probs_of(self.model, self.episodes[row], TEMPERATURE)
        entropy = -(every.exp() * every).sum(1)
        x = torch.tensor(other[row]) - self.logp(row)
        terms = KL * (x.exp() - 1 - x) - ENTROPY * entropy
        return terms.sum() / (len(x) if self.aggregate == "seq_mean_token_mean" else CONSTANT)


CONSTANT_LENGTH = {"aggregate": "token_sum_const", "max_tokens": CONSTANT}


@pytest.mark.parametrize(("max_tokens", "options"), [(195, {}), (5000, CONSTANT_LENGTH)])
def test_step_with_every_option_is_that_of_loops(
    watch: Any, reference: Any, max_tokens: int, options: dict[str, Any]
) -> None:
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
    weights, kept = ours.weights(old, "sequence"), ours.kept(old)
    credit = [[a * keep for a, keep in zip(*pair, strict=True)] for pair in zip(ours.otb(weights), kept, strict=True)]
    for mine, theirs in zip(result.advantages, credit, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    rows = [row for row, keep in enumerate(kept) if any(keep)]
    stops = {episode.stop for episode in result.trajectories}
    assert len(stops) > 1 and 4 < len(rows) < len(kept) and any(not all(kept[row]) for row in rows), "each has its say"
    assert result.metrics["tokens_masked"] == sum(not keep for keep in slow.flat(kept))
    drift = [torch.tensor(a) - torch.tensor(b) for a, b in zip(other, old, strict=True)]
    kl = torch.cat([x.exp() - 1 - x for x in drift]).mean()
    assert result.metrics["kl_reference"] == pytest.approx(kl.item(), rel=1e-3) and kl > 1e-3
    losses: list[float] = []
    for at, update in enumerate(watched.updates):
        beside = lambda row: ours.beside(row, other)
        losses += check_update(ours, update, old, credit, weights, pool, beside, ours.aggregate)[:1]
        if at % 3 == 2:
            seen = slow.flat([slow.flat(one.packs) for one in watched.updates[at - 2 : at + 1]])
            assert sorted(seen) == rows, "rows without a token to train on are in no minibatch"
    assert len(losses) == 6 and result.metrics["loss"] == pytest.approx(sum(losses) / 6, abs=1e-4)
    pool.check(result.metrics)


@pytest.mark.parametrize(
    ("told", "turns", "stop", "cost"),
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
def test_overlong_costs_by_the_nearer_limit(told: int, turns: tuple[int, ...], stop: Stop, cost: float) -> None:
    limits = ("rollout.overlong_buffer=10", "rollout.turn_tokens=20", "rollout.episode_tokens=50")
    rollout = load_config(overrides=limits).rollout
    first, *later = (turn((7,) * n) for n in turns)
    episode = trajectory(Segment("prompt", (1,) * 5), first, Segment("tool", (2,) * told), *later, stop=stop)
    before = whole([Group((episode,))])
    after = with_overlong_penalty(before, [episode], rollout)
    assert (before.rewards - after.rewards).tolist() == pytest.approx([0.0] * (sum(turns) - 1) + [cost])


def test_a_step_that_masks_everything_updates_nothing(small: Make) -> None:
    trainer, gradients = trainer_of(small("algo.mask_truncated=true", "rollout.cut_turns=end", "algo.kl_coef=0.1"))
    metrics = step(trainer).metrics
    assert not gradients and trainer.updates == 0 and "loss" not in metrics
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
