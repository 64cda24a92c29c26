"""``agentrl/Code-v0``: write a function or a program; hidden tests decide."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, cast

from agentrl.envs.code.data import SAMPLE, load_splits
from agentrl.envs.code.grading import CallCase, Problem, grade
from agentrl.envs.datafiles import by_split, tasks_of, text_or_table
from agentrl.errors import ConfigError
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import TaskList
from agentrl.toolenv.tools.python import PythonTool, shared_sandbox
from agentrl.types import Task

_OPEN = re.compile(r"^```solution[ \t\r]*$", re.MULTILINE)
_CLOSE = re.compile(r"^```[ \t\r]*$", re.MULTILINE)


class Code(ToolEnv):
    """Programming problems with hidden tests, and a Python tool to try things out.

    The submission is the last ```` ```solution ```` block of the final answer. Its tests run in the sandbox, each in a
    fresh session that holds nothing but the submission and that test's input; expected values never go in there.

    The parts of the reward: ``correct`` (weight 1) is 1 where every test passes. Of weight 0 are ``passed``, the share
    of tests that pass; ``submitted``, whether there is a submission; and ``timeout``, whether a test ran out of time.

    Args:
        split: ``"train"`` or ``"test"``.
        dialect: how tool calls are written.
        max_turns: how often the assistant may speak.
        data: a file of problems, see :mod:`agentrl.envs.code.data`, which is divided; or one for each split:
            ``{"train": …, "test": …}``, or ``{"test": …}`` for a published test set. None plays the sample.
        timeout: seconds of CPU time per call of the tool.
        test_timeout: seconds of CPU time per hidden test, where the problem does not say.
        packages: packages that problems, submissions and the tool may import beside the sandbox's usual ones, such as
            ``["sortedcontainers"]``.
        sandbox: the back end that runs tool and tests; empty for that of the run, ``env.sandbox``.

    Raises:
        UnknownNameError: there is no such split or dialect.
        ConfigError: ``max_turns`` is less than 1, a time is not positive, or the file can't be used.
        SandboxUnavailable: one of ``packages`` can't be imported in the sandbox.
    """

    instructions = (
        "Solve the task in Python. Give all of your code in one block of the final answer:\n```solution\ncode\n```"
    )
    reward_weights: ClassVar[Mapping[str, float]] = {"correct": 1.0, "passed": 0.0, "submitted": 0.0, "timeout": 0.0}

    def __init__(
        self,
        *,
        split: str = "train",
        dialect: str = "fence",
        max_turns: int = 8,
        data: str | Mapping[str, str] | None = None,
        timeout: float = 5.0,
        test_timeout: float = 5.0,
        packages: Sequence[str] = (),
        sandbox: str = "",
    ) -> None:
        super().__init__(split=split, dialect=dialect, max_turns=max_turns)
        if not (timeout > 0 and test_timeout > 0):
            raise ConfigError(f"timeout is {timeout} and test_timeout {test_timeout}: both must be above 0")
        self.files = by_split(text_or_table("data", data) or str(SAMPLE))
        self.test_timeout = test_timeout
        self.packages = tuple(packages)
        self.sandbox = sandbox
        self.tools = (PythonTool(timeout=timeout, packages=self.packages, sandbox=sandbox),)
        if packages:
            shared_sandbox(packages, sandbox)  # a package that can't be imported fails now, not at the first grading

    @functools.cached_property
    def _splits(self) -> Mapping[str, tuple[Task, ...]]:
        return load_splits(self.files, self.packages)

    def tasks(self, split: str) -> TaskList:
        """Return the problems of ``split``, in the file's order.

        Raises:
            ConfigError: the file can't be used, or has no problem of this split.
        """
        return TaskList(tasks_of(self._splits, split, self.files))

    def reward(self, episode: Episode) -> Mapping[str, float]:
        """Run the hidden tests on the submission; all parts are 0 where there is none.

        Raises:
            InfrastructureError: the sandbox failed.
        """
        code = None if self.dialect.parse(episode.final) else submission(episode.final)
        if code is None:
            return dict.fromkeys(self.reward_weights, 0.0)
        problem = replace(problem_of(episode.task), sandbox=self.sandbox)
        graded = grade(problem, code, timeout=self.test_timeout)
        return {
            "correct": float(graded.correct),
            "passed": graded.passed,
            "submitted": 1.0,
            "timeout": float("timeout" in graded.verdicts),
        }

    def gold(self, task: Task) -> Sequence[str]:
        """Try the reference solution on the first test's input, then submit it.

        Raises:
            NotImplementedError: the problem came without a reference solution.
        """
        problem = problem_of(task)
        if not problem.solution:
            raise NotImplementedError(f"problem {task.id!r} has no reference solution")
        call = self.dialect.render("python", {"code": _trial(problem)})
        return [call, f"```solution\n{problem.solution.rstrip()}\n```"]


def submission(text: str) -> str | None:
    r"""Return the content of the last closed ```` ```solution ```` block of ``text``; None where there is none.

    Example:
        >>> submission("First\n```solution\na\n```\nno, rather\n```solution\nb\n```\n")
        'b\n'
    """
    content: str | None = None
    position = 0
    # Blocks are paired from the front: a fence that closes one block must not open another.
    while (opening := _OPEN.search(text, position)) is not None:
        closing = _CLOSE.search(text, opening.end())
        if closing is None:
            break
        content = text[opening.end() + 1 : closing.start()]
        position = closing.end()
    return content


def problem_of(task: Task) -> Problem:
    """Return the problem that ``task`` was made of."""
    return cast(Problem, task.data["problem"])


def _trial(problem: Problem) -> str:
    """Write a program that tries the reference solution on the first test's input."""
    case = problem.cases[0]
    code = f"{problem.setup}\n\n{problem.solution}".strip()
    if isinstance(case, CallCase):
        return f"{code}\n\nargs, kwargs = {case.arguments}\nprint({problem.entry_point}(*args, **kwargs))"
    return f"import io, sys\nsys.stdin = io.StringIO({case.stdin!r})\n{code}"
