"""Turns that a limit of tokens cut off: recorded and counted as such, and what becomes of them."""

import dataclasses
import pickle
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any, get_args

import gymnasium
import pytest

import agentrl
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import InvariantError
from agentrl.eval.table import summarise
from agentrl.render.renderer import Renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.player import EpisodeLimits
from agentrl.runs.report.pack import why
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import TaskList
from agentrl.toolenv.tools.function import tool
from agentrl.train.invariants import check_tools_are_called
from agentrl.types import CutTurn, CutTurns, Group, Stop, Task, Trajectory

from .conftest import ANSWER, CALL, collect, only, specs

pytestmark = pytest.mark.usefixtures("one_thread", "registered")
RAMBLING = f"{CALL}\nand then I would say that"
UNCLOSED = "```python\n2+2"
CHOICES = get_args(CutTurns)
ran: list[str] = []
seen: list[tuple[str, str]] = []
"""What ``reward`` was asked about: ``Episode.cut`` and ``Episode.final``."""


@tool
def python(code: str) -> str:
    """Add two and two."""
    ran.append(code)
    return "4"


class Sum(ToolEnv):
    """Two and two; a turn that is cut off costs a little."""

    tools = (python,)

    def tasks(self, split: str) -> TaskList:
        return TaskList([Task(id="sum", prompt="2+2?", answer="4")])

    def turn_reward(self, episode: Episode) -> float:
        return -0.1 if episode.cut else 0.0

    def reward(self, episode: Episode) -> Mapping[str, float]:
        seen.append((episode.cut, episode.final))
        return {"correct": float(episode.final.startswith("4"))}


@pytest.fixture
def registered() -> Generator[None]:
    ran.clear()
    seen.clear()
    gymnasium.register("tests/Sum-v0", entry_point=Sum)
    yield
    del gymnasium.registry["tests/Sum-v0"]


Play = Callable[..., Trajectory]


@pytest.fixture
def play(renderer: Renderer) -> Play:
    """Play an episode: ``play(("text", cut_off), …, then="end")``; a turn that is cut off lacks its stop token."""

    def played(
        *turns: tuple[str, bool], then: CutTurns = "end", room: int = 1900, most: int = 2000, max_turns: int = 4
    ) -> Trajectory:
        tokens = [renderer.turn(text)[: -1 if cut else None] for text, cut in turns]
        prompt = renderer.prompt(Sum().reset(options={"task": "sum"})[0]).token_ids
        limits = EpisodeLimits(episode_tokens=len(prompt) + room, cut_turns=then)
        with closing(Collector({"": ("tests/Sum-v0", {"max_turns": max_turns})}, renderer, limits=limits)) as collector:
            collected = collect(collector, specs("sum"), engine=ScriptedEngine(tokens), max_tokens=most)
        return only(collected)

    return played


def roles(trajectory: Trajectory) -> list[str]:
    return [message["role"] for message in trajectory.messages][1:]


def test_a_cut_turn_is_a_text_that_wrappers_pass_on() -> None:
    made = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("tests/Sum-v0"))
    made.reset(seed=1)
    assert made.action_space.contains(CutTurn("4"))
    _, reward, terminated, truncated, info = made.step(CutTurn("4", "answer"))
    assert (reward, terminated, truncated) == (0.9, True, False) and seen == [("answer", "4")]
    made.reset(seed=1)
    _, reward, terminated, truncated, info = made.step(CutTurn("4"))
    assert (reward, terminated, truncated) == (-0.1, False, True) and info["parts"] == {"correct": 0.0}
    made.close()
    again = pickle.loads(pickle.dumps(CutTurn("4", "continue")))
    assert (again, again.then, type(again)) == ("4", "continue", CutTurn)
    assert agentrl.CutTurn is CutTurn


def test_an_answer_that_was_cut_off_ends_the_episode_without_one(play: Play) -> None:
    trajectory = play((ANSWER, True))
    assert trajectory.stop is Stop.TURN_CUT and trajectory.stop.truncated
    assert trajectory.rewards == (-0.1,) and trajectory.parts == {"correct": 0.0} and seen == [("end", "")]
    assert trajectory.cut_turns == 1 and trajectory.messages[-1]["content"] == ANSWER
    assert type(trajectory.messages[-1]["content"]) is str


def test_an_answer_that_was_cut_off_can_be_taken_as_it_stands(play: Play) -> None:
    trajectory = play(("4, I would say, for", True), then="answer")
    assert (trajectory.stop, trajectory.rewards, trajectory.cut_turns) == (Stop.TERMINATED, (0.9,), 1)
    assert seen == [("answer", "4, I would say, for")]


def test_an_agent_that_was_cut_off_can_be_told_to_go_on(play: Play) -> None:
    trajectory = play(("I would say, since", True), (ANSWER, False), then="continue")
    assert (trajectory.stop, trajectory.rewards, trajectory.cut_turns) == (Stop.TERMINATED, (-0.1, 1.0), 1)
    assert roles(trajectory) == ["user", "assistant", "user", "assistant"] and seen == [("", ANSWER)]
    assert "cut off at its limit of tokens" in trajectory.messages[-2]["content"]
    assert [segment.cut for segment in trajectory.sampled] == [True, False]


