"""Environments whose tasks, tools or specification are broken, each in one way."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium

from agentrl.toolenv.tasks import GeneratedTasks, TaskList, TaskSet
from agentrl.toolenv.tools.function import ToolContext, tool
from agentrl.types import Task

from .good import Good, Memory


class NoTasks(Good, codes="ARL-E000"):
    def tasks(self, split: str) -> TaskSet:
        raise FileNotFoundError("problems.jsonl")


class TakesNoSplit(Good, codes="ARL-E000"):
    def __init__(self) -> None:
        super().__init__()


class Empty(TaskList):
    size = 0  # pyright: ignore


class EmptySplit(Good, codes="ARL-E000"):
    def tasks(self, split: str) -> TaskSet:
        return Empty([Task(id="", prompt="")])


class SplitsByCase(Good, codes="ARL-E014"):
    """The test split asks the same in capitals."""

    def tasks(self, split: str) -> TaskSet:
        same = super().tasks("train")
        write = str.upper if split == "test" else str
        return GeneratedTasks(split, lambda i: replace(same[i], prompt=write(same[i].prompt)))


def three(tasks: TaskSet) -> list[Task]:
    return list(itertools.islice(tasks, 3))


class Lost(TaskList):
    def find(self, task_id: str) -> Task:
        return replace(super().find(task_id), prompt="Reverse 12345 - 7, please.")


class LosesTasks(Good, codes="ARL-E015"):
    def tasks(self, split: str) -> TaskSet:
        return Lost(three(super().tasks(split)))


class Repeating(TaskList):
    size = 6  # pyright: ignore

    def __getitem__(self, index: int) -> Task:
        return super().__getitem__(index % 3)


class RepeatsIds(Good, codes="ARL-S001"):
    def tasks(self, split: str) -> TaskSet:
        return Repeating(three(super().tasks(split)))


class SaysNothing(Good, codes="ARL-S002"):
    """One task in a hundred lost its prompt."""

    def asked(self, index: int, prompt: str, answer: str) -> Task:
        return super().asked(index, "" if index == 99 else prompt, answer)


class LeavesTheAnswer(Good, codes="ARL-S003"):
    def asked(self, index: int, prompt: str, answer: str) -> Task:
        return super().asked(index, f"{prompt}\nCorrect answer: {answer}", answer)


class QuotesTheAnswer(Good, codes="ARL-S003"):
    """Long answers, each in its prompt word by word."""

    def asked(self, index: int, prompt: str, answer: str) -> Task:
        answer = f"the number {answer}, read from right to left"
        return super().asked(index, f"{prompt} They say it is {answer}.", answer)


class Unwritable(Good, codes="ARL-S004"):
    """Is registered with an argument that JSON can't write."""

    arguments: ClassVar = {"shout": {1, 2}}

    def __init__(self, *, shout: set[int], **options: Any) -> None:
        super().__init__(**options)


class ForgetsItsArguments(Good, codes="ARL-S004", shows=r"environment: '.*Be kind\..*' and '"):
    """Means a tuple where JSON gives back a list."""

    arguments: ClassVar = {"style": ("kind",)}

    def __init__(self, *, style: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self.instructions = "Be kind." if style == ("kind",) else ""


class AsciiActions(Good, codes="ARL-S005"):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.action_space = gymnasium.spaces.Text(10_000_000)  # type: ignore[assignment]


class DrawsItsOwnWay(Good, codes="ARL-S006"):
    """Goes through its tasks in order, whatever the seed."""

    next = 0

    def _choose(self, options: Mapping[str, Any]) -> Task:
        if "task" in options:
            return super()._choose(options)
        self.next += 1
        return self.task_set[self.next]


@tool
def add(a: int, b: int) -> str:
    """Add."""
    return str(a + b)


class OffersUncallable(Good, codes="ARL-E013"):
    """Asks for the dialect before its last tool is there."""

    tools = (*Good.tools, add)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        offered, self.tools = self.tools, self.tools[:1]
        assert self.dialect.instructions()
        self.tools = offered


def undecorated(code: str) -> str:
    """Lacks @tool above it."""
    return code


class OffersFunctions(Good, codes="ARL-E000"):
    tools: ClassVar[Any] = (*Good.tools, undecorated)


class OffersTwins(Good, codes="ARL-E018"):
    tools = (*Good.tools, Memory())


class OffersSpaces(Good, codes="ARL-E018"):
    tools = (*Good.tools, Memory("run python"))


class Silent(Memory):
    description = " "  # pyright: ignore


class OffersSilence(Good, codes="ARL-E019"):
    tools = (*Good.tools, Silent("memory"))


def unschematic(parameters: object) -> Memory:
    return type("Unschematic", (Memory,), {"parameters": parameters})("memory")


class OffersNoObject(Good, codes="ARL-E020"):
    tools = (*Good.tools, unschematic({"type": "string"}))


class RequiresTheUnknown(Good, codes="ARL-E020"):
    schema: ClassVar = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["cod"]}
    tools = (*Good.tools, unschematic(schema))


class OffersObjects(Good, codes="ARL-E020"):
    schema: ClassVar = {"type": "object", "properties": {"code": {"type": "string", "default": object()}}}
    tools = (*Good.tools, unschematic(schema))


class Endless(Memory):
    def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
        return str(arguments["code"]) * 3


class OffersEndless(Good, codes="ARL-E021"):
    tools = (Endless(),)


@tool
def outdated(text: str) -> str:
    """Look it up in a library that has changed since."""
    return text.look_up()  # type: ignore[attr-defined]


class OffersOutdated(Good, codes="ARL-E023", shows=r"All 7 calls of 'outdated' raised, .*AttributeError: 'str' object"):
    tools = (*Good.tools, outdated)


class Torn(Memory):
    """A tool that is no function, and raises what it meets."""

    def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
        return super().call({})


class OffersHandmade(Good, codes="ARL-E023"):
    tools = (*Good.tools, Torn("torn"))


@tool(timeout=0.01)
async def ponder(text: str) -> str:
    """Think about it for an hour."""
    await asyncio.sleep(3600)
    return text


class OffersSlowness(Good, codes="ARL-E024"):
    tools = (*Good.tools, ponder)


class SplitsByNothing(Good, codes="ARL-E014"):
    """Data are there, and the same in both splits."""

    def tasks(self, split: str) -> TaskSet:
        same = super().tasks("train")
        return GeneratedTasks(split, lambda i: replace(same[i], data={"table": [i], "maker": Memory}))


class LosesData(Good, codes="ARL-E015", shows=r"their data is .*\[1, 2, 3\].* and .*\[\]"):
    """The task that is found holds another table than the one that was listed."""

    def tasks(self, split: str) -> TaskSet:
        return Emptied([replace(task, data={"table": [1, 2, 3]}) for task in three(super().tasks(split))])


class Emptied(TaskList):
    def find(self, task_id: str) -> Task:
        return replace(super().find(task_id), data={"table": []})
