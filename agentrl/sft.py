"""Warm start: supervised training on oracle episodes, through the same Trajectory and Batch as everything else.

An oracle episode is played in the real environment, its turns taken from ``gold``. Only the tokens of those turns are
learned; the tool's answers are context, as they will be later.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from agentrl.assemble import Parts, gold_turns, pick_tasks
from agentrl.batch import Batch, whole
from agentrl.config import Config
from agentrl.engines.base import Engine, Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.env import ToolEnv
from agentrl.errors import InvariantError
from agentrl.policy import score
from agentrl.rng import derive_seed
from agentrl.rollout import Collector, EpisodeSpec
from agentrl.types import Group, Trajectory

_FIRST_TASK = 10**9
"""Where an endless set's oracle tasks begin: reinforcement learning begins at 0 and so meets new ones."""
_WARMUP_STEPS = 30
_SMOOTHING = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class SftStep:
    """What one update of the warm start looked like."""

    step: int
    """Counting from 1."""
    loss: float
    """Mean negative log-prob of an oracle token, in nats."""
    likelihood: float
    """Probability that the policy plays an average oracle episode to the letter, smoothed over steps."""


async def oracle_episodes(
    config: Config, parts: Parts, collector: Collector, on_episode: Callable[[Trajectory], None] = lambda _: None
) -> tuple[Group, ...]:
    """Play ``sft.tasks`` tasks with the environment's gold player.

    Raises:
        ConfigError: the environment has no gold player.
        InvariantError: gold does not score the maximum: it would teach what is wrong.
    """

    def script(env: ToolEnv, task_id: str) -> Engine:
        turns = gold_turns(env, env.task_set.find(task_id), "the warm start learns", "set sft.steps=0")
        say = functools.partial(parts.renderer.turn, marks=env.dialect.marks)
        calls = [say(turn, answered_by="tool") for turn in turns[:-1]]
        return ScriptedEngine([*calls, *(say(turn) for turn in turns[-1:])])

    env = collector.env
    size = env.task_set.size
    count = config.sft.tasks if size is None else min(size, config.sft.tasks)
    # Of a finite set, a pass before training's first, in an order of its own: its beginning is not all taught already.
    tasks = pick_tasks(env, count, first=_FIRST_TASK if size is None else -size, seed=config.run.seed)
    specs = [[EpisodeSpec(task_id=task.id, seed=place)] for place, task in enumerate(tasks)]
    sampling = Sampling(max_tokens=config.rollout.turn_tokens)
    collected = await collector.collect(specs, script, sampling, on_episode=on_episode)
    worst = min(collected.groups, key=lambda group: group.trajectories[0].ret)
    if worst.trajectories[0].ret < env.best_return:
        raise InvariantError(
            f"the gold player scores {worst.trajectories[0].ret:g} of {env.best_return:g} on task {worst.task_id!r}: "
            "what it teaches would be wrong (it is, or rollout.turn_tokens or rollout.episode_tokens cut it off)"
        )
    return collected.groups


def warm_start(
    config: Config, parts: Parts, groups: Sequence[Group], on_step: Callable[[SftStep], None] = lambda _: None
) -> int:
    """Train on oracle episodes until ``sft.steps``, or until an episode's likelihood reaches ``sft.stop_at``.

    The learning rate falls to 0 at the last update: a policy that stops half-way with weights still shaking is sure of
    some mistakes, and what all episodes of a group do alike reinforcement learning can't undo.

    Returns:
        The number of updates.
    """
    sft = config.sft
    batch = whole(groups)
    optimizer = torch.optim.AdamW(parts.model.parameters(), lr=sft.lr, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(derive_seed(config.run.seed, "sft"))
    order: list[int] = []
    smooth: float | None = None
    for step in range(1, sft.steps + 1):
        if len(order) < sft.episodes:
            order += torch.randperm(len(batch), generator=generator).tolist()
        rows, order = order[: sft.episodes], order[sft.episodes :]
        for group in optimizer.param_groups:
            group["lr"] = sft.lr * min(1.0, step / _WARMUP_STEPS) * (1 - (step - 1) / sft.steps)
        nll = _update(config, parts, optimizer, batch.split(config.optim.max_tokens, rows))
        per_episode = nll * float(batch.starts[-1]) / len(batch)
        smooth = per_episode if smooth is None else _SMOOTHING * smooth + (1 - _SMOOTHING) * per_episode
        on_step(SftStep(step=step, loss=nll, likelihood=math.exp(-smooth)))
        if math.exp(-smooth) >= sft.stop_at:
            return step
    return sft.steps


def _update(config: Config, parts: Parts, optimizer: torch.optim.Optimizer, packs: Sequence[Batch]) -> float:
    """One update; the mean negative log-prob of the packs' oracle tokens."""
    total = sum(len(pack.sampled) for pack in packs)
    nll = 0.0
    for pack in packs:
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        stats = score(parts.model, pack.to(parts.model.device), temperature=1.0, dtype=dtype)
        loss = -stats.logp.sum() / total
        loss.backward()
        nll += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(parts.model.parameters(), config.sft.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return nll
