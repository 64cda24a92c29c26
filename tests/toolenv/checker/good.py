"""A good environment that needs no sandbox; the broken ones are made of it by one fault each, and say their codes."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentrl.grading.numbers import last_boxed
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import GeneratedTasks, TaskSet
from agentrl.toolenv.tools.function import FunctionTool, ToolContext, ToolError
from agentrl.types import Task


def python(code: str) -> str:
    """Remember what is said."""
    return code


class Memory(FunctionTool):
    """A tool that remembers the episode's calls and answers with all of them."""

    def __init__(self, name: str = "python") -> None:
        super().__init__(python)
        self.name = name
        self.said: list[str] = []

    def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
        code = str(arguments["code"])
        if "random" in code:
            raise ToolError("there is no chance here")
        self.said.append(code)
        return " | ".join(self.said)[:1000]

    def open(self, seed: int) -> None:
        self.said.clear()


class Good(ToolEnv):
    """Say the number backwards."""

    arguments: ClassVar[Mapping[str, Any]] = {}
    """What it is registered with."""
    codes: ClassVar[set[str]] = set()
    """The codes of the findings that it must give: these and no others."""

    shows: ClassVar[str] = ""
    """A pattern of what some finding says."""

    def __init_subclass__(cls, codes: str = "", shows: str = "") -> None:
        super().__init_subclass__()
        cls.codes, cls.shows = set(codes.split()), shows

    tools: Sequence[Any] = (Memory(),)

    def tasks(self, split: str) -> TaskSet:
        start = {"train": 12345, "test": 67891}[split]
        return GeneratedTasks(split, lambda i: self.asked(i, f"Reverse {start + i} - 7.", f"{start + i}"[::-1]))

    def asked(self, index: int, prompt: str, answer: str) -> Task:
        """The task of an index; most tasks that are broken are broken here."""
        return Task(id="", prompt=prompt, answer=answer)

    def gold(self, task: Task) -> Sequence[str]:
        return [self.dialect.render("python", {"code": task.prompt}), rf"\boxed{{{task.answer}}}"]

    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": float(last_boxed(episode.final) == episode.task.answer)}
