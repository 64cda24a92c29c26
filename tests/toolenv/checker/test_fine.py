"""Environments with nothing wrong give no finding, however they are made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from agentrl.grading.numbers import equal, last_boxed
from agentrl.sandboxes import SandboxUnavailable
from agentrl.toolenv.base import Episode
from agentrl.toolenv.checker import Report, check_env
from agentrl.toolenv.tasks import GeneratedTasks, TaskList, TaskSet
from agentrl.toolenv.tools.function import ToolContext, ToolError, tool
from agentrl.toolenv.tools.python import PythonTool, shared_sandbox
from agentrl.types import Message, Task

from .conftest import Register
from .good import Good


class NoTools(Good):
    """Nothing to call."""

    tools = ()

    def gold(self, task: Task) -> Sequence[str]:
        return [rf"\boxed{{{task.answer}}}"]


@tool
def look_up(word: str) -> str:
    """Explain a word."""
    return {"number": "something to count with"}.get(word, f"{word[:20]} is not in the dictionary")


@tool
def shout(text: str) -> str:
    """Write it in capitals: as many letters come back as go in."""
    return text.upper()


class ManyTools(Good):
    tools = (*Good.tools, look_up, shout)


class PaysForManners(Good):
    """Parts for the form of an answer and for using a tool, and one that counts against the agent."""

    reward_weights: ClassVar[Mapping[str, float]] = {"correct": 0.7, "boxed": 0.1, "called": 0.2, "rude": -1.0}

    def reward(self, episode: Episode) -> Mapping[str, float]:
        right = super().reward(episode)["correct"]
        boxed = last_boxed(episode.final) is not None
        rude = "stupid" in episode.final
        return {"correct": right, "boxed": float(boxed), "called": float(bool(episode.tool_runs)), "rude": float(rude)}


class YesOrNo(NoTools):
    """Two answers, both in the prompt: a guess is often right, but no constant always is."""

    def asked(self, index: int, prompt: str, answer: str) -> Task:
        return super().asked(index, f"Is {answer[::-1]} odd, yes or no?", "yes" if int(answer[0]) % 2 else "no")


class LuckyStreak(YesOrNo):
    """The first five answers are alike; no constant is right for long."""

    def tasks(self, split: str) -> TaskSet:
        same = super().tasks(split)
        drawn = [same[2 * i if i < 5 else i + 5] for i in range(20)]
        return TaskList([replace(task, answer=task.answer + "." * i) for i, task in enumerate(drawn)])

    def reward(self, episode: Episode) -> Mapping[str, float]:
        # Written in many ways, the answers look different although they are the same.
        return {"correct": float((last_boxed(episode.final) or "")[:1] == episode.task.answer[:1])}


class Submits(Good):
    """The answer is given through a tool, and the environment itself keeps it."""

    @tool
    def submit(self, answer: str) -> str:
        """Hand it in."""
        self.answer = answer
        return "thank you"

    tools = (submit,)

    def open_episode(self, context: ToolContext) -> None:
        self.answer = ""

    def gold(self, task: Task) -> Sequence[str]:
        return [self.dialect.render("submit", {"answer": task.answer}), "Done."]

    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": float(self.answer == episode.task.answer)}


class Answers(Good):
    """Adds a message after a tool's answer."""

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        return (Message(role="user", content=f"Go on, turn {episode.turns + 1}."),)


@tool
def capital(land: str) -> str:
    """Name a land's capital."""
    if land != "Fiji":
        raise ToolError("there is no such land")
    return "Suva"


class Choosy(Good):
    """A tool that takes one argument only, which nobody finds but gold."""

    tools = (*Good.tools, capital)

    def gold(self, task: Task) -> Sequence[str]:
        return [self.dialect.render("capital", {"land": "Fiji"}), rf"\boxed{{{task.answer}}}"]


class NobodyAsks(NoTools):
    tools = Choosy.tools


class HiddenTables(Good):
    """Both splits ask the same of tables that the agent does not see."""

    def tasks(self, split: str) -> TaskSet:
        same = super().tasks("train")
        return GeneratedTasks(split, lambda i: replace(same[i], data={"table": [split, i], "made": object()}))


class ByHand(Good):
    """Nobody knows how to play it perfectly."""

    def gold(self, task: Task) -> Sequence[str]:
        raise NotImplementedError


class WithPython(Good):
    """The real tool."""

    tools = (PythonTool(),)

    def gold(self, task: Task) -> Sequence[str]:
        program = f"print('{task.prompt.split()[1]}'[::-1])"
        return [self.dialect.render("python", {"code": program}), rf"\boxed{{{task.answer}}}"]

    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": float(equal(last_boxed(episode.final), episode.task.answer, plain=True))}


@pytest.mark.parametrize(
    "kind",
    [
        *(Good, NoTools, ManyTools, PaysForManners, YesOrNo, LuckyStreak),
        *(Submits, Choosy, HiddenTables, Answers),
    ],
)
def test_a_good_environment_gives_no_finding(register: Register, kind: type[Good]) -> None:
    assert check_env(register(kind)) == Report(findings=())


@pytest.mark.slow
def test_the_real_python_tool_gives_no_finding(register: Register, require: Callable[[bool, str], None]) -> None:
    try:
        shared_sandbox()
    except SandboxUnavailable as error:
        require(False, str(error))
    assert check_env(register(WithPython)) == Report(findings=())


def test_what_can_not_be_checked_is_said(register: Register) -> None:
    assert check_env(register(ByHand)).skipped == ("whether the maximum can be reached: there is no gold player.",)
    (unsure,) = check_env(register(NobodyAsks)).skipped
    assert unsure.startswith("whether 'capital' works: all 7 calls of 'capital', made up for this check, were refused,")
    report = check_env(ByHand())
    assert report.ok and len(report.skipped) == 2 and "second instance" in str(report)
    by_function = check_env(register(lambda **options: Good(**options)))
    assert by_function.ok and ["entry point" in sentence for sentence in by_function.skipped] == [True]


def test_a_short_list_of_tasks_is_enough() -> None:
    class Short(Good):
        def tasks(self, split: str) -> TaskSet:
            return TaskList([super().tasks(split)[0]])

    assert check_env(Short(), tasks=50).ok
