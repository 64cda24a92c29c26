"""An evaluation's page: tasks with their answers, and how they were played, in words."""

import html
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.eval.results import SetResult, write_results
from agentrl.eval.table import PlayedTasks
from agentrl.types import Group

from .played import origin, play

SETTINGS = {
    "model.dtype": "float32",
    "model.template_args": {"enable_thinking": False},
    "rollout.truncated.turn": "end",
}
ABOUT: dict[str, Any] = {"target": "m", "seed": 3, "settings": SETTINGS, "versions": {"agentrl": "1", "torch": "2"}}


def attempts(task: int, *answers: str) -> Group:
    episodes = (replace(play(task, answer, seed=at), attempt=at, answer=answer) for at, answer in enumerate(answers))
    return Group(tuple(replace(episode, expected=str(task + 7)) for episode in episodes))


def page(folder: Path, groups: Sequence[Group], **played: Any) -> str:
    folder.mkdir(exist_ok=True)
    episodes = PlayedTasks(groups=list(groups), lost=0, **played)
    result = SetResult(name="", origin=origin(), played=episodes)
    write_results(folder, [result], ABOUT)
    return (folder / "report.html").read_text(encoding="utf-8")


def lines(text: str, title: str) -> list[list[str]]:
    """The lines of the table below a heading."""
    section = text.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", section)
    return [[html.unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows]


def test_page_lists_tasks_and_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    groups = [attempts(1, "8", "8", "9"), attempts(2, "<b>", "1", "1")]
    text = page(Path("my evals"), groups, refused=["task 'x', attempt 0: the server refuses the request: filtered"])
    assert lines(text, "Results")[1][0] == "Sums-v0", "as a set is called that --env names"
    head, *tasks = lines(text, "Tasks")
    assert head == ["task", "success", "mean return", "expected answer", "given answers"]
    assert tasks == [
        ["train:2", "0 of 3", "0", "9", "1 (2 times), <b>"],
        ["train:1", "2 of 3", "0.667", "8", "8 (2 times), 9"],
    ]
    how = dict(lines(text, "How it was played")[1:])
    assert how["model.dtype"] == "float32" and how["versions"] == "agentrl 1, torch 2" and how["seed"] == "3"
    assert how["model.template_args"] == "enable_thinking False" and "test/Sums-v0" in how["set"]
    assert "{" not in text.partition("</style>")[2], "no dict of Python's"
    assert "agentrl view 'my evals'" in html.unescape(text) and "filtered" in text
    assert re.search(r'<td class="short">66.7%|<td class="short">33.3% \(', text), "an interval is on one line"


def test_long_answers_and_many_tasks_are_cut(tmp_path: Path) -> None:
    text = page(tmp_path, [attempts(at % 8, "9" * 200) for at in range(1200)])
    assert len(lines(text, "Tasks")) == 1001
    assert "These are the first 1,000 of 1,200." in text and "9" * 120 not in text and "9" * 119 + "…" in text
