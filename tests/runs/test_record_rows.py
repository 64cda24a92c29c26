"""Episodes of several rows on disk: they are read as they were written, and hostile rows are refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.runs.records import read_episodes, write_episodes
from agentrl.segments import Row, complete_rows
from agentrl.types import Segment, Stop, Trajectory

from ..forests import forest
from .origins import ORIGIN, Signs
from .test_records import fails, line


@given(st.integers(0, 2**32), st.integers(2, 8))
def test_rows_and_numbers_in_time_are_read(tmp_path_factory: pytest.TempPathFactory, seed: int, count: int) -> None:
    path, rng = tmp_path_factory.mktemp("records") / "e.jsonl", random.Random(seed)
    played = [forest(rng, Segment("prompt", (5,)), count), forest(rng, Segment("prompt", (6,)), 1)]
    numbers = [[float(at) for at in range(each.n_sampled)] for each in played]
    write_episodes(path, played, Signs(), ORIGIN, numbers, [{"entropy": values} for values in numbers])
    for record, episode, values in zip(read_episodes(path), played, numbers, strict=True):
        assert record.trajectory == episode and record.trajectory.rows == episode.rows
        assert record.advantages == record.training["entropy"] == tuple(values)
        assert record.pieces == tuple(tuple(map(chr, segment.token_ids)) for segment in episode.segments)
    many, single = map(json.loads, path.read_bytes().splitlines())
    assert "segments" not in many and "rows" not in single
    # Each segment holds the numbers of its own tokens, wherever its row stands.
    held = sorted((segment["turn"], segment["advantages"]) for row in many["rows"] for segment in row["segments"]
                  if "turn" in segment)  # fmt: skip
    assert [number for _, own in held for number in own] == numbers[0]


PART = {"source": "prompt", "token_ids": [5], "pieces": ["\x05"]}
TURN = {"source": "policy", "token_ids": [7], "pieces": ["\x07"], "logprobs": [-1.0], "version": 0}


def row(parent: int | None, fork: int, *segments: dict[str, Any]) -> dict[str, Any]:
    return {"parent": parent, "fork": fork, "segments": segments}


FORESTS: list[tuple[list[dict[str, Any]], str]] = [
    ([row(None, 0, PART), row(7, 1)], "row 1 continues row 7, which begins nowhere"),
    ([row(None, 0, PART), row(-1, 1)], "can't inherit 1 tokens of row -1"),
    ([row(None, 0, PART), row(2, 1), row(1, 1)], "row 1 continues row 2, which begins nowhere"),
    ([row(None, 0, PART), row(1, 1)], "row 1 continues row 1, which begins nowhere"),
    ([row(None, 0, PART), row(0, 2)], "row 1 inherits 2 tokens of a row of 1"),
    ([row(None, 0, PART), row(0, 0)], "can't inherit 0 tokens of row 0"),
    ([row(None, 0, PART), row(0, 10**30)], "row 1 inherits 1000000000000000000000000000000 tokens of a row of 1"),
    ([row(None, 0, PART), row(None, 1, PART)], "begins with a prompt of its own, and inherits nothing"),
    ([row(None, 0, PART), row(None, 0)], "begins with a prompt of its own"),
    ([row(None, 0, PART), row(None, 0, TURN)], "begins with a prompt of its own"),
    ([row(1, 1), row(None, 0, PART)], "the first row of an episode continues another one"),
    ([row(None, 0, PART, {**TURN, "turn": 0}), row(0, 1, TURN)], "needs a number of its own, or none has one"),
    ([row(None, 0, PART, {**TURN, "turn": 3}), row(0, 1, {**TURN, "turn": 3})], "needs a number of its own"),
    ([row(None, 0, PART, {**TURN, "turn": -1})], "a turn is a number from 0, not -1"),
    ([row(None, 0, PART, {**TURN, "turn": True})], "turn"),
    ([row(None, 0, {**PART, "turn": 0})], "was not sampled"),
    ([row(None, 0, PART), {"parent": None, "segments": 3}], "segments"),
    (
        [row(None, 0, {**PART, "token_ids": [5] * 40_000, "pieces": ["\x05"] * 40_000}), *[row(0, 40_000)] * 2000],
        "the rows of an episode have 80040000 tokens together, more than 67108864",
    ),
]


@pytest.mark.parametrize(("rows", "words"), FORESTS)
def test_hostile_rows_are_refused(tmp_path: Path, rows: list[Any], words: str) -> None:
    good, turns = forest(random.Random(0), Segment("prompt", (5,)), 3), str(rows).count("logprobs")
    reason = fails(tmp_path, good, line(tmp_path, good, rows=rows, rewards=[0.0] * turns))
    assert words in reason and "\n" not in reason and len(reason) < 500


def test_rows_and_other_segments_are_refused(tmp_path: Path) -> None:
    good = forest(random.Random(0), Segment("prompt", (5,)), 3)
    assert "has segments and other rows" in fails(tmp_path, good, line(tmp_path, good, segments=[PART]))


def test_a_long_chain_of_rows_is_read(tmp_path: Path) -> None:
    prompt, turn = Segment("prompt", (5,)), Segment("policy", (7,), (-1.0,), 0)
    rows = (Row((prompt,)), *(Row((turn,), at, at + 1) for at in range(5000)))
    chain = Trajectory(task_id="t", seed=0, rows=rows, rewards=(0.0,) * 5000, stop=Stop.TERMINATED)
    write_episodes(tmp_path / "e.jsonl.zst", [chain], Signs(), ORIGIN)
    (record,) = read_episodes(tmp_path / "e.jsonl.zst")
    assert record.trajectory == chain and len(complete_rows(record.trajectory.rows)[-1]) == 5001
