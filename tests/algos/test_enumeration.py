"""What is exactly true of the estimators, shown on every group that can occur."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from . import enumeration, reference
from .enumeration import POLICIES, Groups, Policy, by_prefix, weights_of

README = Path(__file__).parents[2] / "agentrl" / "algos" / "README.md"
UNBIASED = ("otb_loo", "otb_loo, carry", "rloo", "none")
GENERATORS = range(4)


def random_logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_memory(seed: int, longest: int = 3, tokens: int = 3) -> Policy:
    """Any policy with a block of parameters per prefix, and any terminal reward."""
    bodies = range(1, tokens)
    prefixes = [prefix for t in range(longest) for prefix in itertools.product(bodies, repeat=t)]
    logits = random_logits(seed, len(prefixes), tokens).tolist()
    scores = random_logits(seed + 100, 1000).tolist()
    world_of = enumeration.terminal(lambda episode: scores[sum((y + 1) * 7**t for t, y in enumerate(episode)) % 1000])
    return by_prefix(dict(zip(prefixes, logits, strict=True)), longest, world_of)


WORLDS = {
    **{f"memory {seed}": with_memory(seed).world() for seed in GENERATORS},
    "four tokens": with_memory(9, longest=4, tokens=2).world(),
    **{name: policy.world() for name, policy in POLICIES.items()},
}
CROWDS = [*itertools.product(WORLDS, (2, 3)), ("careful", 4)]
"""Worlds and the sizes of their groups."""


def close(left: Tensor, right: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(left, right, atol=atol, rtol=0)


@pytest.mark.parametrize("policy", [with_memory(1), *POLICIES.values()])
def test_the_true_gradient_is_that_of_the_expected_return(policy: Policy):
    logits = policy.logits.clone().requires_grad_()
    chances = [policy.logp(logits, episode).sum().exp() for episode in policy.episodes()]
    assert float(sum(chances).detach()) == pytest.approx(1.0)
    value = sum(p * sum(policy.reward(episode)) for p, episode in zip(chances, policy.episodes(), strict=True))
    close(policy.world().gradient, torch.autograd.grad(value, logits)[0].flatten())


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_groups_are_the_slow_loop_over_ordered_pairs(leave_one_out: bool):
    policy = with_memory(5)
    episodes, logits = policy.episodes(), policy.logits.clone().requires_grad_()
    probs = torch.softmax(policy.logits, 1).tolist()
    energy = {}
    for episode in episodes:
        rows = [probs[policy.block(episode[:t])] for t in range(len(episode))]
        tokens = zip(episode, rows, strict=True)
        energy[episode] = [sum(((v == y) - p) ** 2 for v, p in enumerate(row)) for y, row in tokens]
    estimates, chances = [], []
    for pair in itertools.product(episodes, repeat=2):
        rewards, energies = [policy.reward(episode) for episode in pair], [energy[episode] for episode in pair]
        credit = reference.otb(rewards, energies, [0, 0], leave_one_out=leave_one_out)
        logp = [policy.logp(logits, episode) for episode in pair]
        loss = sum((torch.tensor(a, dtype=torch.float64) * lp).sum() for a, lp in zip(credit, logp, strict=True)) / 2
        estimates.append(torch.autograd.grad(loss, logits)[0].flatten())
        chances.append(sum(float(lp.detach().sum()) for lp in logp))
    weights = torch.tensor(chances, dtype=torch.float64).exp()
    mean = weights @ torch.stack(estimates)
    exact = Groups.of(policy.world(), 2).exact("otb_loo" if leave_one_out else "otb")
    close(exact.mean, mean)
    variance = float(weights @ (torch.stack(estimates) - mean).square().sum(1))
    assert exact.variance == pytest.approx(variance, rel=1e-9)


@pytest.mark.parametrize(("name", "size"), CROWDS)
def test_leave_one_out_is_unbiased(name: str, size: int):
    world = WORLDS[name]
    groups = Groups.of(world, size)
    assert float(groups.probability.sum()) == pytest.approx(1.0)
    for estimator in UNBIASED:
        close(groups.exact(estimator).mean, world.gradient)


@pytest.mark.parametrize(("name", "size"), CROWDS)
def test_group_mean_is_biased_by_one_over_n_and_in_no_other_way(name: str, size: int):
    mine, theirs = (Groups.of(WORLDS[name], size).exact(estimator) for estimator in ("group_mean", "rloo"))
    close(mine.mean, (1 - 1 / size) * WORLDS[name].gradient)
    assert mine.noise == pytest.approx(theirs.noise)


@pytest.mark.parametrize("name", ["careful", "rare"])
@pytest.mark.parametrize("estimator", ["group_mean", "grpo", "rloo"])
def test_with_a_reward_of_0_or_1_what_reads_returns_alone_points_the_right_way(name: str, estimator: str):
    assert Groups.of(WORLDS[name], 3).exact(estimator).cosine == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("estimator", ["otb", "otb, instantaneous", "otb, uniform"])
def test_weighted_advantages_cancel_in_every_group_wherever_two_rows_live(estimator: str):
    groups = Groups.of(WORLDS["memory 0"], 3)
    weighted = weights_of(groups.world)[estimator][groups.token] * groups.advantages(estimator)
    lengths = groups.starts.diff()
    ordinal = torch.arange(len(groups.token)) - torch.repeat_interleave(groups.starts[:-1], lengths)
    cell = torch.repeat_interleave(groups.group, lengths) * 3 + ordinal
    total, alive = (
        torch.zeros(3 * len(groups.probability), dtype=torch.float64).index_add(0, cell, values)
        for values in (weighted, torch.ones_like(weighted))
    )
    assert int((alive >= 2).sum()) > 1000
    assert float(total[alive >= 2].abs().max()) < 1e-6


@pytest.mark.slow
def test_the_readme_holds_what_the_enumeration_gives():
    number = r"-?\d+\.?\d*(?:e[+-]?\d+)?"
    wanted = enumeration.table()
    text = README.read_text(encoding="utf-8")
    begin = text.index(wanted.splitlines()[0])
    shown = text[begin : text.index("\n\n", text.index("many episodes:", begin))]
    assert re.sub(number, "#", shown) == re.sub(number, "#", wanted), "print it with tests/algos/enumeration.py"
    ours, theirs = (list(map(float, re.findall(number, part))) for part in (shown, wanted))
    assert ours == pytest.approx(theirs, rel=0.006, abs=0.0011)
    assert all(f"| {name} |" in shown for name in enumeration.ESTIMATORS)
