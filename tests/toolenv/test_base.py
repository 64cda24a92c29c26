"""ToolEnv: reset and step, what ends an episode and what does not."""

import doctest
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from unittest.mock import Mock

import gymnasium
import pytest

from agentrl.errors import ConfigError, EnvContractError, InfrastructureError, UnknownNameError
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import TaskList
from agentrl.toolenv.tools.function import FunctionTool, ToolError, tool
from agentrl.types import Message, Task


class CountingTool(FunctionTool):
    """Upper-cases code, and remembers how it was opened and closed."""

    def __init__(self) -> None:
        super().__init__(python)
        self.seeds: list[int] = []
        self.closed = 0

    def open(self, seed: int) -> None:
        self.seeds.append(seed)

    def close(self) -> None:
        self.closed += 1


FAULTS = {"fail": (ToolError, "that failed"), "bug": (KeyError, "code"), "down": (InfrastructureError, "gone")}


def python(code: str) -> str:
    """Upper-case."""
    if code in FAULTS:
        kind, reason = FAULTS[code]
        raise kind(reason)
    return code.upper()


class Shout(ToolEnv):
    tools: Sequence[Any] = (CountingTool(),)
    instructions = "Shout."
    reward_weights: ClassVar[Mapping[str, float]] = {"correct": 1.0, "short": 0.5}

    def tasks(self, split: str) -> TaskList:
        return TaskList([Task(id=f"{split}:{word}", prompt=word, answer=word.upper()) for word in ("ah", "oh", "eh")])

    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": episode.final == episode.task.answer, "short": len(episode.final) < 5}

    def turn_reward(self, episode: Episode) -> float:
        return 0.25

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        return (Message(role="user", content="Again."),) if episode.turns == 2 else ()


def call(code: str) -> str:
    return f"```python\n{code}\n```"


@pytest.fixture
def env() -> Shout:
    made = Shout(max_turns=4)
    made.reset(seed=0, options={"task": "train:oh"})
    return made


def test_an_episode_from_first_to_last(env: Shout) -> None:
    observation, info = env.reset(options={"task": "train:ah"})
    assert [message["role"] for message in observation] == ["system", "user"]
    assert observation[0]["content"].startswith("Shout.\nTo use python") and info == {"task_id": "train:ah"}
    result: Message = {"role": "tool", "content": "AH", "name": "python", "tool_call_id": "call_0"}
    assert env.step(call("ah")) == ((result,), 0.25, False, False, {"parts": {}})
    again: Message = {"role": "user", "content": "Again."}
    assert env.step(call("ah"))[0] == (result, again)
    assert env.step("AH") == ((), 1.75, True, False, {"parts": {"correct": 1.0, "short": 1.0}})
    assert [message["role"] for message in env.episode.messages] == (
        ["system", "user", "assistant", "tool", "assistant", "tool", "user", "assistant"]
    )
    assert [run.ok for run in env.episode.tool_runs] == [True, True] and env.episode.final == "AH"


def test_the_record_has_what_the_tool_received_even_where_it_changes_that(env: Shout) -> None:
    env.tools[0].call = lambda arguments, _: arguments.pop("code")
    env.step(f"{call('a')}\n{call('b')}")
    assert [run.arguments for run in env.episode.tool_runs] == [{"code": "a"}, {"code": "b"}]


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (call("x"), (0.25, False, True, {"parts": {"correct": 0.0, "short": 0.0}})),
        ("OH", (1.75, True, False, {"parts": {"correct": 1.0, "short": 1.0}})),
    ],
)
def test_the_last_turn_truncates_or_answers_and_is_graded(text: str, end: tuple[object, ...]) -> None:
    env = Shout(max_turns=1)
    env.reset(seed=0, options={"task": "train:oh"})
    assert env.step(text)[1:] == end


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (call("fail"), "that failed"),
        (call("bug"), "KeyError: 'code'"),
        ("```python\nah", "not closed"),
    ],
)
def test_what_goes_wrong_in_a_call_is_told(env: Shout, text: str, fault: str) -> None:
    messages, *others = env.step(text)
    assert fault in messages[0]["content"] and others == [0.25, False, False, {"parts": {}}]
    assert not env.episode.tool_runs[-1].ok


def test_a_tool_that_is_not_there(env: Shout) -> None:
    env.tools = []
    messages, _, terminated, _, _ = env.step(call("x"))
    assert "there is no tool 'python'" in messages[0]["content"] and not terminated


def test_several_calls_in_one_turn(env: Shout) -> None:
    messages, *_ = env.step(f"{call('a')}\n{call('fail')}\n{call('b')}")
    assert [message["content"] for message in messages] == ["A", "that failed", "B"]
    assert [message["tool_call_id"] for message in messages] == ["call_0", "call_1", "call_2"]
    assert env.episode.turns == 1


