"""The baseline from the step's other groups: by hand, by what must hold, and exactly, over all steps that can occur."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl import algos
from agentrl.algos.advantages import ogb, otb
from agentrl.errors import ConfigError

from . import reference
from .enumeration import World, by_prefix, steps
from .test_advantages import RAGGED, batches, random_batch, tensors
from .test_enumeration import close, random_logits

POOLS = [0.5, 4.0, math.inf]


@pytest.mark.parametrize("by", [otb, ogb])
@pytest.mark.parametrize(
    ("pool", "leave_one_out", "baseline"),
    [
        (math.inf, False, [1.0, 1.0, 0.5 / 0.6]),
        (1.0, False, [(0.5 + 0.3) / 0.9, (0.5 + 0.3) / 0.9, (0.3 + 0.3 * 0.5 / 0.6) / 0.6]),
        (1.0, True, [0.3 / 0.4, (0.5 + 0.3) / 0.8, 0.5 / 0.6]),
    ],
)
def test_hand_worked_pair_of_groups(by, pool, leave_one_out, baseline):
    rewards, starts, group = tensors([[1.0], [0.0], [1.0]], [0, 0, 1])
    options = {"pool": pool, "leave_one_out": leave_one_out} | ({"tail": "carry"} if by is otb else {})
    got = by(rewards, torch.tensor([0.5, 0.1, 0.3]), starts, group, **options)
    torch.testing.assert_close(got, rewards - torch.tensor(baseline), atol=1e-6, rtol=0)


@settings(max_examples=80, deadline=None)
@given(batches(), st.booleans(), st.sampled_from([0.0, *POOLS]))
def test_ogb_is_otb_of_rows_of_one_token(batch, leave_one_out, pool):
    rewards, energy, _, group = batch
    flat_rewards, starts, groups = tensors(rewards, group)
    got = ogb(flat_rewards, tensors(energy, group)[0], starts, groups, leave_one_out=leave_one_out, pool=pool)
    whole = [[[math.fsum(row)] if row else [] for row in rows] for rows in (rewards, energy)]
    credit = reference.otb(*whole, group, leave_one_out=leave_one_out, pool=pool)
    pairs = zip(rewards, credit, strict=True)
    expected = torch.tensor([value for row, advantage in pairs for value in advantage * len(row)])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_where_the_reward_is_at_the_end_the_energy_of_a_row_gives_ogb():
    _, energy, starts, group = random_batch(*RAGGED)
    rewards = torch.zeros_like(energy)
    rewards[starts[1:][starts.diff() > 0] - 1] = torch.randn(7, dtype=torch.float64)
    expected = ogb(rewards, energy, starts, group, pool=math.inf)
    torch.testing.assert_close(algos.advantage("otb_episode", rewards, energy, starts, group), expected)


@pytest.mark.parametrize("tail", ["zero", "own", "carry"])
def test_the_only_group_of_a_step_is_its_own_pool_without_the_row(tail):
    rewards, energy, starts, group = random_batch([3, 0, 4, 1, 2], [7, 3, 7, 7, 7])
    got = otb(rewards, energy, starts, group, pool=math.inf, tail=tail)
    assert torch.equal(got, otb(rewards, energy, starts, group, leave_one_out=True, tail=tail)), "row 2 has no token"
    assert torch.equal(
        otb(rewards, energy, starts, group, pool=4, tail=tail), otb(rewards, energy, starts, group, tail=tail)
    )
    alone = otb(rewards[:3], energy[:3], starts[:2], group[:1], pool=math.inf, tail=tail)
    assert alone.tolist() == pytest.approx(reference.flat([[float(rewards[t:3].sum()) for t in range(3)]]))


@pytest.mark.parametrize("by", [otb, ogb])
def test_a_constant_on_all_returns_changes_nothing_where_finished_rows_stay(by):
    rewards, energy, starts, group = random_batch(*RAGGED)
    options = {"pool": 4.0} | ({"tail": "carry"} if by is otb else {})
    shifted = rewards.index_add(0, starts[1:][starts.diff() > 0] - 1, torch.full((7,), 3.0, dtype=torch.float64))
    credit = (by(paid, energy, starts, group, **options) for paid in (rewards, shifted))
    torch.testing.assert_close(*credit, atol=1e-6, rtol=0)


@pytest.mark.parametrize("position", range(3))
def test_a_small_pool_survives_a_huge_group_before_between_or_behind_it(position):
    # All sums less the huge group's would leave nothing of the small ones.
    rewards, energy, length = ([small, other] for small, other in ((1.0, 0.0), (1e-3, 3e-3), (1, 1)))
    rewards.insert(position, 0.0)
    energy.insert(position, 1e18)
    length.insert(position, 9)
    rows = [[reward] * count for reward, count in zip(rewards, length, strict=True)]
    flat_rewards, starts, group = tensors(rows, range(3))
    flat_energy = tensors([[value] * count for value, count in zip(energy, length, strict=True)], range(3))[0]
    for tail, reach in (("zero", 1), ("carry", 9)):
        got = otb(flat_rewards, flat_energy, starts, group, pool=math.inf, tail=tail)[position : position + reach]
        assert got.tolist() == pytest.approx([-1e-3 / (4e-3 + 1e-8)] * reach, rel=1e-5)


def test_many_groups_beside_a_long_row_need_no_table():
    lengths, count = [200_000, *[1] * 20_000], 20_001
    starts = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    rewards = torch.zeros(220_000)
    rewards[200_000::2] = 1.0
    for tail, last in (("carry", 0.5), ("zero", 0.0)):
        got = otb(rewards, torch.ones(220_000), starts, torch.arange(count), pool=math.inf, tail=tail)
        assert got[:200_000:199_999].tolist() == pytest.approx([-0.5, -last])


@pytest.mark.parametrize("pool", [-1.0, -math.inf, math.nan])
def test_a_pool_of_less_than_nothing_is_refused(pool):
    args = (torch.zeros(1), torch.ones(1), torch.tensor([0, 1]), torch.tensor([0]))
    for by in (otb, ogb):
        with pytest.raises(ConfigError, match="pool counts mean rows"):
            by(*args, pool=pool)
    with pytest.raises(ConfigError, match="wrong type"):
        algos.check_options("advantage", "otb", {"pool": "all"})


def world(seed: int) -> World:
    """Episodes of one to three tokens, each of which is paid, under a policy with memory."""
    prefixes = [(1,) * t for t in range(3)]
    scores = random_logits(seed + 100, 3, 2).tolist()
    logits = random_logits(seed, 3, 2).tolist()
    policy = by_prefix(
        dict(zip(prefixes, logits, strict=True)), 3, lambda episode: [scores[t][y] for t, y in enumerate(episode)]
    )
    return policy.world()


def expected(tasks: Sequence[World], size: int, name: str, ratios: Sequence[Tensor], **options: object) -> Tensor:
    """The exact mean of each task's gradient [tasks, P], over every step of one group of each of the ``tasks``.

    The tasks' probabilities are those of the sampler: a row's gradient is multiplied by the one of the ``ratios`` that
    its task and episode have.
    """
    total = torch.zeros(len(tasks), tasks[0].score.shape[1], dtype=torch.float64)
    of_token = [torch.repeat_interleave(r, task.starts.diff()) for r, task in zip(ratios, tasks, strict=True)]
    for step in steps(tasks, size):
        ratio = torch.cat([r[token] for r, token in zip(of_token, step.tokens, strict=True)])
        credit = ratio * algos.advantage(name, step.rewards, step.energy, step.starts, step.group, **options)
        parts = zip(credit.split([len(token) for token in step.tokens]), tasks, step.tokens, strict=True)
        total += step.probability / size * torch.stack([part @ task.score[token] for part, task, token in parts])
    return total


TASKS = [world(0), world(3)]
UNBIASED = [
    ("otb_pooled", {}),
    ("otb_episode", {}),
    ("otb", {"pool": math.inf}),
    ("ogb", {"pool": math.inf}),
    ("otb_loo", {"pool": 0.5}),
    ("otb_loo", {"pool": 4, "tail": "carry", "energy_kind": "instantaneous"}),
    ("ogb", {"pool": 1, "leave_one_out": True}),
]


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        *((name, options, size) for name, options in UNBIASED for size in (1, 2)),
        *(pytest.param(*UNBIASED[number], 4, marks=pytest.mark.slow) for number in (0, 1, 3)),
    ],
)
@pytest.mark.parametrize("samplers", [TASKS, [world(10), world(13)]], ids=["on-policy", "off-policy"])
def test_a_pool_is_exactly_unbiased_also_off_policy_with_the_ratio_of_the_row(name, options, size, samplers):
    drifted = [replace(task, probability=other.probability) for task, other in zip(TASKS, samplers, strict=True)]
    ratios = [task.probability / other.probability for task, other in zip(TASKS, samplers, strict=True)]
    assert samplers is TASKS or max(float(ratio.log().abs().max()) for ratio in ratios) > 1
    close(expected(drifted, size, name, ratios, **options), torch.stack([task.gradient for task in TASKS]), 1e-12)
