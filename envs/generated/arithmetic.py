r"""``agentrl/Arithmetic-v0``: sums too long for the head, a Python tool, and an answer in ``\boxed{}``."""

import re
from collections.abc import Sequence
from typing import ClassVar, cast

from agentrl.envs.generated.arithmetic_problems import LEVELS, ArithmeticProblem, make_problem
from agentrl.envs.generated.base import GeneratedEnv
from agentrl.grading.numbers import equal
from agentrl.toolenv.base import Episode
from agentrl.types import Message, Task


class Arithmetic(GeneratedEnv):
    r"""Calculations in five levels, without end and made by index.

    1. One product or sum of two numbers.
    2. An expression of three numbers.
    3. A word problem with one operation or two.
    4. Two steps; the second is revealed when the tool has answered the first.
    5. Three steps of that kind.

    The reward is 1 where the final answer's last ``\boxed{}`` holds the right number, written out. A calculation in
    the box is no answer, and neither is a box beside a tool call. No problem, in no wording, is in both splits.

    Levels 4 and 5 need the tool. Arguments and errors are those of :class:`agentrl.envs.generated.base.GeneratedEnv`;
    level 5 takes 4 turns.
    """

    levels: ClassVar[Sequence[int]] = tuple(LEVELS)
    instructions = r"Answer in \boxed{}."

    def make_task(self, split: str, level: int, index: int) -> Task:
        """Make a problem of the level, whose first step is the prompt."""
        problem = make_problem(split, level, index)
        return Task(id="", prompt=problem.prompts[0], answer=str(problem.values[-1]), data={"problem": problem})

    def is_right(self, task: Task, answer: str) -> bool:
        """Return True if ``answer`` is the right number as a literal."""
        return equal(answer, task.answer, plain=True)

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        """Return the next step as a message, once the tool has printed the value of the latest one."""
        problem = problem_of(episode.task)
        # The user also speaks where a turn was cut off.
        spoken = [message["content"] for message in episode.messages if message["role"] == "user"]
        # Counted from the messages, so that the environment keeps no state of its own.
        revealed = sum(text in problem.prompts for text in spoken)
        if revealed == len(problem.prompts) or not _was_printed(problem.values[revealed - 1], episode):
            return ()
        return (Message(role="user", content=problem.prompts[revealed]),)

    def working(self, task: Task) -> Sequence[str]:
        """Return one program for each step, which starts from the previous step's value."""
        return [f"print({calculation})" for calculation in problem_of(task).sums]


def problem_of(task: Task) -> ArithmeticProblem:
    """Return the problem that ``task`` was made of."""
    return cast(ArithmeticProblem, task.data["problem"])


def _was_printed(value: int, episode: Episode) -> bool:
    """Return True if the tool has printed ``value``, as a number of its own, since the user's last message."""
    number = re.compile(rf"(?<![\w.,-]){value}(?!\w|[.,]\d)")
    runs = list(episode.tool_runs)
    for message in reversed(episode.messages):
        if message["role"] == "user":
            return False
        # Runs and tool messages match one to one, so both are walked from the end.
        if message["role"] == "tool" and runs.pop().ok and number.search(message["content"]):
            return True
    return False
