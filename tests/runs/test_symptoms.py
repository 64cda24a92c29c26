"""Symptoms on made-up histories, each of which fails in one way, and on rows of runs that went well."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.runs.symptoms import PATIENCE, START, SYMPTOMS, Watch, watched

Change = Mapping[str, float]
PAGE = Path(__file__).parents[2] / "docs" / "symptoms.md"
GOOD_RUNS = Path(__file__).parent / "good_runs.jsonl"
HEALTHY = {
    **{"episodes": 64, "reward_mean": 0.5, "success": 0.5, "turns_mean": 2.0, "tool_calls": 64, "tool_errors": 1},
    **{"truncated": 2, "cut_turns": 3, "faults": 0, "entropy": 0.5, "advantage_abs": 0.2, "grad_norm": 0.1},
    **{"updates": 4, "clip_fraction": 0.05, "ratio_mean": 1.0, "log_ratio_abs_max": 0.8},
}
FAILURES: dict[str, tuple[Change, Change, str]] = {
    # What a failing step has, what another has that is not quite so bad, and a part of the sentence.
    "entropy_rising": ({"entropy": 0.9}, {"entropy": 0.69}, "0.9 nats, and was 0.5"),
    "entropy_gone": ({"entropy": 0.004}, {"entropy": 0.004, "success": 0.95}, "0.004 nats at a success of 50%"),
    "silent": ({"advantage_abs": 3e-7}, {"advantage_abs": 2e-6}, "taught nothing, at a mean reward of 0.50"),
    "unsolved": ({"success": 0, "reward_mean": 0.2}, {"success": 0, "reward_mean": 0.3}, "has succeeded in 15 steps"),
    "turns_cut": ({"cut_turns": 32}, {"cut_turns": 31}, "25% of the turns"),
    "episodes_cut": ({"truncated": 16}, {"truncated": 15}, "25% of the episodes"),
    "tools_dropped": ({"tool_calls": 8}, {"tool_calls": 13}, "0.12 tool calls, and had up to 1 "),
    "tools_failing": ({"tool_errors": 32}, {"tool_errors": 31}, "50% of the tool calls"),
    "ratios_off": ({"ratio_mean": 0.88}, {"ratio_mean": 1.09}, "is 0.88, and should be 1"),
    "clipped": ({"clip_fraction": 0.55}, {"clip_fraction": 0.5}, "clips 55% of the tokens"),
    "weights_still": ({"log_ratio_abs_max": 1e-6}, {"log_ratio_abs_max": 1e-6, "updates": 1}, "more than 1.0e-06"),
    "gradient_rising": ({"grad_norm": 1.1}, {"grad_norm": 1.0}, "is 1.1, and was 0.1"),
    "faulty": ({"faults": 7}, {"faults": 6}, "7 faults of the infrastructure in 64"),
}


def watch_of(name: str, *changes: Change) -> Watch:
    """Watch a run that begins well, but for the successes of one that never has any."""
    start: Change = {"success": 0, "reward_mean": 0.2} if name == "unsolved" else {}
    steps = enumerate([*[start] * START, *changes], start=1)
    return watched({"step": number, **HEALTHY, **change} for number, change in steps)


def shown(watch: Watch) -> list[tuple[str, float, float | None]]:
    return [(onset.symptom.name, onset.step, onset.end) for onset in watch.onsets]


@pytest.mark.parametrize("symptom", SYMPTOMS, ids=lambda symptom: symptom.name)
def test_a_symptom_is_shown_once_per_onset(symptom: Any) -> None:
    name, (bad, mild, sentence) = symptom.name, FAILURES[symptom.name]
    well: list[Change] = [{}] * PATIENCE
    assert not watch_of(name, *well, *[bad] * (PATIENCE - 1), {}, *[mild] * 20).onsets
    history = [*well, *[bad] * (PATIENCE + 4), {}, *[bad] * PATIENCE]
    onset = watch_of(name, *history).onsets[0]
    begun = START + 2 * PATIENCE
    assert shown(watch_of(name, *history)) == [(name, begun, None)], "one good step does not end it"
    assert sentence in onset.sentence and onset.sentence.endswith(f": {symptom.cause}; {symptom.remedy}")
    ended = START + len(history) + PATIENCE
    watch = watch_of(name, *history, *well, *[bad] * PATIENCE)
    assert shown(watch) == [(name, begun, ended), (name, ended + PATIENCE, None)] and watch.lasting == [name]


def test_good_runs_have_no_symptom() -> None:
    runs = [json.loads(line) for line in GOOD_RUNS.read_text().splitlines()]
    assert len(runs) >= 40
    for run in runs:
        columns = run["columns"]
        steps = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        assert len(steps) > PATIENCE and not watched(steps).onsets, run["name"]


@given(st.lists(st.dictionaries(
    st.sampled_from(["step", *HEALTHY]), st.none() | st.floats() | st.integers() | st.booleans() | st.text(max_size=2)
), max_size=20))  # fmt: skip
def test_rows_of_any_kind_are_judged(rows: list[dict[str, object]]) -> None:
    watch = watched(rows)
    assert all(onset.sentence for onset in watch.onsets)


def test_the_page_has_the_table() -> None:
    cells = re.findall(r"^\| `(\w+)` \|[^|]+\|[^|]+\| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), flags=re.M)
    plain = [tuple(cell.replace("`", "").lower() for cell in row) for row in cells]
    assert plain == [(symptom.name, symptom.cause.lower(), symptom.remedy.lower()) for symptom in SYMPTOMS]
