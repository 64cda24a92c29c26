"""One training step: collect → score → credit → update → sync.

Legend: S sampled tokens of all rows of the step, laid end to end.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from agentrl import algos
from agentrl.algos.aggregate import pack_shares
from agentrl.algos.head import token_energy
from agentrl.algos.ratios import behaviour_weights
from agentrl.assemble import Parts, pick_tasks
from agentrl.batch import Batch, whole
from agentrl.config import AlgoSettings, Config, OptimSettings
from agentrl.diagnostics import Drift, effective_sample_size, position_metrics
from agentrl.engines.base import Sampling
from agentrl.errors import ConfigError
from agentrl.invariants import (
    check_agreement,
    check_first_ratio,
    check_tools_are_called,
    check_trained_tokens,
    refuse_biased_sampling,
)
from agentrl.metrics import sandbox_metrics
from agentrl.policy import score
from agentrl.python_tool import sandbox_counters
from agentrl.rng import derive_seed
from agentrl.rollout import Collected, Collector, EpisodeSpec, always
from agentrl.types import Trajectory, flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """All rows of a step with what the algorithms read; every tensor is [S]."""

    batch: Batch
    """The rows, in the order of the episodes."""
    old_logp: Tensor
    """The trainer's log-prob of each token before any update, in nats."""
    entropy: Tensor
    """Of the distribution that each token was sampled from, in nats."""
    energy: Tensor
    """Token energy ‖onehot(y) - π‖² (OTB, arXiv 2602.07078)."""
    advantages: Tensor
    """Credit of each token; zero until it is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step leaves behind."""

    trajectories: Sequence[Trajectory]
    """Its episodes, in order."""
    advantages: Sequence[Sequence[float]]
    """For each episode, one advantage per sampled token."""
    metrics: dict[str, float]
    """One row of ``metrics.jsonl``."""


@dataclass(slots=True)
class _Stopwatch:
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        began = time.perf_counter()
        yield
        self.seconds[f"seconds_{name}"] = time.perf_counter() - began


