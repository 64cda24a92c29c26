"""Sources of the groups of episodes of each step, and the choice of groups to train on."""

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from agentrl.algos.head import TokenStats
from agentrl.batch import Batch, as_batch
from agentrl.config import Config
from agentrl.engines.base import Engine, Sampling, Sleeper
from agentrl.engines.rng import derive_seed
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.models.load import ROUNDING
from agentrl.rollout.collected import Collected, joined
from agentrl.rollout.collector import Collector
from agentrl.rollout.metrics import episode_means
from agentrl.rollout.mix import TaskMix
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.taskplan import Choose, make_plan
from agentrl.segments import Row, Segment
from agentrl.train.interrupts import computing
from agentrl.train.invariants import check_agreement, check_tools_are_called, check_versions, check_weights_in_use
from agentrl.train.learner import Learner
from agentrl.train.order import TaskOrder
from agentrl.types import Group, Origin, Trajectory, flatten, won


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """The groups of a step."""

    collected: Collected
    """All of them, in the order they were asked for."""
    trained: Sequence[Group]
    """Those to train on, in that order."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further measurements of the source."""

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled in all of them."""
        return sum(episode.n_sampled for episode in flatten(self.collected.groups))

    @property
    def silent(self) -> int:
        """Number of groups without a learning signal."""
        return sum(map(is_silent, self.collected.groups))


class RolloutSource(Protocol):
    """Source of the groups of each step of a trainer."""

    origins: Mapping[str, Origin]
    """What records of the episodes say of their environment, by its name in a mix."""
    rounding: float
    """Largest |Δ log-prob| between an episode's record and the trainer that its sampler explains, in nats."""
    steps: float
    """The last step that it has groups for."""

    async def batch(self, number: int) -> StepGroups:
        """Return the groups of step ``number``, counting from 1."""
        ...

    def check(self, groups: Sequence[Group]) -> Tensor:
        """Check groups that are about to be trained on.

        Returns:
            For each sampled token, by how many steps the weights that sampled it are older than the trainer's [S].

        Raises:
            InvariantError: training on them would be wrong.
        """
        ...

    async def published(self, learner: Learner, version: int) -> None:
        """Take the learner's weights, which are to sample from now on, as ``version``."""
        ...

    def learned(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Note all groups of a step that was trained on; return metrics; by default nothing."""
        return {}

    def state(self) -> Mapping[str, object]:
        """Return what a checkpoint keeps of the source, as plain data."""
        ...

    def unused(self) -> Sequence[Trajectory]:
        """Return the episodes of later steps, which a checkpoint keeps too; by default there are none."""
        return ()

    def restore(self, state: Mapping[str, Any], unused: Sequence[Trajectory]) -> None:
        """Continue from what a checkpoint has kept; by default nothing."""


class Collecting(RolloutSource):
    """A :class:`RolloutSource` that plays the groups of a step when it is asked for them.

    Args:
        config: the run's settings.
        mix: the tasks of the training split.
        collector: plays that split.
        engine: samples from a copy of the policy.

    Raises:
        ConfigError: ``run.deterministic`` is set, and the engine is not exact.
    """

    staleness = 0
    """Number of steps by which the weights that sampled a token may be older than the trainer's."""

    def __init__(self, config: Config, mix: TaskMix, collector: Collector, engine: Engine) -> None:
        self._config, self._collector, self._engine = config, collector, engine
        if config.run.deterministic and not engine.exact:
            raise ConfigError(
                f"run.deterministic needs an engine whose tokens no other request changes, which {config.engine.name} "
                f"is not on {config.model.device}: set it to false, or sample with engine.name='transformers' on a CPU"
            )
        rollout = config.rollout
        self._sampling = Sampling(temperature=rollout.temperature, max_tokens=rollout.turn_tokens)
        self.origins = mix.origins(self._sampling)
        self.rounding, self.steps = engine.rounding, math.inf
        self._trainer_rounding = ROUNDING[getattr(torch, config.model.dtype)]
        self._score: Callable[[Batch], TokenStats] | None = None
        """The trainer's scoring, under the weights that sample."""
        self._silent = {name for name, source in mix.sources.items() if source.has_tools}
        """Environments with tools whose tools were not called yet."""
        self._version = 0
        self._order, self._plan = TaskOrder(), make_plan(config, mix)

    async def batch(self, number: int) -> StepGroups:
        """Play the groups of step ``number``."""
        played = await self._play(number, self._plan.pick(number))
        # From here to ``published`` nothing is sampled: the trainer may have a GPU that both use.
        if isinstance(self._engine, Sleeper):
            await self._engine.sleep()
        return self._chosen(await self._exact(played))

    async def _play(self, number: int, choose: Choose, **options: Any) -> Collected:
        """Play ``rollout.group_size`` episodes of each of ``rollout.tasks`` tasks for step ``number``.

        ``rollout.overlap.spare`` further groups begin with them, and the slowest groups are cancelled.

        Dynamic sampling (DAPO, arXiv 2503.14476): up to ``rollout.plan.refills`` times, groups of further tasks replace
        silent groups.

        Args:
            number: of the step.
            choose: the plan's choice of tasks for the step.
            options: those of ``Collector.collect``.

        Raises:
            FaultRateError: too many groups were lost to infrastructure faults.
        """
        rollout, seed = self._config.rollout, self._config.run.seed
        parts = list[Collected]()
        begin, missing = 0, rollout.tasks
        # Where several end in the same moment there may be more than are missing.
        while missing > 0 and len(parts) <= rollout.plan.refills:
            dealt = self._order.of(number, begin, begin + missing + rollout.overlap.spare, choose)
            specs = list[list[EpisodeSpec]]()
            for index, env, task_id in dealt:
                seeds = [derive_seed(seed, "episode", index, member) for member in range(rollout.group_size)]
                specs.append([EpisodeSpec(task_id=task_id, seed=own, env=env) for own in seeds])
            played = await self._collector.collect(specs, self._engine, self._sampling, enough=missing, **options)
            parts.append(played)
            # A group that was lost is not played again: its fault might come back in every step.
            ended = {group.trajectories[0].seed for group in played.groups}
            idle = [group for group, (spec, *_) in zip(dealt, specs, strict=True) if spec.seed not in ended]
            idle = idle[played.lost :]
            self._order.give_back(number, idle)
            begin += len(dealt) - len(idle)
            missing -= sum(not is_silent(group) for group in played.groups)
        return joined(parts)

    async def _exact(self, collected: Collected) -> Collected:
        """Replace the log-probs of a deterministic run's groups with the trainer's."""
        if not self._config.run.deterministic:
            return collected
        assert self._score is not None, "published comes first"
        # In a thread, since the engine and a learner may be at work meanwhile.
        rounding = max(self._trainer_rounding, self.rounding)
        work = partial(rescored, collected.groups, self._score, rounding)
        groups = await asyncio.to_thread(computing, work)
        return replace(collected, groups=groups)

    def _chosen(self, collected: Collected) -> StepGroups:
        """Choose ``rollout.tasks`` groups in order; silent ones, the first of them, only where others are too few."""
        groups = collected.groups
        ranked = sorted(range(len(groups)), key=lambda index: is_silent(groups[index]))
        trained = [groups[index] for index in sorted(ranked[: self._config.rollout.tasks])]
        return StepGroups(collected=collected, trained=trained)

    def check(self, groups: Sequence[Group]) -> Tensor:
        """Check that the groups' weights are not too old, and that the first groups call tools where there are any."""
        ages = check_versions(groups, self._version, self.staleness)
        # Checked in the first groups only: a policy that has learned to call may rightly stop. In a mix a call in one
        # environment is enough.
        if tooled := [group for group in groups if group.env in self._silent]:
            check_tools_are_called(tooled, self._config.sft.steps)
            self._silent.clear()
        return ages

    async def published(self, learner: Learner, version: int) -> None:
        """Load the weights into the engine, and check on 32 tokens that it samples from them."""
        await self._engine.load_weights(learner.weights(), version)
        self._version, self._score = version, learner.score
        self._order.forget(version)
        rollout = self._config.rollout
        probe = Sampling(temperature=rollout.temperature, max_tokens=min(32, rollout.episode_tokens))
        for attempt in range(2):
            try:
                await check_weights_in_use(self._engine, probe, learner.score, self._trainer_rounding)
                return
            except InfrastructureError:  # retried once, as an episode is
                if attempt:
                    raise

    def learned(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Pass a step's groups on to the plan of tasks."""
        return self._plan.learned(groups)

    def state(self) -> Mapping[str, object]:
        """Return which tasks come next."""
        return {"order": self._order.state(), "plan": self._plan.state()}

    def restore(self, state: Mapping[str, Any], unused: Sequence[Trajectory]) -> None:
        """Continue with the tasks that come next."""
        self._order.restore(state["order"])
        self._plan.restore(state["plan"])


def env_metrics(groups: Sequence[Group], origins: Mapping[str, Origin]) -> dict[str, float]:
    """Compute the share of successes, and the metrics ``env/NAME/…`` of each environment of a mix.

    Args:
        groups: all groups of a step.
        origins: of the environments, by name.
    """
    metrics = _success(groups, origins)
    for name in filter(None, origins):
        mine = [group for group in groups if group.env == name]
        metrics |= {f"env/{name}/groups": len(mine), f"env/{name}/groups_silent": sum(map(is_silent, mine))}
        # In a step in which it has no episode, there is nothing to take the mean of.
        if episodes := flatten(mine):
            means = {**_success(mine, origins), **episode_means(episodes)}
            metrics |= {f"env/{name}/{key}": mean for key, mean in means.items()}
    return metrics


def _success(groups: Sequence[Group], origins: Mapping[str, Origin]) -> dict[str, float]:
    """Return the share of successful episodes, as the metric ``success``; none where there is no episode."""
    wins = [won(episode, origins[group.env].best_return) for group in groups for episode in group]
    return {"success": sum(wins) / len(wins)} if wins else {}


def rescored(groups: Sequence[Group], score: Callable[[Batch], TokenStats], rounding: float) -> tuple[Group, ...]:
    """Replace the engine's log-probs with the trainer's.

    Args:
        groups: the episodes.
        score: the trainer's, under the weights that sampled them.
        rounding: largest |Δ log-prob| that the arithmetic of the two explains, in nats.

    Raises:
        InvariantError: the two disagree by more.
    """
    batch = as_batch(groups)
    if not len(batch.sampled):
        return tuple(groups)
    logp = score(batch).logp
    check_agreement(logp, batch.sampler_logp, rounding)
    logprob_values = iter(logp.tolist())

    def again(segment: Segment) -> Segment:
        logprobs = tuple(itertools.islice(logprob_values, len(segment.token_ids))) if segment.trained else None
        return replace(segment, logprobs=logprobs)

    def row_again(row: Row) -> Row:
        return replace(row, segments=tuple(map(again, row.segments)))

    return tuple(
        Group(tuple(replace(episode, segments=(), rows=tuple(map(row_again, episode.rows))) for episode in group))
        for group in groups
    )


def is_silent(group: Group) -> bool:
    """Return True if all episodes of a group have the same return: then comparing them gives no learning signal."""
    return len({episode.learned_return for episode in group}) == 1
