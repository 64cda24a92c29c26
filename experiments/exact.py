"""What is exactly true of estimators and ratios, by listing every group that can occur? Part A of PLAN.md.

Policies have two or three tokens and at most four positions. What is written are errors of the plan's statements, and
bias and variance of each estimator and of each ratio.

Legend: Y episodes of a policy, S tokens of all of them end to end, P parameters, N rows of a group.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rows import FOLDER, ROOT, RowFile, commit_of, digits
from torch import Tensor

from agentrl import algos
from agentrl.algos.ratios import cumulative_log_ratio, token_log_ratio

sys.path.append(str(ROOT / "tests" / "algos"))
from enumeration import ESTIMATORS, POLICIES, Episode, Exact, Groups, Policy, World, by_prefix, steps, terminal

EXAMPLES = """examples:
  python experiments/exact.py               the rows that are missing, in a minute or two
  python experiments/exact.py --out A.jsonl elsewhere
"""
SIZES = (1, 2, 4)
"""N of groups."""
POOLED: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "otb_pooled": ("otb_pooled", {}),
    **{f"otb pool {pool:g}": ("otb", {"pool": pool, "tail": "carry"}) for pool in (0.5, 1.0, 4.0)},
}
"""Estimators that read another group, by the name that tables have for them."""
SEEDS = range(4)
"""Of random policies, and of the directions in which they drift."""
DRIFTS = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Mean |log ratio| of a sequence, in nats."""
BASELINES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Constants for the second moment."""


def random_policy(seed: int, tokens: int, longest: int) -> Policy:
    """A policy with parameters for each prefix; two of five episodes return 1, the others 0."""
    bodies = range(1, tokens)
    prefixes = [prefix for t in range(longest) for prefix in itertools.product(bodies, repeat=t)]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(prefixes), tokens, generator=generator, dtype=torch.float64).tolist()
    policy = by_prefix(dict(zip(prefixes, logits, strict=True)), longest, terminal(lambda episode: 0.0))
    episodes = policy.episodes()
    order = torch.randperm(len(episodes), generator=generator).tolist()
    won = {episodes[number] for number in order[: math.ceil(0.4 * len(episodes))]}
    return replace(policy, reward=terminal(lambda episode: float(episode in won)))


def of_group(world: World, size: int) -> dict[str, dict[str, float]]:
    """Bias and variance of every estimator that reads one group, over all groups of a policy."""
    groups = Groups.of(world, size)
    return {name: _errors(groups.exact(name)) for name in ESTIMATORS}


def of_pool(world: World, size: int) -> dict[str, float]:
    """Bias and variance of ``otb_pooled`` where a step has one other group of the same policy and size.

    No row of a group reads another row of it. So its episodes can be credited side by side, each once, against every
    other group, and given that group the rows of a group are independent.
    """
    others = Groups.of(world, size)
    lengths = world.starts.diff()
    mean, square = torch.zeros_like(world.gradient), 0.0
    group = torch.tensor([0] * len(lengths) + [1] * size)
    for number, chance in enumerate(others.probability.tolist()):
        token, row_lengths = others.rows_of(number)
        tokens = torch.cat([torch.arange(len(world.rewards)), token])
        starts = torch.nn.functional.pad(torch.cat([lengths, row_lengths]).cumsum(0), (1, 0))
        credit = algos.advantage("otb_pooled", world.rewards[tokens], world.energy[tokens], starts, group)
        rows = world.row_gradients(credit[: len(world.rewards)])
        of_row = Exact.of(world.probability, rows, world.gradient)
        mean += chance * of_row.mean
        square += chance * (of_row.variance / size + float(of_row.mean.square().sum()))
    return _errors(Exact(mean=mean, variance=square - float(mean.square().sum()), truth=world.gradient))


def of_steps(tasks: Sequence[World], size: int) -> dict[str, dict[str, float]]:
    """Bias and variance of the first group's gradient over all steps of one group of each task."""
    mean = torch.zeros(len(POOLED), tasks[0].score.shape[1], dtype=torch.float64)
    square = torch.zeros(len(POOLED), dtype=torch.float64)
    for step in steps(tasks, size):
        credit = torch.stack([
            algos.advantage(name, step.rewards, step.energy, step.starts, step.group, **options)
            for name, options in POOLED.values()
        ])  # fmt: skip
        token = step.tokens[0]
        gradients = credit[:, : len(token)] @ tasks[0].score[token] / size
        mean += step.probability * gradients
        square += step.probability * gradients.square().sum(1)
    variance = square - mean.square().sum(1)
    return {
        name: _errors(Exact(mean=centre, variance=float(spread), truth=tasks[0].gradient))
        for name, centre, spread in zip(POOLED, mean, variance, strict=True)
    }


def moments(world: World) -> dict[str, Any]:
    """Second moment of an episode's gradient with constant baselines, and what the formula of A2 says.

    Returns:
        p, β, e, and for each of ``BASELINES`` the pair of both.
    """
    ret, chance = world.returns, world.probability
    squared = world.row_gradients(torch.ones_like(world.rewards)).square().sum(1)
    energy = float(chance @ squared)
    beta = float((chance * ret) @ squared) / energy
    pairs = []
    for baseline in BASELINES:
        credit = torch.repeat_interleave(ret - baseline, world.starts.diff())
        measured = float(chance @ world.row_gradients(credit).square().sum(1))
        pairs.append([baseline, measured, energy * ((baseline - beta) ** 2 + beta * (1 - beta))])
    return {"p": float(chance @ ret), "beta": beta, "e": energy, "moments": pairs}


