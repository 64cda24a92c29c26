r"""``reasoning-gym/<task>-v0``: the tasks of the library reasoning-gym, scored by its own scorers."""

import functools
import importlib.util
from collections.abc import Mapping, Sequence

from agentrl.envs.reasoning_gym import library
from agentrl.envs.reasoning_gym.names import TASKS
from agentrl.errors import UnknownNameError, UsageError
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import GeneratedTasks
from agentrl.toolenv.tools.python import PythonTool
from agentrl.types import Task


class ReasoningGym(ToolEnv):
    r"""One task of the library, as many problems as wanted, made by index.

    Half of all questions belong to the test split, by the hash of their text, so none is in both. The answer stands
    between the last ``\boxed{`` and the last ``}`` of the final text. Answers of this library may have braces that do
    not match, or several lines. The library's score is above 0 also for answers that are nearly right, or that
    only have the right form; without ``partial`` only a score of 1 counts.

    The library runs in a process of its own, where each answer is scored in a fork with 5 s of CPU time and 4 GB. An
    answer that takes more is wrong. A scorer that evaluates the answer as Python gets only what our own parser reads.

    Args:
        name: the task, such as ``"chain_sum"``.
        split: ``"train"`` or ``"test"``.
        dialect: how tool calls are written.
        max_turns: how often the assistant may speak.
        tool: whether there is a Python tool.
        sandbox: the back end that runs it; empty for that of the run, ``env.sandbox``.
        partial: pass on every score of the library, from 0 to 1.
        config: the task's own settings, such as ``min_terms=3``.

    Raises:
        UnknownNameError: there is no such task, split or dialect.
        ConfigError: the task does not take one of its settings, or ``max_turns`` is less than 1.
        UsageError: reasoning-gym is not installed.
        InfrastructureError: the library's process ended or hung on its own.
    """

    instructions = r"End with the answer alone in \boxed{}."

    def __init__(
        self,
        *,
        name: str,
        split: str = "train",
        dialect: str = "fence",
        max_turns: int = 6,
        tool: bool = False,
        sandbox: str = "",
        partial: bool = False,
        **config: object,
    ) -> None:
        super().__init__(split=split, dialect=dialect, max_turns=max_turns)
        if name not in TASKS:
            raise UnknownNameError("task of reasoning-gym", name, TASKS)
        if importlib.util.find_spec("reasoning_gym") is None:
            raise UsageError("reasoning-gym is not installed: pip install 'agentrl[reasoning-gym]'")
        self.name = name
        self.partial = partial
        self.config = config
        self.tools = (PythonTool(sandbox=sandbox),) if tool else ()
        if config:  # wrong settings are an error now; without any there is no need to start the library yet
            library.question(name, config, split, 0)

    def tasks(self, split: str) -> GeneratedTasks:
        """Return the questions of ``split``, without end."""
        return GeneratedTasks(split, functools.partial(library.question, self.name, self.config, split))

    def reward(self, episode: Episode) -> Mapping[str, float]:
        """Return the library's score of the box in the final text; without ``partial``, 1 only for full marks."""
        answer = self._box(episode)
        score = 0.0 if answer is None else self._score(episode.task, answer)
        return {"correct": score if self.partial else float(score == 1.0)}

    def answer_of(self, episode: Episode) -> str:
        """Return the content of that box."""
        return (self._box(episode) or "").strip()

    def _box(self, episode: Episode) -> str | None:
        return None if self.dialect.parse(episode.final) else widest_box(episode.final)

    def gold(self, task: Task) -> Sequence[str]:
        """Return the library's own answer in the box.

        Raises:
            NotImplementedError: there is none, or the library's scorer does not score it 1.
        """
        text = rf"\boxed{{{task.answer}}}"
        answer = widest_box(text)
        if not task.answer or answer is None or self._score(task, answer) != 1.0:
            raise NotImplementedError(f"{self.name} has no answer that its scorer takes for perfect")
        return [text]

    def _score(self, task: Task, answer: str) -> float:
        return library.score(self.name, self.config, task, answer)


def widest_box(text: str) -> str | None:
    r"""Return the text between the last ``\boxed{`` of ``text`` and the last ``}``; None where there is no such box.

    Example:
        >>> widest_box(r"So it is \boxed{}])}.")
        '}])'
    """
    start, end = text.rfind(r"\boxed{"), text.rfind("}")
    start += len(r"\boxed{")
    return text[start:end] if len(r"\boxed{") <= start <= end else None