class Trainer:
    """Trains a policy on one environment.

    Args:
        config: the run's settings.
        parts: model, renderer and engine.
        collector: plays the training split.

    Raises:
        ConfigError: sampling would bias every ratio, or an option of the algorithm is invalid.
        UnknownNameError: there is no such advantage or loss.
    """

    def __init__(self, config: Config, parts: Parts, collector: Collector) -> None:
        self.config = config
        self._parts = parts
        self._collector = collector
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.optimizer = torch.optim.AdamW(
            parts.model.parameters(),
            lr=config.optim.lr,
            betas=config.optim.betas,
            weight_decay=config.optim.weight_decay,
        )
        self.updates = 0
        """Gradient steps begun so far, those before a resumption included; set it when resuming."""
        self.sampled_tokens = 0
        """Tokens sampled in the steps that are done, those before a resumption included; set it when resuming."""
        self._checked = False

    async def step(self, number: int, on_episode: Callable[[Trajectory], None] = lambda _: None) -> StepResult:
        """Do step ``number``, counting from 1.

        Raises:
            InvariantError: engine, record and trainer do not fit together.
            FaultRateError: too many groups were lost to infrastructure faults.
        """
        watch = _Stopwatch()
        before = sandbox_counters()
        with watch.phase("generate"):
            collected = await self._collect(number, on_episode)
        sandbox = sandbox_metrics(before, sandbox_counters())
        with watch.phase("score"):
            scored = self._score(collected)
        with watch.phase("credit"):
            scored = self._credit(scored, scored.old_logp)
        with watch.phase("update"):
            learned = self._update(scored, number)
        self.sampled_tokens += len(scored.old_logp)
        with watch.phase("sync"):
            self._parts.engine.load_weights(self._parts.model.named_parameters(), number)
        metrics = {**_summary(number, collected, scored), **sandbox, **learned, **watch.seconds}
        advantages = [part.tolist() for part in scored.advantages.split(scored.batch.starts.diff().tolist())]
        return StepResult(trajectories=flatten(collected.groups), advantages=advantages, metrics=metrics)

    async def _collect(self, number: int, on_episode: Callable[[Trajectory], None]) -> Collected:
        """Play ``rollout.group_size`` episodes of each of ``rollout.tasks`` tasks."""
        rollout = self.config.rollout
        seed = self.config.run.seed
        tasks = pick_tasks(self._collector.env, rollout.tasks, first=(number - 1) * rollout.tasks, seed=seed)
        specs = [
            [
                EpisodeSpec(task_id=task.id, seed=derive_seed(seed, "episode", number, place, member))
                for member in range(rollout.group_size)
            ]
            for place, task in enumerate(tasks)
        ]
        sampling = Sampling(temperature=rollout.temperature, max_tokens=rollout.turn_tokens)
        return await self._collector.collect(specs, always(self._parts.engine), sampling, on_episode=on_episode)

    def _score(self, collected: Collected) -> Scored:
        """Log-prob, entropy and energy of every sampled token under the weights that sampled it."""
        batch = whole(collected.groups)
        if not len(batch.sampled):
            raise ConfigError(
                f"no prompt leaves room for a turn within rollout.episode_tokens={self.config.rollout.episode_tokens}"
            )
        check_trained_tokens(collected.groups, batch.tokens, batch.sampled)
        logp, entropy, sum_sq = self._scan(batch)
        check_agreement(logp, batch.sampler_logp, self._dtype)
        if not self._checked:
            check_tools_are_called(collected.groups, self._collector.env)
        energy = token_energy(logp, sum_sq)
        return Scored(batch=batch, old_logp=logp, entropy=entropy, energy=energy, advantages=torch.zeros_like(logp))

    def _credit(self, scored: Scored, logp: Tensor) -> Scored:
        """Advantages over all rows of the step, whole groups together, for a policy that gives the tokens ``logp``."""
        algo, batch = self.config.algo, scored.batch
        options: dict[str, object] = {**algo.advantage_options}
        if algo.energy_ratio:
            options["weights"] = behaviour_weights(
                logp, batch.sampler_logp, batch.starts, kind="prefix", cap=algo.correction_cap
            )
        advantages = algos.advantage(algo.advantage, batch.rewards, scored.energy, batch.starts, batch.group, **options)
        return replace(scored, advantages=advantages)

    def _credit_again(self, scored: Scored) -> Scored:
        """The same rows with the energy and the credit that they have under the policy as it is now."""
        logp, _, sum_sq = self._scan(scored.batch)
        return self._credit(replace(scored, energy=token_energy(logp, sum_sq)), logp)

    def _update(self, scored: Scored, number: int) -> dict[str, float]:
        """``optim.epochs`` passes of ``optim.minibatches`` updates each: mean loss and norm, and the drift."""
        optim, algo = self.config.optim, self.config.algo
        weights = behaviour_weights(
            scored.old_logp,
            scored.batch.sampler_logp,
            scored.batch.starts,
            kind=algo.correction,
            cap=algo.correction_cap,
        )
        drift, minibatches = Drift(), self._minibatches(scored.batch, number)
        updates = sum(map(len, minibatches))
        collected: list[dict[str, float]] = []
        for epoch, rows in enumerate(minibatches):
            if epoch and algo.energy_ratio:
                scored = self._credit_again(scored)
            for part in rows:
                spent = self._tokens_spent(len(scored.old_logp), len(collected) / updates)
                rate = learning_rate(optim, self.updates + 1, spent)
                collected.append(self._update_once(scored, part, weights, rate, drift))
        means = {name: sum(row[name] for row in collected) / len(collected) for name in collected[0]}
        return means | drift.metrics() | {"weight_ess": effective_sample_size(weights)}

    def _minibatches(self, batch: Batch, number: int) -> list[list[list[int]]]:
        """The rows of each update of each pass of step ``number``, shuffled anew, without rows of no token."""
        rows = torch.nonzero(batch.starts.diff() > 0)[:, 0]
        passes: list[list[list[int]]] = []
        for epoch in range(self.config.optim.epochs):
            generator = torch.Generator().manual_seed(derive_seed(self.config.run.seed, "rows", number, epoch))
            shuffled = rows[torch.randperm(len(rows), generator=generator)]
            passes.append([part.tolist() for part in shuffled.tensor_split(self.config.optim.minibatches) if len(part)])
        return passes

    def _tokens_spent(self, new: int, share: float) -> float:
        """Share of the budget of tokens that is spent once ``share`` of the updates on ``new`` tokens is done.

        What the last step samples beyond the budget counts for nothing, so that its updates still learn.
        """
        budget = self.config.optim.max_sampled_tokens
        if budget == 0:
            return 0.0
        return (self.sampled_tokens + share * min(new, budget - self.sampled_tokens)) / budget

    def _update_once(
        self, scored: Scored, rows: Sequence[int], weights: Tensor, rate: float, drift: Drift
    ) -> dict[str, float]:
        """One gradient step at learning rate ``rate`` on ``rows``, their gradients accumulated over packs."""
        algo, model = self.config.algo, self._parts.model
        packs = self._packs(scored.batch, rows)
        shares = pack_shares(algos.aggregation(algo.loss, algo.loss_options), [pack.starts for pack in packs])
        loss = 0.0
        for pack, share in zip(packs, shares, strict=True):
            logp = self._stats(pack)[0].cpu()
            logp.retain_grad()
            old_logp, advantages = scored.old_logp[pack.index], scored.advantages[pack.index]
            if not self._checked:
                check_first_ratio(logp.detach(), old_logp, self._dtype)
            out = algos.loss(
                algo.loss,
                logp,
                old_logp,
                advantages,
                pack.starts,
                weights=weights[pack.index],
                **algo.loss_options,
            )
            (share * out.loss).backward()
            drift.add(out, logp, old_logp, advantages, pack.starts)
            loss += share * float(out.loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.config.optim.max_grad_norm)
        self.updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._checked = True
        return {"loss": loss, "grad_norm": float(norm)}

    def _scan(self, batch: Batch) -> list[Tensor]:
        """Log-prob, entropy and Σπ² of every sampled token under the model as it is now, 3 × [S]."""
        with torch.no_grad():
            stats = [self._stats(pack) for pack in self._packs(batch, range(len(batch)))]
        return [torch.cat(part).cpu() for part in zip(*stats, strict=True)]

    def _packs(self, batch: Batch, rows: Sequence[int]) -> list[Batch]:
        return batch.split(self.config.optim.max_tokens, rows)

    def _stats(self, pack: Batch) -> tuple[Tensor, Tensor, Tensor]:
        model, temperature = self._parts.model, self.config.rollout.temperature
        stats = score(model, pack.to(model.device), temperature=temperature, dtype=self._dtype)
        return stats.logp, stats.entropy, stats.sum_sq


