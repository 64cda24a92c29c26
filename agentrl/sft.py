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
_COOLING_STEPS = 20
_SMOOTHING = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class SftStep:
    """What one update of the warm start looked like."""

    step: int
    """Counting from 1."""
    loss: float
    """Mean negative log-prob of an oracle token at ``sft.temperature``, in nats."""
    likelihood: float
    """Probability that the policy, as it was before the update and at ``sft.temperature``, plays an oracle episode to
    the letter: the mean over the update's episodes, smoothed over updates."""


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
    """Train on oracle episodes until ``sft.steps``, or until soon after their likelihood has reached ``sft.stop_at``.

    The learning rate is held until then, since what must be learned at once, such as to copy, is learned late and all
    of a sudden, and falls to 0 over the last updates: a policy that stops half-way with weights still shaking is sure
    of some mistakes, and what all episodes of a group do alike reinforcement learning can't undo. For the same reason
    ``sft.temperature`` may be lower than that of sampling: what is rare is then learned too, and yet nothing is sure.

    Returns:
        The number of updates.
    """
    sft = config.sft
    batch = whole(groups)
    optimizer = torch.optim.AdamW(parts.model.parameters(), lr=sft.lr, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(derive_seed(config.run.seed, "sft"))
    order: list[int] = []
    smooth: float | None = None
    step, last = 0, sft.steps
    while step < last:
        step += 1
        if len(order) < sft.episodes:
            order += torch.randperm(len(batch), generator=generator).tolist()
        rows, order = order[: sft.episodes], order[sft.episodes :]
        for group in optimizer.param_groups:
            group["lr"] = sft.lr * min(1.0, step / _WARMUP_STEPS, (last - step + 1) / (_COOLING_STEPS + 1))
        nll, likelihood = _update(config, parts, optimizer, batch.split(config.optim.max_tokens, rows))
        smooth = likelihood if smooth is None else _SMOOTHING * smooth + (1 - _SMOOTHING) * likelihood
        on_step(SftStep(step=step, loss=nll, likelihood=smooth))
        if smooth >= sft.stop_at:
            last = min(last, step + _COOLING_STEPS)
    return step


def _update(
    config: Config, parts: Parts, optimizer: torch.optim.Optimizer, packs: Sequence[Batch]
) -> tuple[float, float]:
    """One update; the mean negative log-prob of the packs' oracle tokens, and the mean probability of an episode."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    total, rows = sum(len(pack.sampled) for pack in packs), sum(map(len, packs))
    nll = likelihood = 0.0
    for pack in packs:
        logp = score(parts.model, pack.to(parts.model.device), temperature=config.sft.temperature, dtype=dtype).logp
        loss = -logp.sum() / total
        loss.backward()
        nll += float(loss.detach())
        per_episode = logp.detach().cpu().split(pack.starts.diff().tolist())
        likelihood += sum(math.exp(float(part.sum())) for part in per_episode) / rows
    torch.nn.utils.clip_grad_norm_(parts.model.parameters(), config.sft.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return nll, likelihood