def test_the_environment_words_what_is_said_after_a_cut(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sum, "cut_message", "Shorter!", raising=True)
    assert play(("since", True), (ANSWER, False), then="continue").messages[-2]["content"] == "Shorter!"


def test_who_has_no_turn_left_can_not_go_on(play: Play) -> None:
    trajectory = play(("4, since", True), then="continue", max_turns=1)
    assert (trajectory.stop, trajectory.ret) == (Stop.TURN_LIMIT, -0.1) and roles(trajectory) == ["user", "assistant"]


@pytest.mark.parametrize("then", ["answer", "continue"])
def test_calls_in_a_cut_turn_run_and_a_call_that_was_cut_off_is_told(play: Play, then: CutTurns) -> None:
    trajectory = play((RAMBLING, True), (ANSWER, False), then=then)
    assert (trajectory.stop, trajectory.ret) == (Stop.TERMINATED, 0.9) and ran == ["2+2"]
    assert roles(trajectory) == ["user", "assistant", "tool", "assistant"], "the tool's answer is all it is told"
    trajectory = play((UNCLOSED, True), (ANSWER, False), then=then)
    assert ran == ["2+2"] and [run.ok for run in trajectory.tool_runs] == [False]
    assert "is not closed" in trajectory.messages[-2]["content"] and trajectory.ret == 0.9


def test_calls_do_not_run_in_a_turn_that_ends_the_episode(play: Play) -> None:
    for text in (RAMBLING, UNCLOSED):
        trajectory = play((text, True))
        assert (trajectory.stop, trajectory.tool_runs, ran) == (Stop.TURN_CUT, (), [])
        assert seen.pop() == ("end", "") and roles(trajectory) == ["user", "assistant"]


@pytest.mark.parametrize("then", CHOICES)
def test_the_episodes_budget_cuts_a_turn_in_the_same_way(play: Play, then: CutTurns) -> None:
    """But nobody can go on without room."""
    trajectory = play(("4, I would say, since", True), then=then, room=5)
    assert trajectory.cut_turns == 1 and trajectory.n_sampled == 5
    if then == "answer":
        assert (trajectory.stop, trajectory.ret) == (Stop.TERMINATED, 0.9)
    else:
        assert (trajectory.stop, trajectory.ret) == (Stop.TOKEN_LIMIT, -0.1) and seen == [("end", "")]


def test_a_turn_that_stops_at_its_very_limit_was_not_cut(renderer: Renderer, play: Play) -> None:
    length = len(renderer.turn(ANSWER))
    assert play((ANSWER, False), most=length).cut_turns == play((ANSWER, False), room=length).cut_turns == 0
    assert play((ANSWER, False), most=length - 1).cut_turns == play((ANSWER, False), room=length - 1).cut_turns == 1


@pytest.mark.parametrize("then", CHOICES)
def test_the_record_is_what_was_sampled_and_shown_whatever_was_cut(play: Play, renderer: Renderer, then: Any) -> None:
    trajectory = play(("since", True), (ANSWER, False), then=then)
    cut = renderer.turn("since")
    assert trajectory.sampled[0].token_ids == tuple(cut[:-1])
    if then == "continue":
        after = trajectory.segments[2]
        assert after.source == "template" and after.token_ids[0] == cut[-1], "the template ends the turn"
        whole = renderer.tokenizer.apply_chat_template(list(trajectory.messages), return_dict=False)
        assert list(trajectory.token_ids) == whole[: len(trajectory.token_ids)]
    else:
        assert len(trajectory.segments) == 2 and trajectory.token_ids[-1] == cut[-2]


def test_tables_count_cut_turns(play: Play) -> None:
    trajectory = play(("since", True), ("so", True), (ANSWER, False), then="continue")
    table = summarise([Group((trajectory, dataclasses.replace(trajectory, seed=2)))], best_return=1.0)
    assert table.cut_turns == table.row()["cut_turns"] == 4 and table.truncated == 0


def test_the_page_says_that_a_turn_was_cut(play: Play) -> None:
    assert why(play(("since", True))) == "cut off: the last turn ran into its limit of tokens"
    taken = "the environment ended it: a turn that was cut off was taken as the final answer"
    assert why(play(("since", True), then="answer")) == taken


def test_an_agent_whose_calls_were_all_cut_off_is_told_of_it(play: Play) -> None:
    with pytest.raises(InvariantError, match=r"with a larger rollout.turn_tokens: 1 turns were cut off"):
        check_tools_are_called([Group((play((UNCLOSED, True)),))])


def test_arithmetic_tells_the_next_step_after_a_cut_turn() -> None:
    env = agentrl.make("agentrl/Arithmetic-v0", level=4, split="test")
    env.reset(seed=1)
    call, second, answer = env.gold(env.episode.task)
    ((message,), *_) = env.step(CutTurn("I had better", "continue"))
    assert message["content"] == env.cut_message
    (_, reply), *_ = env.step(call)
    assert "step" in reply["content"].lower()
    env.step(second)
    assert env.step(answer)[1] == 1.0
    env.close()
