import math
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from agentrl.records import Record
from agentrl.types import Trajectory
from agentrl.viewer.choose import Chosen, choose, solved

Play, Save = Callable[..., Trajectory], Callable[..., Path]


def told(chosen: list[Chosen]) -> list[tuple[str, int, bool]]:
    return [(one.when, one.record.trajectory.seed, solved(one.record)) for one in chosen]


def test_first_step_then_success_and_failure_of_the_last(tmp_path: Path, play: Play, save: Save) -> None:
    early = save(tmp_path, 1, play("q", "a", reward=1.0, seed=1), play("q", "a", reward=0.0, seed=2))
    late = [play("q", "a", reward=reward, seed=seed) for seed, reward in ((3, 0.0), (4, 0.0), (5, 1.0))]
    chosen = choose([(1, early), (9, save(tmp_path, 9, *late))], [])
    assert told(chosen) == [("first step", 2, False), ("last step", 5, True), ("last step", 3, False)]
    assert [one.step for one in chosen] == [1, 9, 9]


def test_the_early_episode_is_of_a_task_that_is_shown_late(tmp_path: Path, play: Play, save: Save) -> None:
    other = play("q", "a", reward=0.0, seed=1, task="other")
    early = save(tmp_path, 1, other, play("q", "a", reward=1.0, seed=2, task="same"))
    late = save(tmp_path, 2, play("q", "a", reward=1.0, seed=3, task="same"))
    assert told(choose([(1, early), (2, late)], []))[0] == ("first step", 2, True)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_where_all_went_the_same_way_two_of_them_are_shown(
    tmp_path: Path, play: Play, save: Save, reward: float
) -> None:
    path = save(tmp_path, 5, *(play("q", "a", reward=reward, seed=seed) for seed in range(4)))
    chosen = told(choose([(1, path), (5, save(tmp_path, 6, *(play("q", "a", reward=reward, seed=9),) * 2))], []))
    assert [when for when, _, _ in chosen] == ["first step", "last step", "last step"]


def test_one_file_shows_no_episode_twice(tmp_path: Path, play: Play, save: Save) -> None:
    path = save(tmp_path, 1, *(play("q", "a", reward=float(seed % 2), seed=seed) for seed in range(4)))
    chosen = told(choose([(1, path)], []))
    assert chosen == [("same step", 2, False), ("last step", 1, True), ("last step", 0, False)]
    alone = save(tmp_path, 2, play("q", "a", reward=1.0))
    assert told(choose([(2, alone)], [])) == [("last step", 0, True)]


def test_no_files_no_episodes() -> None:
    assert choose([], []) == []


def test_success_is_the_part_correct_or_else_a_positive_return(play: Play) -> None:
    def ends(reward: float, **parts: float) -> bool:
        return solved(Record(trajectory=play("q", "a", reward=reward, parts=parts), pieces=(("q",), ("a",))))

    assert ends(0.1) and not ends(0.0) and ends(0.0, correct=1.0)
    assert not ends(0.3, correct=0.0, form=1.0) and not ends(1.0, correct=math.nan)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ('"q"]', '"q", "r"]'),
        ('"q"]', "7]"),
        ('"task_id": "train-2/17"', '"task_id": []'),
        ('"seed": 0', '"seed": {}'),
        ('"token_ids": [0]', '"token_ids": [[0]]'),
        ('"parts": {"correct": 1.0}', '"parts": 3'),
        ('"rewards": [1.0]', f'"rewards": [1{"0" * 400}]'),
        ('"schema": 1', f'"schema": {"[" * 100_000}'),
        ('"schema": 1', '"schema": 99'),
        ("{", "\x00"),
    ],
)
def test_a_hostile_file_becomes_a_note(tmp_path: Path, play: Play, save: Save, was: str, becomes: str) -> None:
    path = save(tmp_path, 1, *(play("q", "a", reward=1.0, seed=seed) for seed in (1, 0)))
    whole, broken = zstandard.decompress(path.read_bytes()).decode().splitlines()
    assert was in broken
    path.write_bytes(zstandard.compress(f"{whole}\n{broken.replace(was, becomes, 1)}\n".encode()))
    notes: list[str] = []
    assert told(choose([(1, path)], notes)) == [("last step", 1, True)]
    assert len(notes) == 1 and notes[0].startswith("episodes/step-000001.jsonl.zst can't be read to its end")


@pytest.mark.parametrize("content", [b"no zstandard", b"\xff\xfe"])
def test_a_damaged_stream_becomes_a_note(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "step-000001.jsonl.zst"
    path.write_bytes(content)
    notes: list[str] = []
    assert choose([(1, path)], notes) == [] and len(notes) == 1
