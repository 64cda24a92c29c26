"""The weight of the pool: its two variances and its noise, by slow loops."""

import math
import random
from statistics import mean, variance

import pytest
import torch

from .conftest import load

pool_weight = load("pool_weight")


def _rows() -> list[tuple[int, float, float]]:
    """Task, energy and return of each row; tasks differ in size, energy and success."""
    rng = random.Random(0)
    rates = ((12, 1.0, 0.2), (16, 3.0, 0.9), (20, 0.5, 0.6))
    return [
        (task, scale * rng.expovariate(1.0), float(rng.random() < rate))
        for task, (count, scale, rate) in enumerate(rates)
        for _ in range(count)
    ]


def test_variances_are_those_of_a_loop() -> None:
    rows = _rows()
    tasks = [[(w, r) for task, w, r in rows if task == number] for number in range(3)]
    e = [mean(w for w, _ in of) for of in tasks]
    best = [sum(w * r for w, r in of) / sum(w for w, _ in of) for of in tasks]
    # The mean of W·(R − β) is 0 in each task, so its variance is the plain one.
    of_one = [variance(w * (r - b) for w, r in of) / energy**2 for of, b, energy in zip(tasks, best, e, strict=True)]
    pool = sum(energy * b for energy, b in zip(e, best, strict=True)) / sum(e)
    within = sum(energy * v for energy, v in zip(e, of_one, strict=True)) / sum(e)
    between = sum(
        energy * ((b - pool) ** 2 - v / len(of)) for energy, b, v, of in zip(e, best, of_one, tasks, strict=True)
    ) / sum(e)
    columns = [torch.tensor(column, dtype=torch.float64) for column in list(zip(*rows, strict=True))[1:]]
    group = torch.tensor([task for task, _, _ in rows])
    assert pool_weight.variances(*columns, group) == pytest.approx((within, between), rel=1e-9)


def test_noise_is_that_of_a_loop() -> None:
    rows, size = _rows(), 4
    energy, returns = (torch.tensor(column, dtype=torch.float64) for column in list(zip(*rows, strict=True))[1:])
    group = torch.tensor([task for task, _, _ in rows])
    generator = torch.Generator().manual_seed(size)
    of_steps: list[list[float]] = []
    for _ in range(3):
        step = [rows[row] for row in pool_weight.drawn(group, size, generator)[0].tolist()]
        of_kappas = []
        for kappa in pool_weight.KAPPAS:
            total = 0.0
            for row, (task, w, r) in enumerate(step):
                own = [other for number, other in enumerate(step) if other[0] == task and number != row]
                others = [other for other in step if other[0] != task]
                # With κ = ∞ only the ratio of the pool is left.
                weight, of_own = (1.0, 0.0) if math.isinf(kappa) else (kappa / len(others), 1.0)
                top = of_own * sum(v * g for _, v, g in own) + weight * sum(v * g for _, v, g in others)
                below = of_own * sum(v for _, v, _ in own) + weight * sum(v for _, v, _ in others)
                total += w * (r - top / (below + 1e-8)) ** 2 / len(step)
            of_kappas.append(total)
        of_steps.append(of_kappas)
    tasks = [[(w, r) for task, w, r in rows if task == number] for number in range(3)]
    best = [sum(w * r for w, r in of) / sum(w for w, _ in of) for of in tasks]
    least = mean(mean(w * (r - b) ** 2 for w, r in of) for of, b in zip(tasks, best, strict=True))
    wanted = [mean(of_kappa) / least for of_kappa in zip(*of_steps, strict=True)]
    assert pool_weight.noise(energy, returns, group, size, 3) == pytest.approx(wanted, rel=1e-6)


def test_the_derived_weight_is_the_best_where_tasks_have_equal_energy() -> None:
    torch.manual_seed(0)
    group = torch.arange(24).repeat_interleave(64)
    rates = (0.5 + 0.3 * torch.randn(24)).clamp(0.02, 0.98)[group]
    returns, energy = (torch.rand(len(group)) < rates).double(), torch.empty(len(group)).exponential_().double()
    within, between = pool_weight.variances(energy, returns, group)
    assert 3 < within / between < 12
    for size in pool_weight.SIZES:
        by_kappa = dict(zip(pool_weight.KAPPAS, pool_weight.noise(energy, returns, group, size, 60), strict=True))
        assert min(by_kappa, key=by_kappa.__getitem__) in (4.0, 16.0), size
