"""Part A of the plan: what is listed is what there is."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import load

exact, rows = load("exact"), load("rows")


def test_crediting_against_every_other_group_is_listing_all_steps() -> None:
    world = exact.random_policy(0, 2, 2).world()
    listed = exact.of_steps([world, world], 2)["otb_pooled"]
    pooled = exact.of_pool(world, 2)
    assert pooled["variance"] == pytest.approx(listed["variance"], rel=1e-5)
    assert max(pooled["bias"], listed["bias"]) < 1e-12 and listed["variance"] > 0.1


def test_what_mixes_in_the_own_group_is_biased_and_the_pool_alone_is_not() -> None:
    tasks = [exact.random_policy(seed, 2, 3).world() for seed in (1, 51)]
    errors = exact.of_steps(tasks, 1)
    assert errors["otb_pooled"]["bias"] < 1e-12
    assert all(errors[f"otb pool {pool}"]["bias"] > 0.01 for pool in ("0.5", "1", "4"))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_second_moment_is_that_of_the_formula(seed: int) -> None:
    moments = exact.moments(exact.random_policy(seed, 3, 3).world())
    assert 0 < moments["beta"] < 1 and 0 < moments["p"] < 1
    for _, measured, formula in moments["moments"]:
        assert measured == pytest.approx(formula, rel=1e-10)


def test_a_policy_drifts_as_far_as_it_is_told() -> None:
    old = exact.random_policy(2, 3, 3)
    new = exact.drifted(old, 0, 0.5)
    before = old.world().probability
    assert float(before @ (new.world().probability / before).log().abs()) == pytest.approx(0.5)


def test_values_are_those_of_playing_on() -> None:
    policy = exact.random_policy(3, 3, 3)
    world, episodes = policy.world(), policy.episodes()
    values = exact.values(world, episodes).split(world.starts.diff().tolist())
    chance = dict(zip(episodes, world.probability.tolist(), strict=True))
    for episode, value in zip(episodes, values, strict=True):
        assert float(value[-1]) == sum(policy.reward(episode))
        for t, longer in itertools.pairwise(range(len(episode))):
            after = {sequence: p for sequence, p in chance.items() if sequence[: t + 1] == episode[: t + 1]}
            wanted = sum(p * sum(policy.reward(sequence)) for sequence, p in after.items()) / sum(after.values())
            assert float(value[t]) == pytest.approx(wanted) and longer == t + 1


def test_which_ratios_are_biased() -> None:
    old = exact.random_policy(0, 3, 4)
    errors = exact.ratios(old, exact.drifted(old, 0, 1.0))
    unbiased = {(credit, name) for credit, arms in errors.items() for name, arm in arms.items() if arm["bias"] < 1e-12}
    assert unbiased == {("return", "full"), ("Q", "full"), ("Q", "prefix")}
    still = exact.ratios(old, old)
    assert all(arm["bias"] < 1e-12 for arms in still.values() for arm in arms.values())


def test_a_unit_is_done_once_and_rows_have_what_the_plan_asks(tmp_path: Path) -> None:
    path = tmp_path / "rows" / "A.jsonl"
    for _ in range(2):
        exact.run(rows.RowFile(path, "abc"), "moment")
    made = rows.read_rows(path)
    assert len(made) == 6 and len({str(row["unit"]) for row in made}) == 6
    assert {row["commit"] for row in made} == {"abc"} and all(len(row["date"]) == 10 for row in made)
    assert len(list(exact.units())) == 12 + 12 + 6 + 20
    assert torch.tensor([row["e"] for row in made]).min() > 0


@pytest.mark.slow
def test_part_a_made_again_is_what_was_committed() -> None:
    committed = rows.RowFile(rows.FOLDER / "A.jsonl", "")
    again = 0
    for unit, work in exact.units():
        if unit.get("group_size") == 4:
            continue  # takes minutes
        (row,) = (row for row in committed.rows if row["unit"] == unit)
        assert_close(json.loads(json.dumps(work())), row)
        again += 1
    assert again > 20


def assert_close(made: Any, committed: Any) -> None:
    if isinstance(made, dict):
        for name, value in made.items():
            assert_close(value, committed[name])
    elif isinstance(made, list):
        for pair in zip(made, committed, strict=True):
            assert_close(*pair)
    else:
        assert made == pytest.approx(committed, rel=1e-3, abs=1e-9)
