import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard

from agentrl.errors import RunFolderError, TrajectoryError
from agentrl.runs.records import read_episodes
from agentrl.runs.report import write_report, write_view
from agentrl.types import Stop, ToolRun

from .blocks import blocks
from .conftest import ANSWER, CALL, SYSTEM, Play, Save


def viewed(*paths: Path, every: bool = False) -> dict[str, Any]:
    """The blocks of the page that shows these files and folders."""
    page = paths[0].parent / "v.html"
    write_view(paths, page, every=every)
    return blocks(page)


def test_blocks_hold_every_token_and_number_of_the_file(play: Play, save: Save, tmp_path: Path) -> None:
    hostile = "</script><b>\u202e\x00\U0001f600 x\ud800"[:-1]
    path = save(tmp_path, 1, play(SYSTEM, CALL, hostile, ANSWER, reward=1.0, stop=Stop.TURN_LIMIT))
    assert write_view([path], tmp_path / "v.html") == 1
    held, (record,) = blocks(tmp_path / "v.html"), read_episodes(path)
    segments, numbers, played = held["text-0"]["rows"][0]["segments"], held["numbers-0"], record.trajectory
    assert [segment["source"] for segment in segments] == [segment.source for segment in played.segments]
    assert [segment["count"] for segment in segments] == [len(pieces) for pieces in record.pieces]
    # JavaScript counts in UTF-16, and so do the sizes.
    text = "".join(segment["text"] for segment in segments).encode("utf-16-le", "surrogatepass")
    sizes = numbers["sizes"]
    cut = [text[2 * (end - size) : 2 * end] for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    whole = [piece for pieces in record.pieces for piece in pieces]
    assert [piece.decode("utf-16-le", "surrogatepass") for piece in cut] == whole
    assert numbers["ids"] == list(played.token_ids) and record.advantages
    logp = [value for segment in played.sampled for value in segment.logprobs or ()]
    for name, values in {**record.training, "advantage": record.advantages, "logp": logp}.items():
        assert numbers[name] == pytest.approx(values, rel=1e-3, abs=1e-5), name
    (row,) = held["index"]["rows"]
    shown = {
        "task": played.task_id,
        "seed": str(played.seed),
        "won": True,
        "turns": 2,
        "errors": 0,
        "cut": True,
        "return": 1,
    }
    assert (shown | {"sampled": played.n_sampled, "tokens": len(played.token_ids)}).items() <= row.items()


def test_attempt_tags_and_what_tools_were_asked_are_held(play: Play, save: Save, tmp_path: Path) -> None:
    asked = (ToolRun(name="python", ok=True, wall_s=0.1, arguments={"code": "1 + 1", "most": math.nan, "of": ["a"]}),)
    held = viewed(save(tmp_path, 1, play("q", "a", reward=1.0, attempt=2, tags=("level:3",), tool_runs=asked)))
    assert {"attempt": 2, "tags": ["level:3"]}.items() <= held["index"]["rows"][0].items()
    arguments = {"code": "1 + 1", "most": "NaN", "of": '["a"]'}
    assert held["text-0"]["tools"] == [["python", True, 0.1, arguments]]


def test_sources_of_one_name_are_told_apart(play: Play, save: Save, tmp_path: Path) -> None:
    paths = [save(tmp_path / name, 1, play("q", "a", reward=1.0)) for name in "ab"]
    names = [f"{name}/episodes/step-000001.jsonl.zst" for name in "ab"]
    assert viewed(*paths)["index"]["sources"] == names
    assert viewed(*paths[:1] * 2)["index"]["sources"] == ["step-000001.jsonl.zst"] * 2


def test_a_folder_of_files_stands_for_them(play: Play, save: Save, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, play("q", "a", reward=1.0))
    (tmp_path / "episodes").rename(tmp_path / "files")
    assert write_view([tmp_path / "files"], tmp_path / "v.html") == 2


def test_progress_is_shown(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("agentrl.runs.progress.Bar._EVERY_S", -1.0)
    write_view([run], run / "v.html")
    assert re.fullmatch(r"(packing \d/2: files, about \d+ s left\n){2}", capsys.readouterr().err)


def test_two_sources_are_paired_by_task_and_attempt_or_place(play: Play, save: Save, tmp_path: Path) -> None:
    def at(name: str, tasks: str, attempts: Sequence[int | None] = (None,) * 3) -> Path:
        played = (play("q", "a", reward=1.0, task=task, attempt=n) for task, n in zip(tasks, attempts, strict=True))
        return save(tmp_path / name, 1, *played)

    ours, theirs = at("a", "xxy"), at("b", "yxz")
    assert [row.get("pair") for row in viewed(ours, theirs)["index"]["rows"]] == [4, None, 3, 2, 0, None]
    assert not any("pair" in row for row in viewed(ours, theirs, ours)["index"]["rows"]), "three are not two"
    tried = at("c", "xxx", (0, 2, 1)), at("d", "xxx", (2, 1, 0))
    assert [row["pair"] for row in viewed(*tried)["index"]["rows"]] == [5, 3, 4, 1, 2, 0]


@pytest.mark.parametrize(("every", "steps"), [(False, [1, 1, 40, 40]), (True, [1, 1, 20, 40, 40])])
def test_a_run_shows_its_first_and_last_step_or_all(run: Path, every: bool, steps: list[int]) -> None:
    assert [row["step"] for row in viewed(run, every=every)["index"]["rows"]] == [f"step {step}" for step in steps]


def test_a_report_stays_small(run: Path, play: Play, save: Save) -> None:
    save(run, 60, *(play("q", "a", reward=1.0, seed=seed) for seed in range(40)))
    assert len(blocks(write_report(run))["index"]["rows"]) == 2 + 16


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        *(('"q"]', '"q", "r"]'), ('"schema": 3', f'"schema": {"[" * 100_000}'), ("{", "\x00")),
    ],
)
def test_a_hostile_file_is_a_note_or_an_error(tmp_path: Path, play: Play, save: Save, was: str, becomes: str) -> None:
    path = save(tmp_path, 1, *(play("q", "a", reward=1.0, seed=seed) for seed in (1, 0)))
    whole, broken = zstandard.decompress(path.read_bytes()).decode().splitlines()
    assert was in broken
    path.write_bytes(zstandard.compress(f"{whole}\n{broken.replace(was, becomes, 1)}\n".encode()))
    assert write_view([tmp_path], tmp_path / "v.html") == 1
    assert "episodes/step-000001.jsonl.zst can&#39;t be read to its end" in (tmp_path / "v.html").read_text("utf-8")
    with pytest.raises(TrajectoryError, match="can't be read to its end"):
        write_view([path], tmp_path / "w.html")
    assert not (tmp_path / "w.html").exists()


def test_numbers_that_are_none_are_no_numbers(play: Play, save: Save, tmp_path: Path) -> None:
    path = save(tmp_path, 1, play("q", "a", reward=1.0), suffix=".jsonl")
    path.write_text(re.sub(r'"advantages": \[[^]]*\]', '"advantages": [NaN]', path.read_text()))
    assert viewed(path)["numbers-0"]["advantage"] == [None]


def test_a_page_that_can_t_be_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"can't be written"):
        write_view([run], tmp_path / "nowhere" / "v.html")
