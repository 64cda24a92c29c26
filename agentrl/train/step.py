"""One training step: collect → score → credit → update → sync.

Legend: S sampled tokens of all episodes of the step end to end, each episode in the order of its turns.
"""

import math
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agentrl import algos
from agentrl.algos.head import token_energy
from agentrl.batch import as_batch
from agentrl.config import Config, OptimSettings
from agentrl.engines.rng import derive_seed
from agentrl.errors import ConfigError
from agentrl.models.load import ROUNDING
from agentrl.train.credit import (
    Scored,
    check_credit,
    correction_weights,
    credit,
    environments,
    loss_mask,
    pool_metrics,
)
from agentrl.train.diagnostics import effective_sample_size
from agentrl.train.groups import RolloutSource, StepGroups, env_metrics
from agentrl.train.interrupts import run_in_thread
from agentrl.train.invariants import check_agreement, check_trained_tokens
from agentrl.train.learner import Learner
from agentrl.train.metrics import peak_flops, rates, summary
from agentrl.train.ranks import check_ranks
from agentrl.train.tokens import TokenRecord
from agentrl.train.update import Observations, Update
from agentrl.types import Group, Trajectory, flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Episodes and metrics of a step."""

    trajectories: Sequence[Trajectory]
    """The episodes, in order."""
    advantages: Sequence[Sequence[float]]
    """For each episode, one advantage per sampled token."""
    metrics: dict[str, float]
    """One row of ``metrics.jsonl``; ``seconds_sync`` is of the weights that the step began with."""
    record: TokenRecord
    """What training made of each token, for the episodes' file."""


@dataclass(slots=True)
class _Stopwatch:
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        began = time.perf_counter()
        yield
        self.seconds[f"seconds_{name}"] = time.perf_counter() - began


