"""What is drawn of a run; test_browser.py looks at how."""

import math
import random

from agentrl.runs.report.charts import Stack, curve, diagnostics, planned, seconds_by_phase


def evals(*rows: tuple[float, float]) -> list[dict[str, object]]:
    return [
        {"step": step, "success": rate, "low": rate - 0.1, "high": rate + 0.1, "tasks": 50, "split": "test"}
        for step, rate in rows
    ]


def test_curve_has_lines_band_legend_and_tooltips() -> None:
    (chart,) = curve(evals((0, 0.2), (10, 0.6)), [{"step": 1, "reward_mean": 0.3}, {"step": 2, "reward_mean": 0.4}])
    reward, success = chart.lines
    assert (reward.style, reward.points) == ("reward", [(1, 0.3), (2, 0.4)])
    assert (success.style, success.points) == ("success", [(0, 0.2), (10, 0.6)]) and success.labels
    assert success.band == [(0, 0.1, 0.2 + 0.1), (10, 0.5, 0.7)]
    assert success.titles[1] == "step 10: success 60.0%, 95% interval 50.0% to 70.0%, 50 problems"
    assert [style for style, _ in chart.keys] == ["success", "reward"] and "95% interval" in chart.keys[0][1]


def test_curve_tells_attempts() -> None:
    (chart,) = curve([{"step": 0, "split": "test", "success": 0.5, "tasks": 20, "attempts": 4}], [])
    (line,) = chart.lines
    assert line.titles == ["step 0: success 50.0%, 20 problems, 4 attempts each"] and not line.band


def test_reward_of_another_scale_gets_its_own_chart() -> None:
    steps = [{"step": step, "reward_mean": 40.0 + step} for step in range(3)]
    assert [line.style for line in curve(evals((0, 0.2)), steps)[0].lines] == ["success"]
    assert diagnostics(steps)[0].id == "reward_mean"


def test_charts_of_absent_keys_are_left_out() -> None:
    assert curve([], []) == [] == curve([{"step": 0, "split": "x"}], [{"step": 1, "loss": 0.1}])
    assert [chart.id for chart in diagnostics([{"step": 1, "grad_norm": 0.5}, {"step": 2}])] == ["grad_norm"]
    assert diagnostics([{"step": 1, "reward_mean": 0.5}]) == [] == seconds_by_phase([{"step": 1}])


def test_values_that_are_not_finite_are_left_out() -> None:
    rows = [{"step": 1, "entropy": math.nan}, {"step": 2, "entropy": 0.5}, {"step": 3, "entropy": "<b>"}]
    (chart,) = diagnostics(rows)
    assert chart.lines[0].points == [(2, 0.5)]


def test_seconds_are_averaged_over_at_most_60_bars() -> None:
    (chart,) = seconds_by_phase([{"step": 1, "seconds_generate": 3.0, "seconds_update": 1.0}, {"step": 2}])
    assert chart.bars == [Stack(span=(1, 1), parts=[("generate", 3.0), ("update", 1.0)])]
    noise = random.Random(0)
    (chart,) = seconds_by_phase([{"step": step, "seconds_score": noise.random()} for step in range(5000)])
    assert len(chart.bars) <= 60 and chart.bars[0].span == (0, 83)


def test_a_plan_of_tasks_has_a_line_for_each_kind() -> None:
    rows = [{"step": 1, "plan/level:1/share": 0.25, "plan/level:1/success": 0.5}, {"step": 2, "plan/a%2Fb/share": 1.0}]
    share, success = planned(rows)
    assert [(line.name, line.points) for line in share.lines] == [("a/b", [(2, 1.0)]), ("level:1", [(1, 0.25)])]
    assert [line.points for line in success.lines] == [[(1, 0.5)]] and success.keys == [("run0", "level:1")]
    assert len(planned([{"step": 1, **{f"plan/{n}/share": 0.1 for n in range(20)}}])[0].lines) == 12
    assert planned([{"step": 1, "reward_mean": 0.5}]) == []
