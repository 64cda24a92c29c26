import math
import random
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentrl.runs.report.axes import Frame, span, ticks, value_range
from agentrl.runs.report.charts import curve, diagnostics, seconds_by_phase

FINITE = st.floats(-1e12, 1e12, allow_nan=False)


@given(FINITE, FINITE, st.integers(2, 8))
def test_ticks_are_round_even_and_inside(low: float, high: float, about: int) -> None:
    low, high = span([low, high])
    assume(high - low > 1e-9)
    found = ticks(low, high, about)
    slack = 1e-6 * (high - low)
    assert 1 <= len(found) <= 3 * about
    assert all(low - slack <= tick <= high + slack for tick in found)
    if len(found) > 1:
        apart = found[1] - found[0]
        mantissa = apart / 10 ** math.floor(math.log10(apart) + 1e-6)
        assert min(abs(mantissa - good) for good in (1, 2, 5, 10)) < 1e-3


@given(st.lists(FINITE, min_size=1, max_size=5))
def test_value_axis_holds_zero_and_every_value(values: list[float]) -> None:
    low, high = value_range(values, 4)
    slack = 1e-6 * (high - low)
    assert low < high and low <= 0 <= high
    assert all(low - slack <= value <= high + slack for value in values)


def test_hand_worked_frame() -> None:
    frame = Frame(width=120, height=70, margin=(10, 10, 20, 10), steps=(0, 10), values=(0, 1))
    assert frame.path([(0, 0), (5, 0.5), (10, 1)]) == "M10.0 50.0L60.0 30.0L110.0 10.0"


def evals(*rows: tuple[float, float]) -> list[dict[str, object]]:
    return [
        {"step": step, "success": rate, "low": rate - 0.1, "high": rate + 0.1, "tasks": 50, "split": "test"}
        for step, rate in rows
    ]


def test_curve_has_line_band_legend_and_tooltips() -> None:
    drawn = curve(evals((0, 0.2), (10, 0.6)), [{"step": 1, "reward_mean": 0.3}, {"step": 2, "reward_mean": 0.4}])
    for expected in ('class="line success"', 'class="band"', 'class="line reward"', "95% interval</span>"):
        assert expected in drawn
    assert "<title>step 10: success 60.0%, 95% interval 50.0% to 70.0%, 50 problems</title>" in drawn
    assert "<title>step 2: training reward 0.4</title>" in drawn


def test_curve_tells_attempts() -> None:
    drawn = curve([{"step": 0, "split": "test", "success": 0.5, "tasks": 20, "attempts": 4}], [])
    assert "20 problems, 4 attempts each" in drawn and 'class="band"' not in drawn


def test_reward_of_another_scale_gets_its_own_chart() -> None:
    steps = [{"step": step, "reward_mean": 40.0 + step} for step in range(3)]
    assert 'class="line reward"' not in curve(evals((0, 0.2)), steps)
    assert 'id="chart-reward_mean"' in diagnostics(steps)[0]


def test_charts_of_absent_keys_are_left_out() -> None:
    assert curve([], []) == "" and curve([{"step": 0, "split": "x"}], [{"step": 1, "loss": 0.1}]) == ""
    found = diagnostics([{"step": 1, "grad_norm": 0.5}, {"step": 2}])
    assert [re.findall('id="([^"]+)"', chart) for chart in found] == [["chart-grad_norm"]]
    assert diagnostics([{"step": 1, "reward_mean": 0.5}]) == [] and seconds_by_phase([{"step": 1}]) == ""


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0, 1e-12, 1e199])
def test_one_point_is_drawn(value: float) -> None:
    (chart,) = diagnostics([{"step": 7, "entropy": value}])
    assert chart.count('class="dot diagnostic"') == 1 and "nan" not in chart


def test_values_that_are_not_finite_are_left_out() -> None:
    rows = [{"step": 1, "entropy": math.nan}, {"step": 2, "entropy": 0.5}, {"step": 3, "entropy": "<b>"}]
    (chart,) = diagnostics(rows)
    assert chart.count('class="target"') == 1 and "nan" not in chart and "<b>Entropy" in chart


def test_seconds_are_stacked_to_their_sum() -> None:
    chart = seconds_by_phase([{"step": 1, "seconds_generate": 3.0, "seconds_update": 1.0}, {"step": 2}])
    heights = [float(height) for height in re.findall(r'class="(?:generate|update)"[^>]*height="([\d.]+)"', chart)]
    assert heights[0] == pytest.approx(3 * heights[1], rel=0.01)
    assert "<title>step 1: generate 3 s · update 1 s</title>" in chart and "tools" not in chart


def test_long_runs_stay_small() -> None:
    noise = random.Random(0)
    keys = ("entropy", "seconds_generate", "seconds_score", "seconds_update")
    rows = [{"step": step} | {key: noise.random() for key in keys} for step in range(5000)]
    chart = seconds_by_phase(rows)
    assert chart.count('class="bar"') <= 60 and "<title>steps 0 to 83, mean: " in chart
    assert diagnostics(rows)[0].count('class="target"') <= 240
