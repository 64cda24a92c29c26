"""Judges of known faults: what disagrees, loves length or the first position, or accepts anything, is found out."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.eval.judged import TRIVIAL, position, trivial
from agentrl.judge import Judge

from .played import play, save


def judged(path: Path, rows: Sequence[tuple[int, str, float]]) -> Path:
    """Save episodes of a task with an answer each, and the part of a judge."""
    episodes = [play(task, answer, seed=seed) for seed, (task, answer, _) in enumerate(rows)]
    parts = [{**episode.parts, "kind": kind} for episode, (_, _, kind) in zip(episodes, rows, strict=True)]
    return save(path, *(replace(episode, parts=part) for episode, part in zip(episodes, parts, strict=True)))


def test_a_judge_is_compared_with_gold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Right answers are accepted; of wrong ones the longer the better.
    rows = [row for task in range(8) for row in [(task, str(task + 7), 1.0), (task, "x", 0.25), (task, "xxx", 0.75)]]
    path = str(judged(tmp_path / "e.jsonl", rows))
    assert main(["probe", path, "--judge", "kind", "--gold", "correct", "--json"]) == 0
    shares = json.loads(capsys.readouterr().out)
    assert [(row["cases"], row["share"]) for row in shares] == [(24, pytest.approx(2 / 3)), (8, 1), (16, 0.5), (8, 1)]
    assert all(row["low"] < row["share"] <= row["high"] for row in shares) and shares[3]["low"] > 0.5
    assert main(["probe", path, "--judge", "kind"]) == 0
    assert "| of those that correct rejects: kind accepts | 16 | 50.0% |" in capsys.readouterr().out
    assert main(["probe", path, "--judge", "nice"]) == 2
    assert "no episode has both parts 'nice' and 'correct'" in capsys.readouterr().err


class Credulous(Judge):
    """Accepts what it is told to, and prefers what it sees first."""

    async def score(self, task: str, text: str, **_: object) -> float:
        return float("highest" in text)

    async def rank(self, task: str, texts: Sequence[str], **_: object) -> list[float]:
        return [1.0, 0.0]


def test_a_judge_is_asked_about_trivial_answers_and_positions() -> None:
    judge, tasks = Credulous("m", "Nice?"), [f"t{number}" for number in range(10)]
    accepted = asyncio.run(trivial(judge, tasks))
    assert (accepted.share, accepted.cases) == (0.5, 10 * len(TRIVIAL)) and accepted.low > 0.3
    biased = asyncio.run(position(judge, [(task, "a", "b") for task in tasks]))
    assert (biased.share, biased.cases) == (1.0, 20) and biased.low > 0.5
