"""Comparing: what is paired, what is refused, and whether a cause is found under its name."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cli import main
from agentrl.config import load_config
from agentrl.errors import UsageError
from agentrl.eval.compare import Comparison, compare, paired, parting
from agentrl.eval.episodes import load
from agentrl.runs.folder import RunFolder
from agentrl.runs.records import EPISODES, Record
from agentrl.segments import Row
from agentrl.types import Segment, Trajectory

from ..forests import forest, shuffled
from ..runs.origins import ORIGIN
from .played import Sums, call, play, save

HOSTILE = "\x1b[2J</script><b>|\n| x"


def rooms(result: Comparison) -> set[str]:
    return {difference.room for difference in result.differences}


def test_flips_come_with_the_token_where_they_part(tmp_path: Path) -> None:
    a = save(tmp_path / "a.jsonl", play(1, call(1), "8"), play(2, call(2), "9"), play(3, call(3), "10"))
    b = save(tmp_path / "b.jsonl.zst", play(3, call(3), "11"), play(1, call(1), "8"), play(2, call(2), "9"))
    result = compare(a, b)
    (flip,) = result.flips
    assert (flip.task_id, flip.winner, flip.seeds) == ("train:3", "a", (0, 0))
    assert flip.parting is not None and (flip.parting.turn, flip.parting.source) == (2, "policy")
    tokens = "".join(chr(token) for token in play(3, call(3), "10").token_ids)
    assert flip.parting.index == len(tokens) - 1 and tokens[:-1].endswith(flip.parting.before)
    assert (flip.parting.a, flip.parting.b) == ("0", "1")
    assert (result.overall.tasks, result.overall.worse, result.overall.better, result.episodes) == (3, 1, 0, 3)
    assert not result.differences


def test_episodes_of_a_task_are_paired_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    def of(name: str, *seeds: int) -> Path:
        return save(tmp_path / name, *(play(1, str(seed), seed=seed) for seed in seeds))

    a, b, c = load(of("a.jsonl", 3, 1, 2)), load(of("b.jsonl", 2, 3, 1)), load(of("c.jsonl", 9, 8, 1))
    seeds = [[(left.trajectory.seed, other.trajectory.seed) for left, other in paired(a, side)] for side in (b, c)]
    assert seeds == [[(1, 1), (2, 2), (3, 3)], [(1, 1), (2, 8), (3, 9)]]


def test_a_prompt_that_changed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = save(tmp_path / "a.jsonl", *(play(task, str(task + 7)) for task in range(4)))
    prompt = len(play(1, "8").segments[0].token_ids)
    monkeypatch.setattr(Sums, "instructions", "Add, and think.")
    b = save(tmp_path / "b.jsonl", *(play(task, "no" if task else "7") for task in range(4)))
    result = compare(a, b)
    assert rooms(result) == {"prompt"} and "system message, in 4 of 4" in result.differences[0].name
    assert "think" in result.differences[0].b and "think" not in result.differences[0].a
    # Behind the prompts, which are known to differ, and at A's own place.
    partings = [flip.parting for flip in result.flips if flip.parting]
    assert {(spot.source, spot.turn, spot.b) for spot in partings} == {("policy", 1, "no")} and len(result.flips) == 3
    assert partings[0].index == prompt and partings[0].a == "8"
    monkeypatch.setattr(Sums, "right", lambda answer, wanted: False)
    result = compare(a, save(tmp_path / "c.jsonl", *(play(task, str(task + 7)) for task in range(4))))
    assert {flip.parting and flip.parting.source for flip in result.flips} == {"prompt"}, "nothing else differs"


def test_a_grader_that_changed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = save(tmp_path / "a.jsonl", *(play(task, str(task + 7)) for task in range(4)))
    monkeypatch.setattr(Sums, "right", lambda answer, wanted: answer == wanted != "8")
    b = save(tmp_path / "b.jsonl", *(play(task, str(task + 7)) for task in range(4)))
    result = compare(a, b)
    assert rooms(result) == {"grader"} and "very same tokens, in 1 of 4" in result.differences[0].name
    assert [flip.parting for flip in result.flips] == [None]


def test_whatever_the_files_record_is_named(tmp_path: Path) -> None:
    changes = {"env_args": {"max_turns": 5}, "temperature": 0.5, "dialect": "xml"}
    versions = {"grader": "1", "sandbox": "1", "python": "1"}
    a = save(tmp_path / "a.jsonl", play(1, "8"), versions={})
    b = save(tmp_path / "b.jsonl", play(1, "8"), versions=versions, **changes)
    facts = {(fact.room, fact.name.split()[-1]) for fact in compare(a, b).differences if fact.a != fact.b}
    assert facts == {
        *(("environment", "env_args.max_turns"), ("sampling", "temperature"), ("dialect", "dialect")),
        *(("grader", "grader"), ("sandbox", "sandbox"), ("software", "python")),
    }


def test_runs_are_compared_by_their_last_episodes_and_settings(here: Path) -> None:
    for name, loss in (("a", "ctpo"), ("b", "gspo")):
        config = load_config(preset="quickstart", overrides=[f"run.name={name}", f"algo.loss={loss}"])
        RunFolder.create(config, numbered=False).close()
        save(here / "runs" / name / "episodes" / "step-000001.jsonl.zst", play(5, "1"))
        save(here / "runs" / name / "episodes" / "step-000010.jsonl.zst", play(1, "8"))
    (fact,) = compare(Path("runs/a"), Path("runs/b")).differences
    assert (fact.room, fact.name, fact.a, fact.b) == ("config", "algo.loss", "'ctpo'", "'gspo'")


def test_different_tasks_are_refused(tmp_path: Path) -> None:
    a = save(tmp_path / "a.jsonl", play(1, "8"), play(2, "9"))
    with pytest.raises(UsageError, match="different tasks, 1 only in A, as 'train:2'"):
        compare(a, save(tmp_path / "b.jsonl", play(1, "8")))
    (tmp_path / "e").mkdir()
    save(tmp_path / "e" / EPISODES, play(1, "8"))
    with pytest.raises(UsageError, match=r"only in A, .*; the evaluation in .* has not ended: resume it with"):
        compare(a, tmp_path / "e")
    with pytest.raises(UsageError, match="A has 1 episodes of task 'train:1' and B 2"):
        compare(a, save(tmp_path / "b.jsonl", play(1, "8"), play(1, "8", seed=1), play(2, "9")))
    with pytest.raises(UsageError, match="no episodes"):
        compare(a, save(tmp_path / "b.jsonl"))
    other = save(tmp_path / "other.jsonl", play(1, "8"), env_id="test/Other-v0")
    text = other.read_text().replace("1 + 7?", "1 - 7?")
    other.write_text(text)
    with pytest.raises(UsageError, match="only share their names"):
        compare(save(tmp_path / "a.jsonl", play(1, "8")), other)


def test_one_that_goes_on_parts_where_the_other_ends(tmp_path: Path) -> None:
    a, b = (load(save(tmp_path / "e.jsonl", play(1, text)))[0] for text in ("8", "8!"))
    for left, other, texts in ((a, b, ("", "!")), (b, a, ("!", ""))):
        cut = parting(left, other)
        assert cut is not None and (cut.a, cut.b) == texts and cut.index == len(a.trajectory.token_ids)


def recorded(episode: Trajectory) -> Record:
    texts = tuple(tuple(f"{token} " for token in segment.token_ids) for segment in episode.segments)
    return Record(trajectory=episode, origin=ORIGIN, pieces=texts)


@given(st.integers(0, 2**32), st.integers(2, 7))
def test_episodes_of_several_rows_part_in_time(seed: int, count: int) -> None:
    rng = random.Random(seed)
    episode = forest(rng, Segment("prompt", (5, 6)), count)
    a = recorded(episode)
    # Where a row inherits only what its parent inherited, it may as well name that one's parent.
    parents = [None if row.parent is None else episode.rows[row.parent] for row in episode.rows]
    named = [replace(row, parent=parent.parent) if parent and parent.fork >= row.fork else row
             for row, parent in zip(episode.rows, parents, strict=True)]  # fmt: skip
    same = shuffled(replace(episode, segments=(), rows=tuple(named)), rng)
    assert parting(a, recorded(same)) is None, "nor does the order of rows mean anything"
    number = rng.randrange(count)
    row = episode.rows[number]
    at = rng.randrange(number == 0, len(row.segments))
    segment = row.segments[at]
    spot = rng.randrange(len(segment.token_ids))
    ids = (*segment.token_ids[:spot], 300, *segment.token_ids[spot + 1 :])
    segments = (*row.segments[:at], replace(segment, token_ids=ids), *row.segments[at + 1 :])
    rows = (*episode.rows[:number], replace(row, segments=segments), *episode.rows[number + 1 :])
    b = recorded(shuffled(replace(episode, segments=(), rows=rows), rng))
    turn = next(part.turn or 0 for part in row.segments[at:] if part.trained)
    done = sum((part.turn or 0) < turn for part in episode.sampled)
    cut = parting(a, b)
    assert cut is not None and cut.a.startswith(f"{segment.token_ids[spot]} ") and cut.b.startswith("300 ")
    assert (cut.source, cut.turn) == (segment.source, done + segment.trained)


def test_rows_that_begin_elsewhere_part_there() -> None:
    turns = [Segment("policy", (7,), (-1.0,), 0)] * 2
    a, b = (
        recorded(replace(forest(random.Random(0), Segment("prompt", (5, 6)), 1), segments=(), rows=rows))
        for fork in (1, 2)
        for rows in [(Row((Segment("prompt", (5, 6)), turns[0])), Row((turns[1],), 0, fork))]
    )
    cut = parting(a, b)
    assert cut is not None and (cut.source, cut.index, cut.turn, cut.before) == ("row", 3, 1, "5 6 7 ")
    assert cut.a == "[row 2, continues row 1 after 1 tokens]7 " and cut.b == "[row 2, continues row 1 after 2 tokens]7 "


def test_hostile_texts_stay_in_their_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = save(tmp_path / "a.jsonl", play(1, "8"), env_args={HOSTILE: 1})
    b = save(tmp_path / "b.jsonl", play(1, HOSTILE), env_args={HOSTILE: HOSTILE})
    page = tmp_path / "page.html"
    assert main(["compare", str(a), str(b), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    flip = next(line for line in shown.splitlines() if line.startswith("| train:1"))
    assert flip.count("|") == 8
    text = page.read_text()
    assert "<b>" not in text and "\x1b" not in text and "&lt;b&gt;" in text and "default-src 'none'" in text
    assert main(["compare", str(a), str(b), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["overall"]["worse"] == 1
    assert main(["compare", str(a), str(b), "--html", "none/x.html"]) == 2
