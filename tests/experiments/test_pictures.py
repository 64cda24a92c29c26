"""The pictures of the README: what they show is what the runs hold."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from agentrl.runs.records import Record, write_episodes
from agentrl.types import Segment, Stop, Trajectory

from ..runs.origins import ORIGIN
from .conftest import load

curves, pictures = load("curves"), load("pictures")
PIECES = {1: "Ask\n", 2: "7", 3: "<end>", 4: "tool\n", 5: "9\x00"}


class Words:
    """A tokenizer of five tokens."""

    def decode(self, token_ids: int | list[int], **_: Any) -> str:
        return "".join(PIECES[token] for token in ([token_ids] if isinstance(token_ids, int) else token_ids))


def episode(task: str, reward: float, *ids: int) -> Trajectory:
    sampled = Segment("policy", ids, (-0.1,) * len(ids), 0)
    segments = (Segment("prompt", (1,)), sampled, Segment("tool", (4, 5)))
    return Trajectory(task_id=task, seed=0, segments=segments, rewards=(reward,), stop=Stop("terminated"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps, whose second has three episodes on disk."""
    folder = tmp_path / "run"
    (folder / "episodes").mkdir(parents=True)
    played = [episode("a", 1.0, 2, 2, 3), episode("b", 0.0, 2, 2, 3), episode("b", 1.0, 2, 3)]
    credit = [(0.5, 0.5, 0.5), (-1.0, 0.0, 0.0), (1.0, 1.0)]
    write_episodes(folder / "episodes" / "step-000002.jsonl.zst", played, Words(), ORIGIN, credit)
    rows = {"evals.jsonl": [{"step": 0, "success": 0.5}], "metrics.jsonl": [{"step": 1, "reward/correct": 0.25}]}
    for name, lines in rows.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_both_pictures_are_drawn_from_run_folders(run: Path, tmp_path: Path) -> None:
    pictures.main([str(run), "--step", "2", "--out", str(tmp_path)])
    drawn = ElementTree.parse(tmp_path / "episode.svg").getroot()
    texts = [text.text for text in drawn.findall("{*}text")]
    assert "solved, return 1" in texts and "failed, return 0" in texts
    # The sampled tokens alone are shaded: two of the solved episode, three of the failed one, on a white card.
    shades = [rect.attrib["fill"] for rect in drawn.findall("{*}rect")]
    assert shades == ["#fff", "#1f5fbf", "#1f5fbf", "#d96c0c", "#5b6474", "#5b6474"]
    assert texts.count("Ask⏎") == 2 and texts.count("7") == 3 and texts.count("9U+0000") == 2
    assert texts.count("prompt") == texts.count("sampled") == 2
    assert ElementTree.parse(tmp_path / "quickstart.svg").getroot().findall("{*}circle")


def test_a_step_without_a_failure_has_no_picture(run: Path) -> None:
    records: list[Record] = list(pictures.read_episodes(run / "episodes" / "step-000002.jsonl.zst"))
    with pytest.raises(ValueError, match="choose another step"):
        pictures.contrast(records[:1])


def test_many_runs_are_a_mean_in_a_band(run: Path) -> None:
    drawn = ElementTree.fromstring(curves.figure([run] * 4, "Some"))
    assert len(drawn.findall("{*}path")) == 2 and len(drawn.findall("{*}circle")) == 4
    assert "training, 4 runs" in "".join(drawn.itertext())
