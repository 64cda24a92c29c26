"""Groups that are played while the trainer learns.

A step's groups may begin once ``step ≤ version + 1 + staleness``, and steps are trained on in order. So no episode is
ever too old or thrown away, and sampling waits for slower learning. Tasks and seeds come in the order of a run without
overlap.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

from agentrl.config import Config
from agentrl.engines.base import Engine
from agentrl.errors import ConfigError
from agentrl.rollout.collected import Clock, Collected
from agentrl.rollout.collector import Collector
from agentrl.rollout.mix import TaskMix
from agentrl.rollout.taskplan import Choose
from agentrl.train.groups import Collecting, StepGroups
from agentrl.train.learner import Learner
from agentrl.types import Group, Trajectory, flatten


@dataclass(slots=True)
class _Ahead:
    """Episodes of a step that was not trained on yet."""

    episodes: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])
    """The episodes that have ended, by their seed."""
    counts: dict[str, Any] | None = None
    """Counts of ``Collected`` beside the episodes; None until all episodes have ended."""
    task: asyncio.Task[StepGroups] | None = None
    """Plays the episodes."""


class Overlapped(Collecting):
    """A ``RolloutSource`` that plays groups of later steps while the trainer learns.

    It plays up to ``rollout.overlap.staleness`` steps ahead. With the mode "lag" all groups end before the engine gets
    new weights, with "inflight" they continue.

    Args:
        config: the run's settings.
        mix: the tasks of the training split.
        collector: plays that split.
        engine: samples from a copy of the policy.
    """

    def __init__(self, config: Config, mix: TaskMix, collector: Collector, engine: Engine) -> None:
        super().__init__(config, mix, collector, engine)
        self._lag = config.rollout.overlap.mode == "lag"
        self.staleness = config.rollout.overlap.staleness
        self._ahead: dict[int, _Ahead] = {}

    async def batch(self, number: int) -> StepGroups:
        """Return the groups of step ``number`` once they have ended; groups of later steps begin, or continue."""
        began = time.perf_counter()
        groups = self._begin(number)
        last = min(self._version + 1 + self.staleness, self._config.optim.steps)
        for later in range(number + 1, last + 1):
            self._begin(later)
        played = await groups
        del self._ahead[number]
        rollout = self._config.rollout
        left = [rollout.tasks - len(ahead.episodes) / rollout.group_size for ahead in self._ahead.values()]
        waited = time.perf_counter() - began
        # The time that playing took is not the time that the trainer has waited.
        metrics = {"groups_in_flight": sum(max(0, missing) for missing in left), "seconds_waited": waited}
        metrics["groups_cancelled"] = played.collected.cancelled
        return replace(played, metrics={**metrics, "seconds_generate": played.collected.seconds})

    async def published(self, learner: Learner, version: int) -> None:
        """Load the weights into the engine; with a lag, wait until all groups have ended."""
        for task in [ahead.task for ahead in self._ahead.values() if ahead.task]:
            # An error of the groups stops the run at once, not only when their step comes.
            if self._lag or task.done():
                await task
        await super().published(learner, version)
        # Episodes of these weights are scored later, when the learner has other weights.
        if self._config.run.deterministic:
            self._score = learner.frozen()

    def state(self) -> Mapping[str, object]:
        """Return, for each later step, its number of episodes in ``unused`` and the counts of a complete one."""
        counted = {str(step): (len(ahead.episodes), ahead.counts) for step, ahead in self._ahead.items()}
        return {**super().state(), "ahead": counted}

    def unused(self) -> Sequence[Trajectory]:
        """Return all episodes of later steps that have ended."""
        return [episode for ahead in self._ahead.values() for episode in ahead.episodes.values()]

    def restore(self, state: Mapping[str, Any], unused: Sequence[Trajectory]) -> None:
        """Take over the episodes of later steps; episodes that their groups lack are played again."""
        super().restore(state, unused)
        rest = iter(unused)
        for step, (count, counts) in state["ahead"].items():
            self._ahead[int(step)] = _Ahead({episode.seed: episode for episode in islice(rest, count)}, counts)

    def _begin(self, number: int) -> asyncio.Task[StepGroups]:
        ahead = self._ahead.setdefault(number, _Ahead())
        if ahead.task is None:
            # The plan is asked here and not where the episodes begin: when that is depends on the clock.
            ahead.task = asyncio.create_task(self._play_ahead(number, ahead, self._plan.pick(number)))
            # Where several fail, the first error is raised. Reading the others keeps asyncio from logging them.
            ahead.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return ahead.task

    async def _play_ahead(self, number: int, ahead: _Ahead, choose: Choose) -> StepGroups:
        episodes_by_seed = dict(ahead.episodes)
        if ahead.counts is not None:
            # A checkpoint has kept all of them. Groups that were lost then stay lost: they are counted, and not played.
            size, episodes = self._config.rollout.group_size, tuple(episodes_by_seed.values())
            groups = tuple(Group(episodes[at : at + size]) for at in range(0, len(episodes), size))
            counts = dict(ahead.counts)
            return self._chosen(Collected(groups=groups, clock=Clock(**counts.pop("clock")), **counts))
        before = self._ahead.get(number - 1)
        # Runs of the sandbox are counted for the process: only if steps don't overlap are the counts those of one step.
        if self._lag and before and before.task:
            await asyncio.wait({before.task})

        def ended(episode: Trajectory) -> None:
            ahead.episodes[episode.seed] = episode

        collected = await self._play(number, choose, played=episodes_by_seed, on_episode=ended)
        collected = await self._exact(collected)
        # A checkpoint must keep the episodes with these log-probs.
        ahead.episodes = {episode.seed: episode for episode in flatten(collected.groups)}
        names = ("faults", "lost", "cancelled", "seconds")
        ahead.counts = {name: getattr(collected, name) for name in names}
        ahead.counts |= {"sandbox": dict(collected.sandbox), "clock": asdict(collected.clock)}
        return self._chosen(collected)


def check_overlap(config: Config) -> None:
    """Refuse settings of overlap that contradict others.

    Raises:
        ConfigError: they do.
    """
    inflight = config.rollout.overlap.mode == "inflight"
    if inflight and config.run.deterministic:
        raise ConfigError(
            "run.deterministic=true needs rollout.overlap='off' or 'lag': with 'inflight' the clock decides which "
            "weights sample a token"
        )
    if config.engine.options.get("sleep") and (config.rollout.overlap.mode != "off" or config.fleet.name != "local"):
        raise ConfigError(
            "engine.options.sleep leaves the GPU to a trainer that waits for its groups: set rollout.overlap='off' and "
            "fleet.name='local', or leave it out"
        )
    if config.rollout.overlap.spare and not inflight:
        raise ConfigError(
            "rollout.overlap.spare cancels groups by the clock, which needs rollout.overlap='inflight': set it so, or "
            "rollout.overlap.spare to 0"
        )


def make_source(config: Config, mix: TaskMix, collector: Collector, engine: Engine) -> Collecting:
    """Make the source that ``rollout.overlap.mode`` asks for.

    Raises:
        ConfigError: ``run.deterministic`` is set, and the engine is not exact.
    """
    return (Collecting if config.rollout.overlap.mode == "off" else Overlapped)(config, mix, collector, engine)
