r"""The base of generated problem families: levels, disjoint splits, a Python tool, an answer in ``\boxed{}``.

A problem's split is the hash of its key, so no problem is in both, whatever its wording and level.
"""

import random
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar

from agentrl.errors import ConfigError
from agentrl.grading.numbers import last_boxed, spelled
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import GeneratedTasks, split_of, stable_hash
from agentrl.toolenv.tools.python import PythonTool
from agentrl.types import Task

TEST_SHARE = 8
"""One problem in this many belongs to the test split."""
Drawn = TypeVar("Drawn")


def draw(
    split: str, level: int, index: int, make: Callable[[random.Random], Drawn], key: Callable[[Drawn], str]
) -> Drawn:
    """Draw problem number ``index`` of a split and level, the same one on every machine.

    Args:
        split: ``"train"`` or ``"test"``.
        level: of the family.
        index: from 0, without end.
        make: draws a problem.
        key: returns the text that a problem shares with its equivalents and with no other problem.
    """
    # Rejection keeps the levels' distributions: the other split's problems are skipped, not altered.
    rng = random.Random(stable_hash(f"{split} {level} {index}"))
    while True:
        problem = make(rng)
        if split_of(key(problem), TEST_SHARE) == split:
            return problem


class GeneratedEnv(ToolEnv):
    r"""Problems in levels, made by index, graded by the last ``\boxed{}`` of the final answer.

    Args:
        split: ``"train"`` or ``"test"``.
        dialect: how tool calls are written.
        max_turns: how often the assistant may speak.
        level: one of ``levels``, or several of them to take turns evenly.
        tool: whether there is a Python tool.
        timeout: seconds of CPU time per call of it.
        sandbox: the back end that runs it; empty for that of the run, ``env.sandbox``.

    Raises:
        UnknownNameError: there is no such split or dialect.
        ConfigError: ``max_turns`` is less than 1, or there is no such level.
    """

    levels: ClassVar[Sequence[int]]
    """The levels of the family."""

    def __init__(
        self,
        *,
        split: str = "train",
        dialect: str = "fence",
        max_turns: int = 6,
        level: int | Sequence[int] = 1,
        tool: bool = True,
        timeout: float = 5.0,
        sandbox: str = "",
    ) -> None:
        super().__init__(split=split, dialect=dialect, max_turns=max_turns)
        self.chosen = (level,) if isinstance(level, int) else tuple(level)
        if not self.chosen or not set(self.chosen) <= set(self.levels):
            raise ConfigError(f"level is {level!r}: choose from 1 to {max(self.levels)}, or a list of these")
        self.tools = (PythonTool(timeout=timeout, sandbox=sandbox),) if tool else ()

    @abstractmethod
    def make_task(self, split: str, level: int, index: int) -> Task:
        """Make task number ``index`` of a level, a pure function; its id is replaced."""

    @abstractmethod
    def is_right(self, task: Task, answer: str) -> bool:
        """Return True if the text in the box answers ``task``. Never raises, whatever the text."""

    def working(self, task: Task) -> Sequence[str]:
        """Return the programs that a perfect player runs before it answers; none by default."""
        return ()

    def gold(self, task: Task) -> Sequence[str]:
        """Return the answer in the box, after a call for each program of ``working`` where there is the tool."""
        codes = self.working(task) if self.tools else ()
        return [*(self.dialect.render("python", {"code": code}) for code in codes), rf"\boxed{{{task.answer}}}"]

    def tasks(self, split: str) -> GeneratedTasks:
        """Return the problems of ``split``, without end; with several levels, each has every n-th index."""

        def make(index: int) -> Task:
            index_of_level, turn = divmod(index, len(self.chosen))
            level = self.chosen[turn]
            return replace(self.make_task(split, level, index_of_level), tags=(f"level:{level}",))

        return GeneratedTasks(f"{split}-{'-'.join(map(str, self.chosen))}", make)

    def reward(self, episode: Episode) -> Mapping[str, float]:
        """Return 1 for the right answer in the final text's last box, else 0; a box beside a tool call is no answer."""
        box = self._box(episode)
        return {"correct": float(box is not None and self.is_right(episode.task, box))}

    def answer_of(self, episode: Episode) -> str:
        """Return the content of that box."""
        return spelled(self._box(episode))

    def _box(self, episode: Episode) -> str | None:
        return None if self.dialect.parse(episode.final) else last_boxed(episode.final)
