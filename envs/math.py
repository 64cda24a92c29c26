r"""``agentrl/Math-v0`` and ``agentrl/MathPython-v0``: mathematical problems, answered in ``\boxed{}``."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from agentrl.answers import final_box, require_math, same_answer
from agentrl.env import Episode, ToolEnv
from agentrl.envs.math_data import Source, load_problems
from agentrl.errors import UsageError
from agentrl.python_tool import PythonTool
from agentrl.tasks import TaskList
from agentrl.types import Task


class Math(ToolEnv):
    r"""Problems from a data set, or from the sixty that come along, answered without tools.

    The reward is 1 where the last ``\boxed{}`` of the final answer means what the data set's answer means, as
    :mod:`agentrl.answers.compare` defines it, and is worked out and of the form that is asked for, as
    :mod:`agentrl.answers.form` does. What the model wrote in ``<think>`` and a box beside a tool call do not count.

    Args:
        split: ``"train"`` or ``"test"``. One data set for both is divided, one problem in ten being test.
        dialect: how tool calls are written.
        max_turns: how often the assistant may speak.
        data: a file (JSON or JSON lines, packed or not, or Parquet), or the name of a Hugging Face data set; or one for
            each split: ``{"train": …, "test": …}``. None plays the sample.
        data_config: the configuration of a Hugging Face data set.
        data_split: its split to read, or which one to read for ``train`` and for ``test``.
        columns: which columns hold ``prompt``, ``passage``, ``choices``, ``answer`` and ``id``, where that can't be
            recognised. Of a prompt that is named, a passage and choices are read only where they are named too.
        skip_bad_rows: leave bad rows out with a warning; without it they are refused.

    Raises:
        UnknownNameError: there is no such split or dialect.
        ConfigError: ``max_turns`` is less than 1, or the columns can't be found.
        UsageError: math-verify is missing, or the data can't be read, has bad rows, or none for this split.
    """

    instructions: ClassVar[str] = r"Solve the problem. Put the final answer in \boxed{}."

    def __init__(
        self,
        *,
        split: str = "train",
        dialect: str = "fence",
        max_turns: int = 1,
        data: str | Mapping[str, str] | None = None,
        data_config: str | None = None,
        data_split: str | Mapping[str, str] | None = None,
        columns: Mapping[str, str] | None = None,
        skip_bad_rows: bool = False,
    ) -> None:
        super().__init__(split=split, dialect=dialect, max_turns=max_turns)
        require_math()
        self._source = Source(
            data=_pairs(data),
            config=data_config,
            split=_pairs(data_split),
            columns=tuple(sorted((columns or {}).items())),
            skip_bad_rows=skip_bad_rows,
        )

    def tasks(self, split: str) -> TaskList:
        """The problems of ``split``.

        Raises:
            UsageError: the data can't be read, has bad rows, or none for ``split``.
        """
        found = load_problems(self._source)
        if split not in found:
            raise UsageError(f'no problem of the data is in the split {split!r}: give data={{"train": …, "test": …}}')
        return found[split]

    def reward(self, episode: Episode) -> Mapping[str, float]:
        """1 for the right answer in the last box of the final turn, else 0."""
        box = final_box(episode.final)
        if box is None or self.dialect.parse(episode.final):
            return {"correct": 0.0}
        return {"correct": float(same_answer(box, episode.task.answer, problem=episode.task.prompt))}

    def gold(self, task: Task) -> Sequence[str]:
        """The answer in a box."""
        return [rf"\boxed{{{task.answer}}}"]


class MathPython(Math):
    """The problems of :class:`Math`, with a Python tool whose state is kept from call to call.

    Takes the arguments of :class:`Math`, and one more.

    Args:
        split: ``"train"`` or ``"test"``.
        dialect: how tool calls are written.
        max_turns: how often the assistant may speak, the answer included.
        timeout: seconds of CPU time per call.
        data: see :class:`Math`, as for the following.
        data_config: see there.
        data_split: see there.
        columns: see there.
        skip_bad_rows: see there.

    Raises:
        UsageError: see :class:`Math`.
    """

    instructions: ClassVar[str] = r"Solve the problem, with Python where it helps. Put the final answer in \boxed{}."

    def __init__(
        self,
        *,
        split: str = "train",
        dialect: str = "fence",
        max_turns: int = 6,
        timeout: float = 5.0,
        data: str | Mapping[str, str] | None = None,
        data_config: str | None = None,
        data_split: str | Mapping[str, str] | None = None,
        columns: Mapping[str, str] | None = None,
        skip_bad_rows: bool = False,
    ) -> None:
        super().__init__(
            split=split,
            dialect=dialect,
            max_turns=max_turns,
            data=data,
            data_config=data_config,
            data_split=data_split,
            columns=columns,
            skip_bad_rows=skip_bad_rows,
        )
        self.tools = (PythonTool(timeout=timeout),)

    def gold(self, task: Task) -> Sequence[str]:
        """One call that prints the answer, then the answer in a box."""
        return [self.dialect.render("python", {"code": f"print({task.answer!r})"}), *super().gold(task)]


def _pairs(value: str | Mapping[str, str] | None) -> str | tuple[tuple[str, str], ...] | None:
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else value
