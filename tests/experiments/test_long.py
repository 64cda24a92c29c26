"""Part G: what its tasks ask, which runs it has, and what is kept of one by position."""

import sys
from typing import Any

import pytest

from agentrl.algos import aggregation
from agentrl.config import load_config

from .conftest import load

long = load("long")


def test_an_episode_is_long_and_a_single_slip_loses_it(clean_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "relay", raising=False)
    relay = load("relay")
    env = relay.Relay(lines=10, length=40)
    task = env.tasks("train")[0]
    turns = env.gold_turns(task)
    lines = relay.lines_of(task)
    assert (len(turns), {len(line) for line in lines}) == (10, {40})
    for slip, reward in ((False, 1.0), (True, 0.0)):
        env.reset(options={"task": task.id})
        played = [turn.replace(lines[3], lines[3][::-1]) if slip else turn for turn in turns]
        results = [env.step(turn) for turn in played]
        assert [terminated for _, _, terminated, _, _ in results] == [False] * 9 + [True]
        assert sum(float(paid) for _, paid, *_ in results) == reward


def test_runs_for_results_follow_the_rates_that_were_tried() -> None:
    rates = list(long.units([]))
    assert {unit["purpose"] for unit in rates} == {"rates"} and len(rates) == len(long.ARMS) * len(long.RATES)

    def row(unit: dict[str, Any]) -> dict[str, Any]:
        won = {1e-4: 3, 3e-4: 20, 1e-3: 9}[unit["lr"]]
        return {"unit": unit, "successes": [won] * unit["steps"], "episodes": [32] * unit["steps"]}

    planned = list(long.units([row(unit) for unit in rates]))
    results = [unit for unit in planned if unit["purpose"] == "results"]
    assert len([unit for unit in planned if unit["purpose"] == "further"]) == 2 * len(long.FURTHER_SEEDS)
    assert len(results) == len((*long.ARMS, *long.OTHERS)) * len(long.SEEDS)
    assert {unit["lr"] for unit in results} == {3e-4}


def test_the_comparison_with_the_defaults_has_the_defaults_and_a_verdict_once_all_pairs_are_there() -> None:
    for arm in long.AS_SHIPPED:
        config = load_config(path=long.CONFIG, overrides=long.overrides(arm.settings))
        shipped = load_config(path=long.CONFIG)
        assert config.optim.max_grad_norm == shipped.optim.max_grad_norm
        assert aggregation("ctpo", config.algo.loss_options) == aggregation("ctpo", {})

    def row(arm: Any, seed: int, won: int) -> dict[str, Any]:
        return {"unit": arm.unit("G", "defaults", lr=3e-4, seed=seed, steps=2), "successes": [won], "episodes": [32]}

    for more, holds in ((4, True), (0, False)):
        rows = [
            row(arm, seed, 10 + seed % 3 + more * (arm is long.AS_SHIPPED[1]))
            for seed in long.SHIPPED_SEEDS
            for arm in long.AS_SHIPPED
        ]
        assert [long.verdicts({"G": rows[:count]})[-1].holds for count in (0, 10, 12)] == [None, None, holds]


def test_figures_by_position_are_means_of_the_steps_that_have_them() -> None:
    steps = [
        {"S_std_t1": 0.1, "S_std_t512": 3.0, "clip_fraction_t1": 0.5, "S_std": 9.0},
        {"S_std_t1": 0.3, "clip_fraction_t1": 0.0},
    ]
    assert long.by_position(steps) == {"S_std": {"1": 0.2, "512": 3.0}, "clip_fraction": {"1": 0.25}}
    assert long.slope([(8, 2.0), (32, 4.0), (128, 8.0)]) == pytest.approx(0.5)