class Trainer:
    """Trains a policy on groups of episodes.

    Args:
        config: the run's settings.
        learner: holds the policy's weights and optimizer, and the reference that ``algo.kl_coef`` needs.
        rollouts: the source of the groups of each step.
    """

    def __init__(self, config: Config, learner: Learner, rollouts: RolloutSource) -> None:
        self.config = config
        self.learner = learner
        self.rollouts = rollouts
        # The tolerance for the trainer against itself; against the engine the larger of the two counts.
        self._rounding = ROUNDING[getattr(torch, config.model.dtype)]
        self.updates = 0
        """Gradient steps begun in the run."""
        self.sampled_tokens = 0
        """Tokens sampled in all finished steps of the run."""
        self.skipped = 0
        """Steps in a row in which every update was skipped, since its gradient was not finite."""
        self.phase = ""
        """What it is doing, by the name of its seconds among the metrics: ``generate``, ``score`` …"""
        self._has_updated = False
        self._synced = _Stopwatch()

    def state(self) -> dict[str, int]:
        """Return the counts that a checkpoint keeps."""
        return {"updates": self.updates, "sampled_tokens": self.sampled_tokens, "skipped": self.skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the counts of a checkpoint, among others in ``state``."""
        self.updates, self.sampled_tokens, self.skipped = state["updates"], state["sampled_tokens"], state["skipped"]

    async def step(self, number: int, learned: Callable[[StepResult], Awaitable[object]] | None = None) -> StepResult:
        """Run step ``number``, counting from 1.

        Args:
            number: of the step.
            learned: called with the result as soon as the weights are those of the step, and awaited before an
                engine gets them.

        Raises:
            ConfigError: no prompt leaves room for a turn.
            InvariantError: engine, record and trainer do not fit together.
            FaultRateError: too many groups were lost to infrastructure faults.
        """
        watch = _Stopwatch()
        with self._phase(watch, "generate"):
            played = await self.rollouts.batch(number)
        learn = partial(self._learn, number, played, watch)
        # With overlap the learner works in a thread, since this thread's event loop plays groups of later steps.
        result = learn() if self.config.rollout.overlap.mode == "off" else await run_in_thread(learn)
        result.metrics.update(self.rollouts.learned(played.collected.groups))
        if learned is not None:
            await learned(result)
        await self.sync(number)
        return result

    def _learn(self, number: int, played: StepGroups, watch: _Stopwatch) -> StepResult:
        # All rows are scored and credited before the first update. So every update of the step has the same *old*
        # policy, and a baseline sees all rows of its group.
        with self._phase(watch, "score"):
            scored = self._score(played.trained)
        with self._phase(watch, "credit"):
            scored = credit(self.config.algo, scored, scored.old_logp)
        with self._phase(watch, "update"):
            record = TokenRecord.of(self.config.algo, scored)
            learned = self._update(scored, number, played.sampled_tokens, record)
        # Counted only now: the updates' learning rate follows from the tokens of earlier steps and a share of these.
        self.sampled_tokens += played.sampled_tokens
        metrics = {**summary(number, played, scored), **played.collected.sandbox, **learned, **watch.seconds}
        metrics |= {**self._synced.seconds, **played.metrics, **pool_metrics(self.config.algo, scored)}
        metrics |= rates(metrics, peak_flops(self.learner.model.device, self.config.model.dtype))
        metrics |= env_metrics(played.collected.groups, self.rollouts.origins)
        advantages = [part.tolist() for part in scored.advantages.split(scored.starts.diff().tolist())]
        return StepResult(trajectories=flatten(played.trained), advantages=advantages, metrics=metrics, record=record)

    async def sync(self, version: int) -> None:
        """Publish the learner's weights as ``version``.

        Raises:
            InvariantError: an engine samples from other weights than these.
            InfrastructureError: the engine failed.
        """
        with self._phase(self._synced, "sync"):
            await self.rollouts.published(self.learner, version)

    def _phase(self, watch: _Stopwatch, name: str) -> AbstractContextManager[None]:
        self.phase = name
        return watch.phase(name)

    def _score(self, groups: Sequence[Group]) -> Scored:
        """Compute the algorithms' inputs of every sampled token, under the weights as they are."""
        algo, rollout = self.config.algo, self.config.rollout
        batch, episodes = as_batch(groups), flatten(groups)
        if not len(batch.sampled):
            raise ConfigError(
                f"no prompt leaves room for a turn within rollout.episode_tokens={rollout.episode_tokens}"
            )
        # Wrong tokens would show as disagreeing log-probs too. They are checked first, for the clearer message.
        check_trained_tokens(groups, batch.tokens, batch.in_time(batch.sampled))
        age = self.rollouts.check(groups)
        logp, entropy, sum_sq = (batch.in_time(part) for part in self.learner.score(batch))
        sampler_logp = batch.in_time(batch.sampler_logp)
        # Tokens of older weights rightly differ. The engine was compared with those weights when it got them.
        same_weights = torch.where(age == 0, sampler_logp, logp)
        disagreement = check_agreement(logp, same_weights, max(self._rounding, self.rollouts.rounding))
        scored = Scored(
            batch=batch,
            environment=environments(episodes),
            rewards=batch.in_time(batch.rewards),
            sampler_logp=sampler_logp,
            age=age,
            disagreement=disagreement,
            old_logp=logp,
            reference_logp=batch.in_time(self.learner.score_reference(batch)) if algo.kl_coef else None,
            entropy=entropy,
            energy=token_energy(logp, sum_sq),
            in_loss=torch.ones_like(logp, dtype=torch.bool),
            advantages=torch.zeros_like(logp),
        )
        return replace(scored, in_loss=loss_mask(self.config, scored, episodes))

    def _credit_again(self, scored: Scored) -> Scored:
        """Recompute energy and advantages of the same rows under the policy as it is now."""
        logp, _, sum_sq = (scored.batch.in_time(part) for part in self.learner.score(scored.batch))
        return credit(self.config.algo, replace(scored, energy=token_energy(logp, sum_sq)), logp)

    def _update(self, scored: Scored, number: int, sampled: int, record: TokenRecord) -> dict[str, float]:
        """Do ``optim.epochs`` passes of ``optim.minibatches`` updates each; return their mean metrics and the drift.

        Args:
            scored: the rows of step ``number``.
            number: of the step.
            sampled: number of tokens that the step has sampled.
            record: gets the rows' log-probs and clipped tokens of the first pass.
        """
        optim, algo = self.config.optim, self.config.algo
        # The ratio old/sampler does not change while θ is updated: the loss's own ratio is θ/old.
        weights = correction_weights(algo, scored)
        observations, minibatches = Observations(record), self._minibatches(scored.trained_episodes, number)
        updates = sum(map(len, minibatches))
        collected: list[dict[str, float] | None] = []
        for epoch, parts in enumerate(minibatches):
            # The last pass has moved θ, and with it the ratios θ/sampler that weigh the energies. old_logp stays, since
            # the loss's ratio is measured from it in every pass.
            if epoch and algo.advantage_options.get("weights") == "cumulative":
                scored = self._credit_again(scored)
            for part in parts:
                # The rate falls within a step too, by the share of its updates that is done.
                spent = self._tokens_spent(sampled, len(collected) / updates)
                rate = learning_rate(optim, self.updates + 1, spent)
                collected.append(self._update_once(scored, part, weights, rate, observations))
        done = [row for row in collected if row is not None]
        counts = {"updates": len(done), "updates_skipped": len(collected) - len(done)}
        always = {"weight_ess": effective_sample_size(weights), **counts}
        self.skipped = self.skipped + 1 if collected and not done else 0
        # Where every update was skipped, there is nothing to take the mean of.
        if not done:
            return always
        means = {name: sum(row[name] for row in done) / len(done) for name in done[0]}
        return means | observations.metrics() | always

    def _minibatches(self, episodes: Tensor, number: int) -> list[list[list[int]]]:
        """Shuffle episodes for each pass of step ``number`` and cut them into minibatches, none of which is empty."""
        passes: list[list[list[int]]] = []
        for epoch in range(self.config.optim.epochs):
            generator = torch.Generator().manual_seed(derive_seed(self.config.run.seed, "rows", number, epoch))
            shuffled = episodes[torch.randperm(len(episodes), generator=generator)]
            passes.append([part.tolist() for part in shuffled.tensor_split(self.config.optim.minibatches) if len(part)])
        return passes

    def _tokens_spent(self, new: int, share: float) -> float:
        """Compute the spent fraction of ``optim.max_sampled_tokens``, by which the learning rate falls; 0 if it is 0.

        Args:
            new: tokens that this step has sampled.
            share: fraction of this step's updates that are done, in [0, 1).
        """
        budget = self.config.optim.max_sampled_tokens
        if budget == 0:
            return 0.0
        # The last step samples past the budget. Were its excess counted, the rate would reach 0 before its last update.
        return (self.sampled_tokens + share * min(new, budget - self.sampled_tokens)) / budget

    def _update_once(
        self, scored: Scored, episodes: Sequence[int], weights: Tensor, rate: float, observations: Observations
    ) -> dict[str, float] | None:
        """Do one gradient step at learning rate ``rate`` on ``episodes``, accumulated over packs.

        Returns:
            Its metrics; None where the gradient is not finite and the step was skipped.
        """
        packs = self.learner.packs(scored.batch, episodes)
        update = Update(self.config.algo, scored, weights, packs, None if self._has_updated else self._rounding)
        # From here on the weights belong to no complete step: a run that is stopped now must not save them.
        self.updates += 1
        norm = self.learner.update(packs, update.loss, rate)
        if not math.isfinite(norm):
            return None
        update.observe(observations, self.learner.model)
        self._has_updated = True
        return {"loss": update.total, "grad_norm": norm}


def learning_rate(optim: OptimSettings, update: int, spent: float = 0.0) -> float:
    """Compute the learning rate of an update: linear warmup, then constant or falling to 0.

    It falls in a straight line, or as half a cosine (arXiv 1608.03983, without restarts).

    Args:
        optim: rate, warmup and schedule.
        update: number of the update, counting from 1.
        spent: fraction of the budget of sampled tokens that is gone before it.
    """
    rate = optim.lr * min(1.0, update / max(1, optim.warmup))
    if optim.schedule == "constant":
        return rate
    # Training ends at whichever comes first, steps or tokens, and the rate falls with the one that is closer.
    total = optim.steps * optim.epochs * optim.minibatches
    left = max(0.0, 1 - max((update - 1) / total, spent))
    return rate * (left if optim.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * left))


def check_training_config(config: Config) -> None:
    """Refuse settings that training can't follow, before anything is loaded or written.

    Raises:
        ConfigError: an option of the algorithm is invalid, or a pack can't hold an episode.
        UnknownNameError: there is no such advantage or loss.
    """
    algos.check_options("advantage", config.algo.advantage, config.algo.advantage_options)
    algos.check_options("loss", config.algo.loss, config.algo.loss_options)
    check_credit(config)
    check_ranks(config)
    if config.optim.max_tokens < config.rollout.episode_tokens:
        raise ConfigError(
            f"optim.max_tokens={config.optim.max_tokens} can't hold an episode of rollout.episode_tokens="
            f"{config.rollout.episode_tokens}: raise the one or lower the other"
        )
