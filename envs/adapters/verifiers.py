"""``agentrl/Verifiers-v0``: a task set of verifiers (v1) whose rewards need the conversation alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from agentrl.envs.adapters.interpreter import Interpreter
from agentrl.envs.adapters.verdict import GRADED, share, weights
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import TaskList, split_of
from agentrl.types import Task

_WORKER = str(Path(__file__).with_name("verifiers_worker.py"))
_LISTING_SECONDS = 120.0
_KILLED = "grading takes too long, or ends its process"
_TEST_SHARE = 5
"""One task in this many belongs to the test split."""


class _Answer(BaseModel):
    """An answer of the worker, or a part of one."""

    model_config = ConfigDict(strict=True, extra="forbid")


class _Row(_Answer):
    key: str
    system: str
    prompt: str


class _Listing(_Answer):
    tasks: list[_Row]
    needs: list[str]
    weights: dict[str, float]


class _Graded(_Answer):
    parts: dict[str, float | None] | None = None
    failed: str = ""
    """The task's own code has raised."""
    fault: str = ""
    """Something else has failed, such as a provider."""


class Verifiers(ToolEnv):
    """The tasks of a task set, answered in one turn and graded by the task set's own rewards.

    The task set runs in an interpreter of its own, which has the packages verifiers and the task set. What needs more
    than a conversation is refused by name: tools, a harness, a runtime, judges, further turns. A task's id is its key,
    and decides its split. ``episode.state["verdict"]`` keeps the rewards as they were returned. What the task set's own
    code raises, and what ends its process, is graded with the least that can be earned; ``graded`` is 0 then.

    Args:
        python: the interpreter, such as ``venv/bin/python``.
        taskset: the task set's id.
        parts: the range of each reward, as in ``{"exact": [0, 1]}``. Its weight is the task set's own.
        split: ``"train"`` or ``"test"``.
        config: the task set's own settings.
        limit: most tasks that are loaded.
        seconds: CPU time for grading an answer.

    Raises:
        ConfigError: the task set needs more than a conversation, or ``parts`` names other rewards than it has.
        InfrastructureError: the interpreter can't load the task set.
    """

    max_turns = 1

    def __init__(
        self,
        *,
        python: str = "",
        taskset: str = "",
        parts: Mapping[str, tuple[float, float]] | None = None,
        split: str = "train",
        config: Mapping[str, JsonValue] | None = None,
        limit: int = 1000,
        seconds: float = 30.0,
    ) -> None:
        super().__init__(split=split)
        if not python or not taskset:
            raise ConfigError("name the interpreter and the task set, as in python=venv/bin/python and taskset=gsm8k")
        settings = json.dumps(dict(config or {}), sort_keys=True)
        self._there = Interpreter(python=python, file=_WORKER, words=(taskset, settings, str(limit)))
        self._seconds = seconds
        try:
            self._listing = _Listing.model_validate(self._there.ask(seconds=_LISTING_SECONDS, do="tasks"))
        except ValidationError as error:
            raise InfrastructureError(f"the process of {taskset} answers wrongly: {error}") from error
        if needs := ", ".join(self._listing.needs):
            raise ConfigError(f"{taskset} needs {needs}: play it through the endpoint, as docs/your_agent.md shows")
        self._ranges = self._checked(taskset, parts or {})
        theirs = self._listing.weights
        # So that the sum differs from theirs by a constant alone.
        own = {name: theirs[name] * (high - low) for name, (low, high) in self._ranges.items()}
        self.reward_weights = weights(own)  # pyright: ignore[reportAttributeAccessIssue]
        systems = {row.system for row in self._listing.tasks}
        self.instructions = systems.pop() if len(systems) == 1 else ""

    def tasks(self, split: str) -> TaskList:
        """Return the tasks whose key belongs to the split."""
        tasks = [
            Task(id=row.key, prompt=self._prompt(row), data={"index": index})
            for index, row in enumerate(self._listing.tasks)
            if split_of(row.key, _TEST_SHARE) == split
        ]
        if not tasks:
            raise ConfigError(f"none of {len(self._listing.tasks)} tasks belongs to split {split!r}: raise limit")
        return TaskList(tasks)

    def reward(self, episode: Episode) -> Mapping[str, float]:
        """Return the task set's rewards, each as a share of its range."""
        index = cast(int, episode.task.data["index"])
        answer = episode.final.encode("utf-8", "replace").decode()
        reply = self._there.ask(seconds=self._seconds, do="score", index=index, answer=answer)
        try:
            graded = _Graded(failed=_KILLED) if reply is None else _Graded(**reply)
        except ValidationError as error:
            raise InfrastructureError(f"the process of the task set answers wrongly: {error}") from error
        if graded.fault:
            raise InfrastructureError(f"the task set failed: {graded.fault}")
        returned = graded.parts or {}
        shares = {name: share(returned.get(name), *bounds) for name, bounds in self._ranges.items()}
        reasons = [f"{name}: {reason}" for name, (_, reason) in shares.items() if reason]
        reasons += [f"{name} is not declared" for name in returned.keys() - shares.keys()]
        cast(dict[str, Any], episode.state)["verdict"] = {
            "rewards": returned,
            "reason": graded.failed or "; ".join(reasons),
        }
        # Nothing is gained from a verdict that can't be read: then a penalty counts in full.
        worst = {name: float(self.reward_weights[name] < 0) for name in shares}
        earned = {name: worst[name] if reason else value for name, (value, reason) in shares.items()}
        return {**earned, GRADED: float(not reasons and not graded.failed)}

    def _prompt(self, row: _Row) -> str:
        return row.prompt if self.instructions or not row.system else f"{row.system}\n\n{row.prompt}"

    def _checked(self, taskset: str, parts: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Return the range of each part.

        Raises:
            ConfigError: they are not those of the task set, or one is no range.
        """
        names = self._listing.weights
        if set(parts) != set(names) or not all(low < high for low, high in parts.values()):
            example = ", ".join(f"{name} = [0, 1]" for name in names)
            raise ConfigError(f"declare the range of each reward of {taskset}, as in parts = {{ {example} }}")
        return {name: (float(low), float(high)) for name, (low, high) in parts.items()}
