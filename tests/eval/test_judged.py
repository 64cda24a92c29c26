"""Judges of known faults: what disagrees, loves length or the first position, or accepts anything, is found out."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.eval.judged import TRIVIAL
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


CREDULOUS = Credulous("m", "Nice?")


def test_a_judge_is_asked_about_trivial_answers_and_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The last task has one answer alone, and so no pair.
    rows = [(task, text, 1.0) for task in range(8) for text in ("a", "b", "a")[: 1 if task == 7 else 3]]
    path = str(judged(tmp_path / "e.jsonl", rows))
    name = f"{__name__}:CREDULOUS"
    assert main(["probe", path, "--ask", name, "--json"]) == 0
    accepted, biased = json.loads(capsys.readouterr().out)
    assert (accepted["share"], accepted["cases"]) == (0.5, 8 * len(TRIVIAL)) and accepted["low"] > 0.3
    assert (biased["share"], biased["cases"]) == (1.0, 14) and biased["low"] > 0.5
    assert main(["probe", path, "--ask", name, "--judge", "kind", "--id", "train:7"]) == 0
    shown = capsys.readouterr().out
    assert "of trivial answers: accepted" in shown and "kind agrees" in shown and "in both orders" not in shown
    for wrong, why in (
        ("nowhere:X", "judge 'nowhere:X' needs nowhere: install it, or put its folder into PYTHONPATH"),
        (f"{__name__}:judged", "is a function: name an agentrl.judge.Judge"),
    ):
        assert main(["probe", path, "--ask", wrong]) == 2
        assert why in capsys.readouterr().err
