r"""``agentrl/Math-v0`` and ``agentrl/MathPython-v0``: mathematical problems, answered in ``\boxed{}``."""

from collections.abc import Mapping, Sequence

from agentrl.envs.datafiles import table, tasks_of, text_or_table
from agentrl.envs.math.data import Source, load_problems
from agentrl.grading.latex import final_box, require_math, same_answer
from agentrl.grading.numbers import spelled
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import TaskList
from agentrl.toolenv.tools.python import PythonTool
from agentrl.types import Task


class Math(ToolEnv):
    r"""Problems from a data set, or from the sixty that come along.

    The reward is 1 where the last ``\boxed{}`` of the final answer means what the data set's answer means, as
    :mod:`agentrl.grading.latex.compare` defines it. It must also be worked out and have the form that the problem asks
    for, as :mod:`agentrl.grading.latex.form` defines these. What the model wrote in ``<think>`` and a box beside a tool
    call do not count.

    Args:
        split: ``"train"`` or ``"test"``. One data set for both is divided, one problem in ten being test.
        dialect: how tool calls are written.
        max_turns: how often the assistant may speak; None lets it six times with the tool, and once without.
        tool: whether there is a Python tool, whose state is kept from call to call.
        timeout: seconds of CPU time per call of it.
        sandbox: the back end that runs it; empty for that of the run, ``env.sandbox``.
        max_chars: characters of its answer that the model reads; a longer one is cut in the middle.
        data: a file (JSON or JSON lines, packed or not, or Parquet), or the name of a Hugging Face data set; or one for
            each split: ``{"train": …, "test": …}``. None plays the sample.
        data_config: the configuration of a Hugging Face data set.
        data_split: its split to read, or which one to read for ``train`` and for ``test``.
        columns: which columns hold ``prompt``, ``passage``, ``choices``, ``answer``, ``letter``, ``equation`` and
            ``id``, where that can't be recognised. Beside a named prompt, a passage and choices are read only where
            they are named too.
        skip_bad_rows: skip bad rows with a warning; without it they are refused.

    Raises:
        UnknownNameError: there is no such split or dialect.
        ConfigError: ``max_turns`` is less than 1, ``max_chars`` is too few, or the columns can't be found.
        UsageError: math-verify is missing, or the data can't be read, has bad rows, or none for this split.
    """

    instructions = r"Solve the problem. Put the final answer in \boxed{}."

    def __init__(
        self,
        *,
        split: str = "train",
        dialect: str = "fence",
        max_turns: int | None = None,
        tool: bool = False,
        timeout: float = 5.0,
        max_chars: int = 1000,
        sandbox: str = "",
        data: str | Mapping[str, str] | None = None,
        data_config: str | None = None,
        data_split: str | Mapping[str, str] | None = None,
        columns: Mapping[str, str] | None = None,
        skip_bad_rows: bool = False,
    ) -> None:
        turns = (6 if tool else 1) if max_turns is None else max_turns
        super().__init__(split=split, dialect=dialect, max_turns=turns)
        # Missing packages are an error now, not at the first grading.
        require_math()
        if tool:
            self.tools = (PythonTool(timeout=timeout, max_chars=max_chars, sandbox=sandbox),)
            self.instructions = r"Solve the problem, with Python where it helps. Put the final answer in \boxed{}."
        self._source = Source(
            data=text_or_table("data", data),
            config=data_config,
            split=text_or_table("data_split", data_split),
            columns=table("columns", columns or {}),
            skip_bad_rows=skip_bad_rows,
        )

    def tasks(self, split: str) -> TaskList:
        """Return the problems of ``split``.

        Raises:
            UsageError: the data can't be read, has bad rows, or none for ``split``.
        """
        return tasks_of(load_problems(self._source), split, self._source.files)

    def reward(self, episode: Episode) -> Mapping[str, float]:
        """Return 1 for the right answer in the final turn's last box, or for the right choice's letter, else 0."""
        task, box = episode.task, self._box(episode)
        right = [task.answer, str(task.data["letter"])] if "letter" in task.data else [task.answer]
        return {"correct": float(any(same_answer(box, answer, problem=task.prompt) for answer in right))}

    def answer_of(self, episode: Episode) -> str:
        """Return the content of that box."""
        return spelled(self._box(episode))

    def _box(self, episode: Episode) -> str | None:
        return None if self.dialect.parse(episode.final) else final_box(episode.final)

    def gold(self, task: Task) -> Sequence[str]:
        """Return the answer in a box, after a call that works it out by the row's equation where there is the tool."""
        code = f"print({task.data.get('equation', repr(task.answer))})"
        calls = [self.dialect.render("python", {"code": code})] if self.tools else []
        return [*calls, rf"\boxed{{{task.answer}}}"]
