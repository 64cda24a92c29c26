"""Comparing arms within seeds."""

import math
from typing import Any

import pytest

from .conftest import load

contrast = load("contrast")


def run(*successes: int, tokens: int = 100, warm: str = "w") -> dict[str, Any]:
    steps = len(successes)
    return {"tokens": [tokens] * steps, "episodes": [10] * steps, "successes": [*successes], "warm": warm}


def test_a_success_is_reached_by_the_mean_of_three_steps() -> None:
    row = run(9, 0, 0, 9, 9, 9)
    assert contrast.levels(row) == [(300, 0.3), (400, 0.3), (500, 0.6), (600, 0.9)]
    assert contrast.reached(row, 0.5) == contrast.Reached(500, False)
    assert contrast.reached(row, 0.95) == contrast.Reached(600, True), "it counts with all its tokens"
    assert contrast.reached(run(9, 9), 0.5) == contrast.Reached(200, True)


def test_pairs_are_averaged_where_both_got_there_and_ranked_in_any_case() -> None:
    fast, slow, never = run(9, 9, 9, 9), run(0, 0, 0, 9, 9, 9), run(0, 0, 0, 0)
    a = {1: slow, 2: slow, 3: never, 4: never, 5: fast}
    b = {1: fast, 2: fast, 3: fast, 4: never, 6: fast}
    result = contrast.contrast(a, b, 0.7)
    assert result.ratio == pytest.approx(300 / 600) and len(result.logs) == 2
    assert (result.fewer, result.more) == (3, 0), "of two that never got there nobody knows"
    assert result.low == result.high == pytest.approx(0.5) and result.rank_p == 0.25
    assert result.p(1.0) == pytest.approx(2e-4) and result.p(0.4) == 1.0
    assert contrast.contrast({1: fast}, {2: fast}, 0.7) is None
    with pytest.raises(ValueError, match="seed 1 began with different weights"):
        contrast.contrast({1: fast}, {1: run(9, warm="other")}, 0.7)


def test_an_interval_covers_what_resampled_seeds_say() -> None:
    a = {seed: run(0, 0, 0, 9, 9, 9) for seed in range(20)}
    b = {seed: run(0, 0, 0, 9, 9, 9, tokens=60 + 4 * seed) for seed in range(20)}
    result = contrast.contrast(a, b, 0.7)
    logs = [math.log((60 + 4 * seed) / 100) for seed in range(20)]
    assert result.ratio == pytest.approx(math.exp(sum(logs) / 20)) and result.low < result.ratio < result.high
    error = (sum((log - sum(logs) / 20) ** 2 for log in logs) / 20 / 20) ** 0.5
    assert math.log(result.high / result.low) == pytest.approx(2 * 1.96 * error, rel=0.05)


def test_holm() -> None:
    assert contrast.holm({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})