def test_an_infrastructure_fault_is_no_turn(env: Shout) -> None:
    before = env.episode
    with pytest.raises(InfrastructureError):
        env.step(call("down"))
    assert env.episode == before


def test_steps_out_of_order_are_refused(env: Shout) -> None:
    with pytest.raises(EnvContractError, match="call reset before"):
        Shout().step("")
    env.step("OH")
    with pytest.raises(EnvContractError, match="over"):
        env.step("OH")


@pytest.mark.parametrize(
    ("options", "error"),
    [({"split": "trian"}, UnknownNameError), ({"dialect": "fense"}, UnknownNameError), ({"max_turns": 0}, ConfigError)],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Shout(**options)


def test_a_class_may_say_its_turns_and_its_dialect() -> None:
    class Mine(Shout):
        max_turns = 2
        dialect = "hermes"

    made = Mine(), Mine(max_turns=5, dialect="xml"), Shout()
    assert [(env.max_turns, env.dialect.name) for env in made] == [(2, "hermes"), (5, "xml"), (8, "fence")]


@pytest.mark.filterwarnings("ignore:.*render_mode")
def test_gymnasiums_own_make_says_that_nothing_is_drawn() -> None:
    why = r"Arithmetic draws nothing: leave render_mode out, and read env\.episode\.messages"
    with pytest.raises(ConfigError, match=why):
        gymnasium.make("agentrl/Arithmetic-v0", render_mode="human")


@pytest.mark.parametrize("action", [7, None, b"x"])
def test_an_action_is_a_text(env: Shout, action: Any) -> None:
    with pytest.raises(EnvContractError, match=r"the player of Shout gave .*: an action is the agent's text, a str"):
        env.step(action)


@pytest.mark.parametrize("options", [{"task": "train:uh"}, {"task": "test:oh"}, {"tsak": "train:oh"}])
def test_wrong_reset_options_are_refused(env: Shout, options: dict[str, Any]) -> None:
    with pytest.raises(UnknownNameError, match="task"):
        env.reset(options=options)


def test_seeds_choose_tasks_and_only_when_given() -> None:
    env, other = Shout(), Shout()
    drawn = [env.reset(seed=5 if turn == 0 else None)[1] for turn in range(20)]
    assert drawn == [other.reset(seed=5 if turn == 0 else None)[1] for turn in range(20)]
    assert len({info["task_id"] for info in drawn}) == 3
    seeds = [each.tools[0].seeds for each in (env, other, Shout())]
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 20
    assert seeds[2] == [], "every instance has a copy of the class's tools"


def test_an_environment_may_be_bare() -> None:
    env = type("Bare", (ToolEnv,), {})()
    for method in (lambda: env.tasks("train"), lambda: env.reset(seed=0)):
        with pytest.raises(EnvContractError, match=r"Bare\.tasks is not written: let it return a list of Task"):
            method()
    with pytest.raises(EnvContractError, match=r"Bare\.reward is not written"):
        env.reward(Episode(task=Task(id="", prompt=""), messages=()))
    for method in (env.gold, env.gold_turns):
        with pytest.raises(NotImplementedError, match="Bare has no gold player"):
            method(Task(id="", prompt=""))


def test_an_episode_without_a_turn_has_no_final_text() -> None:
    assert Episode(task=Task(id="", prompt=""), messages=({"role": "user", "content": "hi"},)).final == ""


def test_a_tool_of_ones_own_may_raise_or_give_anything(env: Shout) -> None:
    unsayable = type("Unsayable", (Exception,), {"__str__": None})()
    env.tools[0].call = Mock(side_effect=[KeyError("x" * 9000), "half a \ud800 letter", unsayable, None])
    message = env.step(call("a"))[0][0]
    assert message["content"].startswith("KeyError: ") and len(message["content"]) <= 2000
    assert env.observation_space.contains(answer := env.step(call("a"))[0])
    assert answer[0]["content"] == "half a ? letter"
    assert env.step(call("a"))[0][0]["content"] == "Unsayable: (a Unsayable that can't be shown)"
    with pytest.raises(EnvContractError, match=r"Shout\.tools: python\.call gave None \(NoneType\): return text"):
        env.step(call("a"))


@pytest.mark.parametrize("name", ["ToolEnv", "tool"])
def test_the_example_of_a_docstring_runs(name: str) -> None:
    names = {"ToolEnv": ToolEnv, "Task": Task, "ToolError": ToolError, "tool": tool}
    (example,) = doctest.DocTestFinder(recurse=False).find(names[name], name, globs=names)
    assert doctest.DocTestRunner().run(example) == doctest.TestResults(failed=0, attempted=len(example.examples))
