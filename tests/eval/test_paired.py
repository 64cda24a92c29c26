"""The statistics of a comparison against enumeration, a slow bootstrap, and simulated experiments."""

import itertools
import math
import random
from statistics import quantiles

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.eval.paired import bootstrap, contrast, mcnemar, tasks_needed


@given(st.integers(0, 6), st.integers(0, 6))
def test_mcnemar_counts_all_ways_that_are_at_least_as_uneven(better: int, worse: int) -> None:
    ways = list(itertools.product((0, 1), repeat=better + worse))
    uneven = [way for way in ways if abs(2 * sum(way) - len(way)) >= abs(better - worse)]
    assert mcnemar(better, worse) == pytest.approx(len(uneven) / len(ways))


def test_mcnemar_of_many_pairs_is_a_number() -> None:
    assert mcnemar(6000, 6000) == 1.0 and 0.0 <= mcnemar(0, 5000) < 1e-300
    assert mcnemar(5100, 4900) == pytest.approx(math.erfc(199 / 100 / math.sqrt(2)), abs=1e-3)


def test_bootstrap_is_that_of_drawing_tasks_one_by_one() -> None:
    values = [0.25] * 9 + [-0.5] * 5 + [0.0] * 20 + [1.0] * 3
    rng = random.Random(0)
    drawn = [math.fsum(rng.choices(values, k=len(values))) / len(values) for _ in range(4000)]
    cuts = quantiles(drawn, n=40)
    assert bootstrap(values) == pytest.approx((cuts[0], cuts[-1]), abs=0.01)
    assert bootstrap(values) == bootstrap(values) and bootstrap([0.5]) == (0.5, 0.5)


@pytest.mark.parametrize(("up", "down"), [(0.2, 0.1), (0.1, 0.02), (0.3, 0.25), (0.05, 0.0)])
def test_so_many_tasks_show_the_difference_four_times_in_five(up: float, down: float) -> None:
    gains = [1.0] * round(1000 * up) + [-1.0] * round(1000 * down)
    n = tasks_needed(padded := gains + [0.0] * (1000 - len(gains)))
    # By hand, for 20% and 10%: (1.95996 √0.3 + 0.84162 √0.29)² / 0.01 = 233.1.
    assert n is not None and (n == 234 or (up, down) != (0.2, 0.1))
    assert tasks_needed([gain / 2 for gain in padded]) == n, "by the mean and the mean square, of several attempts too"
    for tasks, least, most in ((n, 0.74, 0.83), (n // 3, 0.0, 0.55)):
        drawn = np.random.default_rng(1).multinomial(tasks, [up, down, 1 - up - down], size=600)
        shown = sum(mcnemar(int(better), int(worse)) <= 0.05 for better, worse, _ in drawn) / 600
        assert least <= shown <= most


def test_attempts_at_a_task_are_one_pair() -> None:
    both = contrast([0.0, 0.5, 1.0], [1.0, 0.5, 0.5])
    assert (both.tasks, both.better, both.worse, both.difference) == (3, 1, 1, pytest.approx(1 / 6))
    assert (both.a, both.b, both.p) == (0.5, pytest.approx(2 / 3), 1.0)
    assert contrast([1.0], [1.0]).tasks_needed is None