def drifted(policy: Policy, seed: int, drift: float) -> Policy:
    """The policy after a step in a random direction, so long that a sequence's log ratio is ``drift`` on average."""
    generator = torch.Generator().manual_seed(1000 + seed)
    direction = torch.randn(policy.logits.shape, generator=generator, dtype=torch.float64)
    before, low, high = policy.world().probability, 0.0, 64.0

    def at(length: float) -> Policy:
        return replace(policy, logits=policy.logits + length * direction)

    for _ in range(60):
        middle = (low + high) / 2
        moved = float(before @ (at(middle).world().probability / before).log().abs())
        low, high = (middle, high) if moved < drift else (low, middle)
    return at((low + high) / 2)


def values(world: World, episodes: Sequence[Episode]) -> Tensor:
    """Q of each token, the expected return to go once it is there [S]."""
    expected: list[float] = []
    chance, parts = world.probability.tolist(), world.to_go.split(world.starts.diff().tolist())
    for episode in episodes:
        for t in range(len(episode)):
            same = [number for number, other in enumerate(episodes) if other[: t + 1] == episode[: t + 1]]
            reached = sum(chance[number] for number in same)
            expected.append(sum(chance[number] * float(parts[number][t]) for number in same) / reached)
    return torch.tensor(expected, dtype=torch.float64)


def ratios(old: Policy, new: Policy) -> dict[str, dict[str, dict[str, float]]]:
    """Bias and variance of one episode's gradient by each ratio, with the sampled return and with Q.

    The old policy plays; the truth is the new policy's gradient. There is no baseline and no window.
    """
    before, after = old.world(), new.world()
    logp, old_logp = (
        torch.cat([policy.logp(policy.logits, episode) for episode in policy.episodes()]) for policy in (new, old)
    )
    lengths = before.starts.diff()
    total = cumulative_log_ratio(logp, old_logp, before.starts)
    whole = torch.repeat_interleave(total[before.starts[1:] - 1], lengths)
    weights = {
        "none": torch.zeros_like(total),
        "token": token_log_ratio(logp, old_logp),
        "gspo": whole / torch.repeat_interleave(lengths, lengths),
        "prefix": total,
        "full": whole,
    }
    errors: dict[str, dict[str, dict[str, float]]] = {}
    for credit, value in {"return": before.to_go, "Q": values(after, new.episodes())}.items():
        errors[credit] = {}
        for name, weight in weights.items():
            rows = after.row_gradients(weight.exp() * value)
            errors[credit][name] = _errors(Exact.of(before.probability, rows, after.gradient))
    return errors


def _errors(exact: Exact) -> dict[str, float]:
    """Bias ‖E ĝ − g‖/‖g‖, variance over ‖g‖², and the cosine of E ĝ to g, which is 0 where E ĝ is."""
    variance = exact.variance / float(exact.truth.norm()) ** 2
    return {"bias": digits(exact.bias), "variance": digits(variance), "cosine": digits(exact.cosine)}


def units() -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Every unit, and the function that does it."""
    for (name, policy), size in itertools.product(POLICIES.items(), SIZES):
        unit = {"part": "A", "question": "estimators", "policy": name, "group_size": size}
        yield unit, partial(_estimators, policy, size)
    for seed, size in itertools.product(SEEDS, SIZES):
        unit = {"part": "A", "question": "steps", "policy": f"random {seed}", "group_size": size}
        yield unit, partial(_steps, [random_policy(seed, 2, 3), random_policy(seed + 50, 2, 3)], size)
    binary = {name: POLICIES[name] for name in ("careful", "rare")}
    for name, policy in {**binary, **{f"random {seed}": random_policy(seed, 3, 4) for seed in SEEDS}}.items():
        yield {"part": "A", "question": "moment", "policy": name}, partial(moments, policy.world())
    for seed, drift in itertools.product(SEEDS, DRIFTS):
        unit = {"part": "A", "question": "ratios", "policy": f"random {seed}", "drift": drift}
        yield unit, partial(_ratios, random_policy(seed, 3, 4), seed, drift)


def _estimators(policy: Policy, size: int) -> dict[str, Any]:
    world = policy.world()
    return {"arms": {**of_group(world, size), "otb_pooled": of_pool(world, size)}}


def _steps(policies: Sequence[Policy], size: int) -> dict[str, Any]:
    return {"arms": of_steps([policy.world() for policy in policies], size)}


def _ratios(old: Policy, seed: int, drift: float) -> dict[str, Any]:
    return {"arms": ratios(old, drifted(old, seed, drift))}


def run(rows: RowFile, only: str = "") -> None:
    """Do the units that have no row; of one question only, where it is named."""
    for unit, work in units():
        if not rows.has(unit) and only in ("", unit["question"]):
            rows.add(unit, **work())


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rows of part A that are not there yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=FOLDER / "A.jsonl", help="the file of rows")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    run(RowFile(arguments.out, commit_of()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
