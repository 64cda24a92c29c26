"""Evaluation's numbers against enumeration, published intervals and hand-made groups."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.evaluate import interval, pass_at_k, summarise, wilson
from agentrl.types import Group, Segment, Stop, ToolRun, Trajectory


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_win(drawn: tuple[int, int, int]) -> None:
    attempts, wins, k = drawn
    outcomes = [True] * wins + [False] * (attempts - wins)
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(attempts, wins, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


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
def test_wilson_interval_is_the_published_one(wins: int, n: int, low: float, high: float) -> None:
    found = interval([1.0] * wins + [0.0] * (n - wins))
    assert found == wilson(wins / n, n)
    assert found == pytest.approx((low, high), abs=5e-5)


def test_attempts_at_one_task_are_not_independent() -> None:
    rates = [0.0, 0.5, 1.0, 0.75]
    mean = 0.5625
    error = math.sqrt(sum((rate - mean) ** 2 for rate in rates) / 3 / 4)
    assert interval(rates) == pytest.approx((max(0.0, mean - 1.96 * error), min(1.0, mean + 1.96 * error)), abs=1e-4)
    # All attempts of a task alike: as many facts as there are tasks, not episodes.
    assert interval([1.0, 0.0, 1.0]) == pytest.approx((0.2077, 0.9385), abs=1e-4)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=30))
def test_interval_holds_the_mean_and_stays_within_bounds(rates: list[float]) -> None:
    low, high = interval(rates)
    mean = sum(rates) / len(rates)
    assert 0.0 <= low <= mean + 1e-12 and mean - 1e-12 <= high <= 1.0


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_certainty_takes_more_than_a_few_tasks(rate: float) -> None:
    low, high = interval([rate] * 10)
    assert high - low == pytest.approx(0.2775, abs=1e-3)


def episode(task: str, ret: float, *, calls: tuple[bool, ...] = (), stop: Stop = Stop.TERMINATED) -> Trajectory:
    turn = Segment("policy", (2,), (-0.5,), 0)
    segments = [Segment("prompt", (1,)), *([turn, Segment("tool", (3,))] * len(calls)), turn]
    return Trajectory(
        task_id=task,
        seed=0,
        segments=tuple(segments),
        rewards=(*(0.0 for _ in calls), ret),
        stop=stop,
        tool_runs=tuple(ToolRun(name="python", ok=ok, wall_s=0.1) for ok in calls),
    )


def test_table_of_hand_made_groups() -> None:
    groups = [
        Group((episode("a", 1.0, calls=(True, False)), episode("a", 0.0), episode("a", 0.5), episode("a", 1.0))),
        Group((episode("b", 0.0, stop=Stop.TOKEN_LIMIT), *[episode("b", 0.0)] * 3)),
    ]
    table = summarise(groups, best_return=1.0, lost=3)
    assert (table.tasks, table.attempts, table.lost, table.truncated) == (2, 4, 3, 1)
    assert table.success == 0.25 and table.reward_mean == 2.5 / 8
    assert table.pass_at == pytest.approx({1: 0.25, 2: 0.5 * (1 - 1 / 6), 4: 0.5})
    assert (table.turns_mean, table.tool_calls_mean, table.tool_errors_mean) == (10 / 8, 2 / 8, 1 / 8)
    assert table.low == 0.0 and table.high == pytest.approx(0.25 + 1.96 * 0.25, abs=1e-4)
    assert json.loads(json.dumps(table.row()))["pass_at"] == {"1": 0.25, "2": pytest.approx(5 / 12), "4": 0.5}


@pytest.mark.parametrize(("ret", "best", "wins"), [(0.3, 0.1 + 0.2, 1), (0.1 + 0.2, 0.3, 1), (0.299, 0.3, 0)])
def test_success_is_the_best_return_within_rounding(ret: float, best: float, wins: int) -> None:
    table = summarise([Group((episode("a", ret),))], best_return=best)
    assert table.success == wins and table.pass_at == {1: wins}


def test_odd_numbers_of_attempts_get_their_own_pass_rate() -> None:
    table = summarise([Group(tuple(episode("a", ret) for ret in (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)))], best_return=1.0)
    assert table.pass_at == pytest.approx({1: 1 / 6, 2: 1 / 3, 4: 2 / 3, 6: 1.0})