def learning_rate(optim: OptimSettings, update: int, spent: float = 0.0) -> float:
    """The rate of an update, counting from 1, before which ``spent`` of the budget of sampled tokens is gone."""
    rate = optim.lr * min(1.0, update / max(1, optim.warmup))
    if optim.schedule == "linear":
        total = optim.steps * optim.epochs * optim.minibatches
        rate *= max(0.0, 1 - max((update - 1) / total, spent))
    return rate


def check_training_config(config: Config) -> None:
    """Refuse what training can't do, before anything is loaded or written.

    Raises:
        ConfigError: sampling would bias every ratio, or an option of the algorithm is invalid.
        UnknownNameError: there is no such advantage or loss.
    """
    refuse_biased_sampling(config.rollout)
    algos.check_options("advantage", config.algo.advantage, config.algo.advantage_options)
    algos.check_options("loss", config.algo.loss, config.algo.loss_options)
    _check_energy_ratio(config.algo)
    if config.optim.max_tokens < config.rollout.episode_tokens:
        raise ConfigError(
            f"optim.max_tokens={config.optim.max_tokens} can't hold an episode of rollout.episode_tokens="
            f"{config.rollout.episode_tokens}: raise the one or lower the other"
        )


def _check_energy_ratio(algo: AlgoSettings) -> None:
    if algo.energy_ratio and "weights" not in algos.ADVANTAGES[algo.advantage].known_options:
        raise ConfigError(
            f"algo.energy_ratio weighs the energy of each token, which advantage {algo.advantage!r} can't do: set it "
            "to false, or choose algo.advantage=otb"
        )


def _summary(number: int, collected: Collected, scored: Scored) -> dict[str, float]:
    """What the episodes of a step looked like."""
    episodes = flatten(collected.groups)
    count = len(episodes)
    runs = [run for trajectory in episodes for run in trajectory.tool_runs]
    clock = collected.clock
    by_position = {"energy": scored.energy, "advantage_abs": scored.advantages.abs()}
    return {
        "step": number,
        "episodes": count,
        "reward_mean": sum(trajectory.ret for trajectory in episodes) / count,
        "turns_mean": sum(len(trajectory.sampled) for trajectory in episodes) / count,
        "sampled_tokens": len(scored.old_logp),
        "tokens": len(scored.batch.tokens),
        "tool_calls": len(runs),
        "tool_errors": sum(not run.ok for run in runs),
        "truncated": sum(trajectory.stop.truncated for trajectory in episodes),
        "cut_turns": sum(trajectory.cut_turns for trajectory in episodes),
        "faults": collected.faults,
        "groups_lost": collected.lost,
        "entropy": float(scored.entropy.mean()),
        "energy": float(scored.energy.mean()),
        "advantage_abs": float(scored.advantages.abs().mean()),
        "logp_diff_max": float((scored.old_logp - scored.batch.sampler_logp).abs().max()),
        "seconds_tools_summed": clock.tools,
        "seconds_engine_summed": clock.engine,
        **position_metrics(by_position, scored.batch.starts),
    }
