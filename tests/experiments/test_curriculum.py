"""The comparison of plans of tasks: its runs, and how their tokens are counted."""

import sys
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.train.live import check_run

from .conftest import load

arms, curriculum = map(load, ("arms", "curriculum"))


def test_every_run_can_begin(clean_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "countdown", raising=False)
    load("countdown")
    units = list(curriculum.units(3))
    assert [unit["arm"] for unit in units] == list(curriculum.PLANS)
    for settings in (curriculum.WARM, *map(arms.settings_of, units)):
        sources = check_run(load_config(preset=arms.PRESET, overrides=arms.overrides(settings)))
        tags = [source.tasks[n].tags for source in sources.held_out.sources.values() for n in range(5)]
        assert tags == [(f"level:{level}",) for level in range(1, 6)]
        prompts = [source.tasks[n].prompt for source in sources.train.sources.values() for n in range(5)]
        assert [prompt.count(",") for prompt in prompts] == [1, 1, 2, 2, 3]


def row_of(arm: str, seed: int, tokens: int, *successes: float) -> dict[str, Any]:
    held_out = [[2 * number, 500, success] for number, success in enumerate(successes)]
    return {"unit": {"arm": arm, "seed": seed}, "tokens": [tokens] * 2 * len(successes), "held_out": held_out}


def test_tokens_to_a_success_are_interpolated_between_means_of_three() -> None:
    row = row_of("uniform", 0, 10, 0.1, 0.2, 0.3, 0.4, 0.2, 0.6)
    # The means are 0.1, 0.15, 0.2, 0.3, 0.3 and 0.4, after 0, 10, 20, 40, 60 and 80 tokens.
    assert curriculum.tokens_to(row, 0.14) == pytest.approx(8)
    assert curriculum.tokens_to(row, 0.25) == pytest.approx(30) and curriculum.tokens_to(row, 0.3) == pytest.approx(40)
    assert curriculum.tokens_to(row, 0.35) == pytest.approx(70) and curriculum.tokens_to(row, 0.5) is None
    table = curriculum.table([row, row_of("success", 0, 5, 0.1, 0.2, 0.3, 0.4, 0.2, 0.6), row_of("success", 1, 5, 0.1)])
    assert "`success`" in table and "0.50 times (0.50 to 0.50)" in table and "(1 of 2)" in table
