"""How often the 95% intervals hold the truth, by simulation, and that they are the published ones where any are."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.eval.intervals import interval, wilson
from agentrl.eval.table import summarise
from agentrl.types import Group

from .test_table import answered

DRAWS = 10_000


@pytest.mark.parametrize(
    ("wins", "n", "low", "high"),
    [
        # Newcombe, Two-sided confidence intervals for the single proportion (1998), table I, method 3 (score).
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_one_attempt_a_task_is_wilsons_interval(wins: int, n: int, low: float, high: float) -> None:
    bounds = interval([1.0] * wins + [0.0] * (n - wins))
    assert bounds == wilson(wins / n, n) == pytest.approx((low, high), abs=5e-5)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=30))
def test_interval_holds_the_mean_and_stays_within_bounds(rates: list[float]) -> None:
    low, high = interval(rates, 4)
    mean = sum(rates) / len(rates)
    assert 0.0 <= low <= mean + 1e-12 and mean - 1e-12 <= high <= 1.0


def test_attempts_count_for_what_they_are_worth() -> None:
    wide, narrow = (np.diff(interval(rates, 16))[0] for rates in ([0.0, 1.0] * 50, [0.4, 0.6] * 50))
    (as_tasks,), (as_episodes,) = (np.diff(wilson(0.5, n)) for n in (100, 1600))
    assert wide == pytest.approx(as_tasks, rel=1e-6) and as_episodes <= narrow < 1.2 * as_episodes
    assert interval([0.0] * 10, 8) == wilson(0.0, 10), "ten tasks, not eighty, have been lost"


def wins(tasks: int, attempts: int, mean: float, likeness: float) -> np.ndarray:
    """Wins of tasks [draws, tasks] whose own rates are beta distributed, as alike as that says."""
    rng = np.random.default_rng([tasks, attempts, int(1000 * mean), int(10 * likeness)])
    spread = 1 / likeness - 1
    return rng.binomial(attempts, rng.beta(mean * spread, (1 - mean) * spread, size=(DRAWS, tasks)))


def held(intervals: Sequence[tuple[float, float]], truth: float) -> float:
    """Percent of intervals that hold the truth."""
    return 100 * sum(low - 1e-12 <= truth <= high + 1e-12 for low, high in intervals) / len(intervals)


# Ten tasks' worth of the rarer outcome and more.
MANY = [
    *((30, 32, 0.5, 0.6), (100, 32, 0.5, 0.3), (30, 4, 0.4, 0.3), (100, 8, 0.2, 0.6)),
    *((100, 4, 0.85, 0.3), (100, 32, 0.1, 0.8), (200, 4, 0.95, 0.6), (200, 8, 0.05, 0.3)),
]
# With fewer no interval is 95 ± 1: a normal one holds 76 to 90 times in 100 here.
FEW = [(30, 32, 0.98, 0.3), (30, 32, 0.05, 0.6), (100, 32, 0.01, 0.3), (5, 4, 0.5, 0.3), (10, 8, 0.9, 0.6)]


@pytest.mark.parametrize(("case", "within"), [*((case, 1) for case in MANY), *((case, 2.5) for case in FEW)])
def test_intervals_hold_95_times_in_100(case: tuple[int, int, float, float], within: float) -> None:
    _, attempts, mean, _ = case
    rates = (wins(*case) / attempts).tolist()
    assert held([interval(task_rates, attempts) for task_rates in rates], mean) == pytest.approx(95, abs=within)


def group(wins: int, attempts: int) -> Group:
    """Attempts at one task; of the wrong answers every second one is the same."""
    wrong = [("wrong" if at % 2 else str(at), 0.0) for at in range(attempts - wins)]
    return answered("t", *[("right", 1.0)] * wins, *wrong)


@pytest.mark.slow
@pytest.mark.parametrize("case", [(200, 4, 0.5, 0.3), (100, 32, 0.2, 0.6), (300, 8, 0.3, 0.1)])
def test_intervals_of_pass_at_k_and_of_majorities_hold_95_times_in_100(case: tuple[int, int, float, float]) -> None:
    drawn, attempts = wins(*case), case[1]
    by_wins = [summarise([group(count, attempts)], best_return=1.0) for count in range(attempts + 1)]
    sizes = {**{f"pass@{k}": (np.array([of.pass_at[k] for of in by_wins]), attempts // k) for k in (2, attempts)},
             "majority": (np.array([of.majority for of in by_wins]), 2)}  # fmt: skip
    for name, (rate, worth) in sizes.items():
        rates = rate[drawn]
        intervals = [interval(row, worth) for row in rates.tolist()]
        assert held(intervals, rates.mean()) == pytest.approx(95, abs=1), name


def test_an_evaluation_has_these_intervals() -> None:
    result = summarise([group(2, 4), group(0, 4), group(4, 4), group(2, 4)], best_return=1.0)
    assert result.pass_interval[2] == interval([5 / 6, 0.0, 1.0, 5 / 6], 2)
    assert result.pass_interval[4] == interval([1.0, 0.0, 1.0, 1.0])
    # Two right ones, and one wrong one of each kind: no tie. A tie of two is worth two trials.
    assert result.majority_interval == interval([1.0, 0.0, 1.0, 1.0])
    tied = summarise([group(1, 2), group(2, 2), group(0, 2)], best_return=1.0)
    assert tied.majority_interval == interval([0.5, 1.0, 0.0], 2)
