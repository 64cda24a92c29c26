"""Plan episodes: the tasks of a split, their order, and the turns of the environment's gold player."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agentrl.engines.base import Sampling
from agentrl.engines.rng import derive_seed
from agentrl.errors import ConfigError
from agentrl.toolenv.dialects import Dialect
from agentrl.toolenv.registry import make
from agentrl.toolenv.tasks import TaskSet
from agentrl.toolenv.tools.python import backend_of
from agentrl.toolenv.versions import code_versions
from agentrl.types import Message, Origin, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """Task and seed of one episode."""

    task_id: str
    """Id of the task."""
    seed: int
    """Seeds the environment; sampling derives the seed of each turn from it."""
    env: str = ""
    """Name of the environment in a run that mixes several."""
    attempt: int | None = None
    """Which attempt at its task it is in an evaluation, from 0."""
    script: tuple[tuple[int, ...], ...] | None = None
    """Token ids of each turn, where a script such as the gold player's is played; None where an engine samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayRequest:
    """Groups to play."""

    specs: Sequence[Sequence[EpisodeSpec]]
    """One sequence per group, its members' task and seeds."""
    sampling: Sampling
    """Temperature; ``max_tokens`` limits a turn."""
    on_episode: Callable[[Trajectory], None] = lambda _: None
    """Called with each finished episode."""
    played: Mapping[int, Trajectory] = field(default_factory=dict[int, Trajectory])
    """Episodes that were played before, by their seed; they are used as they are."""
    enough: int | None = None
    """Once so many groups are complete, the others are cancelled; None plays all."""
    most_lost: float = math.inf
    """Number of groups that may be lost to infrastructure faults before the others are not played either."""


class TaskSource:
    """Tasks and properties of one split of an environment, which is made only once for all of them.

    Args:
        env_id: the environment's id.
        env_args: the environment's own arguments, without the split.
        split: name of the split.
        name: of the environment in a run that mixes several.

    Raises:
        UnknownNameError: there is no such environment or split.
        ConfigError: the environment does not take one of ``env_args``.
    """

    def __init__(self, env_id: str, env_args: Mapping[str, Any], split: str, name: str = "") -> None:
        self.env_id, self.env_args, self.split, self.name = env_id, env_args, split, name
        self._env = make(env_id, **{**env_args, "split": split})
        # Tasks and gold player need no sandbox, nor any other resource that the environment holds open.
        self._env.close()
        self.dialect: Dialect = self._env.dialect
        """Reads and writes the environment's tool calls."""
        self.best_return: float = self._env.best_return
        """The most that an episode's return can be."""
        self.has_tools = bool(self._env.tools)
        """True where the environment has tools."""

    @property
    def dialects(self) -> list[Dialect]:
        """The dialect in a list; a ``TaskMix`` has several."""
        return [self.dialect]

    @property
    def tasks(self) -> TaskSet:
        """All tasks of the split.

        Raises:
            EnvContractError: the environment's tasks are no tasks, or their ids are not unique.
        """
        return self._env.task_set

    def pick(self, count: int, *, start: int = 0, seed: int | None = None) -> Sequence[Task]:
        """Pick tasks ``start`` to ``start + count``; a finite split begins again where it ends.

        Args:
            count: number of tasks.
            start: index of the first one, counted through all passes; a negative index is in a pass before the first.
            seed: shuffles each pass of a finite split anew, every task once a pass; None keeps the split's own order.
        """
        size, indices = self.tasks.size, range(start, start + count)
        if size is None:
            return [self.tasks[index] for index in indices]
        # Floor division numbers the passes, also negative ones, and the modulo is the index within the pass.
        orders = {number: _order(size, seed, number) for number in {index // size for index in indices}}
        return [self.tasks[orders[index // size][index % size]] for index in indices]

    def gold(self, task: Task, what: str, remedy: str) -> Sequence[str]:
        """Return the turns of the environment's gold player.

        Args:
            task: one of the split's tasks.
            what: the use of the turns, for the error, such as ``"the warm start learns"``.
            remedy: how to do without, for the error.

        Raises:
            ConfigError: the environment has no gold player.
            EnvContractError: its gold is no list of texts.
        """
        try:
            return self._env.gold_turns(task)
        except NotImplementedError as error:
            raise ConfigError(f"{what} from gold episodes, and {error}: {remedy}, or give it a gold method") from error

    def opening(self) -> tuple[Message, ...]:
        """Return the first observation of an episode, always the same one."""
        # Only a reset writes the system message and the instructions.
        observation, _ = self._env.reset(seed=0)
        self._env.close()
        return observation

    def texts(self, count: int) -> Iterator[str]:
        """Return the texts of the gold episodes of the first ``count`` tasks, to train a tokenizer on.

        Raises:
            ConfigError: the environment has no gold player.
        """
        opening = [message["content"] for message in self.opening()]
        for task in itertools.islice(self.tasks, count):
            gold = self.gold(task, "the tiny model's vocabulary comes", "set model.path")
            # Chat templates write the names of the roles between the contents.
            yield "\n".join(["system\nuser\nassistant\ntool", *opening, task.prompt, *gold])

    def origin(self, sampling: Sampling) -> Origin:
        """Return the origin that records of this split's episodes carry."""
        versions = code_versions(type(self._env), self._env.tools)
        sandbox = f"{versions['sandbox']} {backend_of(self._env.tools)}".rstrip()
        return Origin(
            env_id=self.env_id,
            env_args=self.env_args,
            split=self.split,
            best_return=float(self.best_return),
            dialect=self.dialect.label,
            temperature=sampling.temperature,
            turn_tokens=sampling.max_tokens,
            versions={**versions, "sandbox": sandbox},
        )


def _order(size: int, seed: int | None, number: int) -> Sequence[int]:
    """Return the order of ``size`` tasks in pass ``number``."""
    if seed is None:
        return range(size)
    generator = torch.Generator().manual_seed(derive_seed(seed, "pass", number))
    return torch.randperm(size, generator=generator).tolist()
