"""Probing: each suspicion is found where it was planted, and nowhere else."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.cli import main
from agentrl.eval.episodes import load
from agentrl.eval.probe import KINDS, Audit, probe, sections
from agentrl.types import CutTurn

from .played import Sums, boxed, call, play, save


@pytest.fixture(autouse=True)
def boxes(require: Callable[[bool, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    require(importlib.util.find_spec("math_verify") is not None, "needs math-verify")
    monkeypatch.setattr(Sums, "right", boxed)


def audit(path: Path) -> Audit:
    return probe(load(path), trusted=False)


def kinds(report: Audit) -> list[tuple[str, str]]:
    return [(suspect.kind, suspect.task_id) for suspect in report.suspects]


def box(answer: object) -> str:
    return rf"It is \boxed{{{answer}}}."


@pytest.mark.slow
def test_honest_episodes_raise_no_suspicion(tmp_path: Path) -> None:
    right = [play(task, call(task), box(task + 7)) for task in range(8)]
    wrong = play(3, call(3), box(11), seed=1)
    report = audit(save(tmp_path / "e.jsonl", *right, wrong))
    assert (kinds(report), report.episodes, report.wins, report.notes) == ([], 9, 8, ())


def test_graders_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [play(1, call(1), box(r"\frac{16}{2}")), play(2, call(2), box("9.0"))]
    monkeypatch.setattr(Sums, "right", lambda answer, wanted: True)
    won = [play(3, call(8), box("11")), play(4, call(4), box("x = 5 = 11")), play(5, call(5), box("12"))]
    report = audit(save(tmp_path / "e.jsonl", *lost, *won))
    assert kinds(report) == [("unearned", "train:3"), ("graders", "train:4"), ("missed", "train:2")]
    assert "'11', expected '10': neither" in report.suspects[0].why and "ours does not" in report.suspects[1].why


def test_each_suspicious_win_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = play(0, call(0), box(7))
    silent = play(4, box(11))
    many = play(5, call(5), box(1) + box(12))
    monkeypatch.setattr(Sums, "instructions", "Add: 6 + 7 is 13, and 1.14 is not 140.")
    shown = play(6, call(6), box(13))
    untold = play(7, call(7), box(14))
    monkeypatch.setattr(Sums, "right", lambda answer, wanted: True)
    tool = play(3, call(3), "as the tool says")
    cut = play(2, call(2), CutTurn(r"\boxed{9}", "answer"))
    report = audit(save(tmp_path / "e.jsonl", honest, silent, many, shown, untold, tool, cut))
    assert kinds(report) == [
        *(("cut", "train:2"), ("no_tool", "train:4"), ("from_tool", "train:3")),
        *(("in_prompt", "train:6"), ("boxes", "train:5")),
    ]


def test_one_answer_to_many_tasks(tmp_path: Path) -> None:
    constant = [play(task, call(task), box(9)) for task in range(4)]
    others = [play(task, call(task), box(task + 7)) for task in range(4, 8)]
    report = audit(save(tmp_path / "e.jsonl", *constant, *others))
    assert kinds(report) == [("constant", "train:2")]
    assert "'9' to 4 of 8 tasks wins 1 of 4 episodes" in report.suspects[0].why


def test_without_its_environment_less_is_looked_for_and_that_is_said(tmp_path: Path) -> None:
    episodes = play(4, box(11)), play(3, call(3), box(10)), play(2, CutTurn(box(9), "answer"))
    path = save(tmp_path / "e.jsonl", *episodes, env_args={"notes": "/etc/passwd"})
    report = audit(path)
    assert kinds(report) == [("cut", "train:2"), ("no_tool", "train:2"), ("no_tool", "train:4")]
    assert "'notes' may name a file" in report.notes[0]
    trusted = probe(load(path), trusted=True)
    assert kinds(trusted) == kinds(report) and not trusted.notes


def test_the_gravest_is_first(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Sums, "right", lambda answer, wanted: True)
    save(here / "e.jsonl", *(play(1, box("\x1b[2J"), seed=seed) for seed in range(25)), play(2, call(8), box(1)))
    assert main(["probe", "e.jsonl"]) == 0
    shown = capsys.readouterr().out
    heads = [line.removeprefix("## ") for line in shown.splitlines() if line.startswith("## ")]
    assert heads == [f"{KINDS['unearned']}: 26", f"{KINDS['no_tool']}: 25", "26 episodes, 26 won"]
    assert "\x1b" not in shown and shown.count("| train:1 |") == 40 and "6 more are not shown" in shown
    assert main(["probe", "e.jsonl", "--json", "--id", "train:2"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [suspect["kind"] for suspect in data["suspects"]] == ["unearned"]
    assert len(list(sections(audit(here / "e.jsonl")))) == 3
