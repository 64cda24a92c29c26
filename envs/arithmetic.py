r"""``agentrl/Arithmetic-v0``: sums too long for the head, a Python tool, and an answer in ``\boxed{}``."""

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from agentrl.env import Episode, ToolEnv
from agentrl.envs.arithmetic_problems import LEVELS, Problem, make_problem
from agentrl.errors import ConfigError
from agentrl.grading import equal, last_boxed
from agentrl.python_tool import PythonTool
from agentrl.tasks import GeneratedTasks
from agentrl.types import Message, Task


class Arithmetic(ToolEnv):
    r"""Calculations in five levels, without end and made by index.

    1. One product or sum of two numbers.
    2. An expression of three numbers.
    3. A word problem with one operation or two.
    4. Two steps; the second is told when the tool has answered the first.
    5. Three steps of that kind.

    The reward is 1 where the final answer's last ``\boxed{}`` holds the right number, written out: a calculation in
    the box is no answer, and neither is a box beside a tool call. No problem, in no wording, is in both splits.

    Args:
        split: ``"train"`` or ``"test"``.
        dialect: how tool calls are written.
        max_turns: how often the assistant may speak; level 5 takes 4 turns.
        level: 1 to 5, or several of them to take turns evenly.
        timeout: seconds of CPU time per call.

    Raises:
        UnknownNameError: there is no such split or dialect.
        ConfigError: ``max_turns`` is less than 1, or a level is not 1 to 5.
    """

    instructions: ClassVar[str] = r"Answer in \boxed{}."

    def __init__(
        self,
        *,
        split: str = "train",
        dialect: str = "fence",
        max_turns: int = 6,
        level: int | Sequence[int] = 1,
        timeout: float = 5.0,
    ) -> None:
        super().__init__(split=split, dialect=dialect, max_turns=max_turns)
        self.levels = (level,) if isinstance(level, int) else tuple(level)
        if not self.levels or not set(self.levels) <= set(LEVELS):
            raise ConfigError(f"level is {level!r}: choose from 1 to {max(LEVELS)}, or a list of these")
        self.tools = (PythonTool(timeout=timeout),)

    def tasks(self, split: str) -> GeneratedTasks:
        """The problems of ``split``, without end; with several levels, each has every n-th index."""
        prefix = f"{split}-{'-'.join(map(str, self.levels))}"
        return GeneratedTasks(prefix, lambda index: self._task(split, index))

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        """Tell the next step once the tool has found the value of the step told last."""
        problem = problem_of(episode.task)
        told = sum(message["role"] == "user" for message in episode.messages)
        if told == len(problem.prompts) or not _found(problem.values[told - 1], episode):
            return ()
        return (Message(role="user", content=problem.prompts[told]),)

    def reward(self, episode: Episode) -> Mapping[str, float]:
        """1 for the right number in the last box of the final answer, else 0."""
        if self.dialect.parse(episode.final):
            return {"correct": 0.0}
        return {"correct": float(equal(last_boxed(episode.final), episode.task.answer, plain=True))}

    def gold(self, task: Task) -> Sequence[str]:
        """One call per step, each on the number that the one before gave, then the answer."""
        calls = [
            self.dialect.render("python", {"code": f"print({calculation})"}) for calculation in problem_of(task).sums
        ]
        return [*calls, rf"\boxed{{{task.answer}}}"]

    def _task(self, split: str, index: int) -> Task:
        turn, place = divmod(index, len(self.levels))
        problem = make_problem(split, self.levels[place], turn)
        answer = str(problem.values[-1])
        return Task(id=str(index), prompt=problem.prompts[0], answer=answer, data={"problem": problem})


def problem_of(task: Task) -> Problem:
    """The problem that ``task`` was made of."""
    problem = task.data["problem"]
    assert isinstance(problem, Problem)
    return problem


def _found(value: int, episode: Episode) -> bool:
    """Whether the tool has answered with ``value``, as a number of its own, since the user spoke last."""
    number = re.compile(rf"(?<![\w.,-]){value}(?!\w|[.,]\d)")
    runs = list(episode.tool_runs)
    for message in reversed(episode.messages):
        if message["role"] == "user":
            return False
        if message["role"] == "tool" and runs.pop().ok and number.search(message["content"]):
            return True
    return False
