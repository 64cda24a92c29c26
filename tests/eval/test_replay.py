"""Replaying: what is equal is equal, what changed is found at its turn under its name, and a file chooses nothing."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cli import main
from agentrl.errors import InfrastructureError, TrajectoryError, UsageError
from agentrl.eval.episodes import load, remake
from agentrl.eval.replay import Change, Replayed, Tools, replay
from agentrl.sandboxes import SandboxUnavailable
from agentrl.segments import Row
from agentrl.toolenv.registry import make
from agentrl.types import CutTurn, CutTurns, Message, Stop

from .played import ID, Sums, call, episode, origin, play, save


def again(path: Path, tools: Tools = "live", *, regrade: bool = False) -> list[Replayed]:
    return list(replay(load(path), tools=tools, trusted=False, regrade=regrade))


def change_of(path: Path, tools: Tools = "live") -> Change:
    (episode,) = again(path, tools)
    assert episode.change is not None and episode.now is None
    return episode.change


TURNS = st.lists(
    st.tuples(st.sampled_from([call(1), call(2) + call(9), call(4).replace("add", "sub"), "8", "", "<tool_call>{"]),
              st.sampled_from(["", "answer", "end", "continue"])),
    min_size=1, max_size=4,
)  # fmt: skip


def say(turn: tuple[str, CutTurns | str]) -> str:
    return CutTurn(turn[0], turn[1]) if turn[1] in ("answer", "end", "continue") else turn[0]


@given(TURNS, st.sampled_from(["live", "recorded"]))
def test_what_was_played_is_played_alike(tmp_path_factory: Any, turns: list[tuple[str, str]], tools: Tools) -> None:
    path = tmp_path_factory.mktemp("replay") / "e.jsonl"
    (episode,) = again(save(path, play(1, *map(say, turns), seed=2**40)), tools)
    assert episode.change is None and episode.now == episode.recorded


def test_turns_that_were_cut_are_treated_as_they_were(tmp_path: Path) -> None:
    turns = ("8", "answer"), ("8", "continue"), (call(1), "continue"), ("8", "end")
    played = [play(1, call(1), CutTurn(*turn), "8") for turn in turns]
    assert [episode.stop for episode in played] == [Stop.TERMINATED, Stop.TERMINATED, Stop.TERMINATED, Stop.TURN_CUT]
    played += replace(played[-1], stop=Stop.TOKEN_LIMIT), play(1, CutTurn(call(1), "continue"))
    assert [episode.change for episode in again(save(tmp_path / "e.jsonl", *played))] == [None] * 6


def test_an_episode_whose_history_was_rewritten_is_replayed_by_its_turns(tmp_path: Path) -> None:
    played = play(1, call(1), CutTurn(call(2), "continue"), "8")
    prompt, called, answer, cut, result, final = played.segments
    # The last two turns were sampled after another history, and their rows are not in the order of turns.
    later = [Row((answer, replace(cut, turn=1)), 0, 3), Row((result, replace(final, turn=2)), 0, 4)]
    rows = [Row((prompt, replace(called, turn=0))), *reversed(later)]
    path = save(tmp_path / "e.jsonl", replace(played, segments=(), rows=tuple(rows)))
    (episode,) = again(path)
    assert episode.change is None and episode.now == episode.recorded
    more = replace(called, turn=9)
    unheard = replace(played, segments=(), rows=(*rows, Row((more,), 0, 2)), rewards=(*played.rewards, 0.0))
    with pytest.raises(UsageError, match="has 4 turns and 2 tool calls, but messages of 3 and 2: it can't be played"):
        again(save(tmp_path / "f.jsonl", unheard))


def test_turns_that_are_no_step_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sums, "turn_reward", lambda *_: 0.25, raising=False)
    played = play(1, call(1), CutTurn("8", "continue"), "8")
    prompt, called, answer, cut, request, final = played.segments
    # A sub-agent spoke during the call, and was paid what the call earned.
    steps = [replace(segment, turn=turn) for segment, turn in [(called, 0), (cut, 2), (final, 3)]]
    agent, sub = Row((prompt, steps[0], answer, steps[1], request, steps[2])), Row((prompt, replace(called, turn=1)))
    paid = (0.0, *played.rewards)
    helped = replace(played, segments=(), rows=(agent, sub), rewards=paid, steps=(0, 2, 3))
    (episode,) = again(save(tmp_path / "e.jsonl", helped), "recorded")
    assert episode.change is None and episode.now == episode.recorded and played.rewards[0] == 0.25
    for wrong in [(0, 2), (0, 3, 2), (0, 2, 4), (0, 0, 2)]:
        with pytest.raises((UsageError, TrajectoryError), match="turns"):
            again(save(tmp_path / "f.jsonl", replace(helped, steps=wrong)))


def test_programs_run_again_in_a_fresh_sandbox(tmp_path: Path) -> None:
    code = "```python\n{}\n```".format
    env = make("agentrl/Arithmetic-v0", level=2)
    programs = ["x = 6; x", "x * 7", "import random; random.random(), 1 / 0", "open('/tmp/left', 'a').tell()"]
    played = episode(env, env.task_set[3].id, *map(code, programs), *env.gold(env.task_set[3]), seed=5)
    assert played.turns[1][1][0]["content"] == "42" and played.stop is Stop.TERMINATED
    path = save(tmp_path / "e.jsonl", played, played, env_id="agentrl/Arithmetic-v0", env_args={"level": 2})
    assert [replayed.change for replayed in again(path)] == [None, None]
    path.write_text(path.read_text().replace("42", "43"))
    assert {replayed.change and replayed.change.what for replayed in again(path)} == {"tool"}


def test_without_a_sandbox_programs_are_not_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env = make("agentrl/Arithmetic-v0", level=1)
    played = episode(env, env.task_set[3].id, *env.gold(env.task_set[3]), seed=5)
    path = save(tmp_path / "e.jsonl", played, env_id="agentrl/Arithmetic-v0", env_args={"level": 1})
    refuse = Mock(side_effect=SandboxUnavailable("no sandbox can be opened here: do this"))
    monkeypatch.setattr("agentrl.toolenv.tools.python.shared_sandbox", refuse)
    assert main(["replay", str(path)]) == 1
    assert capsys.readouterr().err.endswith("\nagentrl: no sandbox can be opened here: do this\n")
    assert main(["replay", str(path), "--tools", "recorded"]) == 0, "no program runs"


def test_a_tool_that_answers_by_chance_is_found_at_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(1)
    monkeypatch.setattr(Sums, "adds", lambda a, b: "8" if a == 1 else str(chance.random()))
    path = save(tmp_path / "e.jsonl", play(1, call(1), call(2) + call(2), "8"))
    change = change_of(path)
    assert (change.turn, change.what) == (2, "tool") and "tool add call_0: 0." in change.recorded
    assert change.recorded != change.now
    (episode,) = again(path, "recorded")
    assert episode.change is None, "the tool does not run"


def test_recorded_tools_answer_the_recorded_calls_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "e.jsonl", play(1, call(1) + call(2) + call(1), "8"))
    monkeypatch.setattr(Sums, "adds", lambda *_: 1 / 0)
    assert again(path, "recorded")[0].change is None
    path.write_text(path.read_text().replace('"arguments": {"a": 2,', '"arguments": {"a": 3,'))
    assert "this call was not recorded" in change_of(path, "recorded").now
    assert change_of(path).what == "tool", "live, it is the tool that fails"


def test_a_grader_that_changed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "e.jsonl", *(play(task, call(task), str(task + 7)) for task in range(4)))
    assert not any(episode.regraded for episode in again(path, "recorded", regrade=True))
    monkeypatch.setattr(Sums, "right", lambda answer, wanted: answer == wanted != "8")
    replayed = again(path, "recorded", regrade=True)
    assert [episode.task_id for episode in replayed if episode.regraded] == ["train:1"]
    before, now = replayed[1].recorded, replayed[1].now
    assert now and (before.won, now.won, now.parts) == (True, False, {"correct": 0})
    assert [episode.change and episode.change.what for episode in again(path)] == [None, "reward", None, None]


def test_a_prompt_a_limit_and_a_task_that_changed_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "e.jsonl", play(1, call(1), call(1), "8"))
    two = save(tmp_path / "two.jsonl", play(1, call(1), call(1), "8"), env_args={"max_turns": 2})
    assert (change_of(two).turn, change_of(two).what) == (2, "end")
    gone = save(tmp_path / "gone.jsonl", play(1, "8"), split="test")
    assert change_of(gone).what == "task"
    monkeypatch.setattr(Sums, "respond", lambda *_: (Message(role="user", content="Go on."),))
    assert (change_of(path).turn, change_of(path).what) == (1, "observation")
    monkeypatch.setattr(Sums, "instructions", "Add, and think.")
    change = change_of(path)
    assert (change.turn, change.what) == (0, "prompt") and "think" in change.now


def test_a_fault_and_a_bug_are_told_from_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(a: int, b: int) -> str:
        raise InfrastructureError("gone")

    path = save(tmp_path / "e.jsonl", play(1, call(1), "8"))
    monkeypatch.setattr(Sums, "adds", down)
    assert (change_of(path).what, change_of(path).turn) == ("fault", 1)
    monkeypatch.setattr(Sums, "right", lambda *_: 1 / 0)
    assert change_of(path, "recorded").what == "error"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"env_args": {"notes": "/etc/passwd"}}, "argument 'notes' may name a file"),
        ({"env_args": {"dialect": "hermes", "data": {"train": [1, "x"]}}}, "argument 'data' may name a file"),
        ({"env_id": "antigravity_of_mine:test/Sums-v0"}, "its id names a module to import"),
        ({"env_id": "test/Nothing-v0"}, "no environment is called"),
        ({"env_args": {"levl": 3}}, "argument 'levl'"),
    ],
)
def test_a_file_chooses_nothing(here: Path, changes: Any, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    # A module of that name would be found and run.
    (here / "antigravity_of_mine.py").write_text("raise SystemExit('it ran')")
    save(here / "e.jsonl", play(1, "8"), **changes)
    assert main(["replay", "e.jsonl"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and wanted in err and "it ran" not in err


def test_what_a_person_trusts_is_made() -> None:
    with pytest.raises(UsageError, match="add --trust"):
        remake(origin(env_args={"notes": "mine"}), trusted=False)
    remake(origin(env_args={"notes": "mine", "max_turns": 5}), trusted=True).close()
    remake(origin(env_args={"dialect": "xml", "max_turns": 5}), trusted=False).close()


def test_messages_that_are_not_those_of_the_turns_are_refused(tmp_path: Path) -> None:
    played = play(1, call(1), "8")
    for broken in ({"messages": ()}, {"messages": played.messages[:-1]}, {"tool_runs": ()}):
        with pytest.raises(UsageError, match="can't be played again"):
            again(save(tmp_path / "e.jsonl", replace(played, **broken)))


def test_what_the_command_says(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    save(here / "e.jsonl", play(1, "8"), play(2, call(2), "9"), env_args={"max_turns": 3})
    assert main(["replay", "e.jsonl"]) == 0
    out, err = capsys.readouterr()
    assert "0 of 2 episodes changed" in out and f"environment: {ID}, max_turns=3, split='train'" in err
    monkeypatch.setattr(Sums, "adds", lambda *_: "\x1b[2J|")
    assert main(["replay", "e.jsonl"]) == 1
    out = capsys.readouterr().out
    assert "1 at first in tool" in out and "\x1b" not in out and "| train:2 | 0 | 1 | tool |" in out
    assert main(["replay", "e.jsonl", "--regrade", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["now"]["won"] for row in rows] == [True, True] and not any(row["change"] for row in rows)
    monkeypatch.setattr(Sums, "right", lambda *_: False)
    assert main(["replay", "e.jsonl", "--regrade", "--id", "train:2"]) == 1
    assert "1 of 1 episodes are graded differently" in capsys.readouterr().out
    assert main(["replay", "e.jsonl", "--id", "train:9"]) == 2
    assert "no episode of the task 'train:9'" in capsys.readouterr().err
