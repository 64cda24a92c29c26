"""Which runs of the pretrained model come next, and what they show."""

from typing import Any

from .conftest import load

pretrained = load("pretrained")
ARMS, RATES, SEEDS, OTB = pretrained.ARMS, pretrained.RATES, pretrained.SEEDS, pretrained.OTB
rate_of, results, units = pretrained.rate_of, pretrained.results, pretrained.units


def row_of(unit: dict[str, Any], successes: int) -> dict[str, Any]:
    counts = {"successes": [0, successes], "episodes": [32, 32], "held_out": [[0, 150, 0.1], [16, 150, successes / 32]]}
    return {"unit": unit, **counts}


def test_results_wait_for_the_rates_and_take_the_lowest_of_the_best() -> None:
    tuning = list(units([]))
    assert {(unit["arm"], unit["lr"]) for unit in tuning} == {(arm.name, lr) for arm in ARMS for lr in RATES}
    # Two points apart are alike: 20 and 21 of 64 are, and 19 are too far.
    rows = [row_of(unit, dict(zip(RATES, (19, 20, 21), strict=True))[unit["lr"]]) for unit in tuning]
    assert rate_of(OTB, rows[:-1]) == rate_of(OTB, rows) == RATES[1]
    assert rate_of(OTB, rows[:-3]) is None
    later = list(units(rows))[len(tuning) :]
    assert [(unit["seed"], unit["arm"]) for unit in later] == [(seed, arm.name) for seed in SEEDS for arm in ARMS]
    assert {unit["lr"] for unit in later} == {RATES[1]}


def test_the_table_has_the_mean_and_each_seed() -> None:
    rows = [row_of(OTB.unit("H", "results", lr=2e-5, seed=seed, steps=16), seed - 1990) for seed in reversed(SEEDS)]
    line = results({"H": rows}).splitlines()[-1]
    assert line == "| otb | 2e-05 | 17.2% (15.6%, 17.2%, 18.8%) | 34.4% (31.2%, 34.4%, 37.5%) |"
    assert results({}) == pretrained.NOT_RUN
