"""Warm start: supervised training on oracle episodes, with the same Trajectory and Batch as reinforcement learning.

An oracle episode is played in the real environment with the turns of ``gold``. Only the tokens of those turns are
trained on; tool answers are context, as in reinforcement learning.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from agentrl.algos.head import TokenStats
from agentrl.batch import Batch, as_batch
from agentrl.config import Config
from agentrl.engines.base import Sampling
from agentrl.engines.rng import derive_seed
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import InvariantError
from agentrl.render.renderer import Renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.mix import TaskMix
from agentrl.rollout.plan import EpisodeSpec, TaskSource
from agentrl.toolenv.tools.context import SubTurn
from agentrl.train.learner import Learner
from agentrl.types import Group, Task, Trajectory, flatten, won

_FIRST_TASK = 10**9
"""Offset of the oracle tasks in an endless set: reinforcement learning begins at 0, and so meets new ones."""
_WARMUP_STEPS = 30
_COOLING_STEPS = 20
_SMOOTHING = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class SftStep:
    """Metrics of one update of the warm start."""

    step: int
    """Counting from 1."""
    loss: float
    """Mean negative log-prob of an oracle token at ``sft.temperature``, in nats."""
    likelihood: float
    """Probability that the policy before the update, at ``sft.temperature``, samples an oracle episode token by token:
    the mean over the update's episodes, smoothed over updates."""


async def oracle_episodes(
    config: Config,
    renderer: Renderer,
    collector: Collector,
    mix: TaskMix,
    on_episode: Callable[[Trajectory], None] = lambda _: None,
) -> list[Group]:
    """Play ``sft.tasks`` tasks, shared out to the environments by weight, with the gold player of each.

    Raises:
        ConfigError: an environment has no gold player.
        InvariantError: gold does not score the maximum: it would teach what is wrong.
    """
    sampling, groups = Sampling(max_tokens=config.rollout.turn_tokens), list[Group]()
    for name, count in mix.shares(config.sft.tasks).items():
        if not count:
            continue
        source = mix.sources[name]
        specs = _gold_specs(config, renderer, source, count)
        collected = await collector.collect(specs, ScriptedEngine(()), sampling, on_episode=on_episode)
        # Gold that fails means a bug in the environment or too tight a limit, which imitation would silently teach.
        worst = min(flatten(collected.groups), key=lambda episode: episode.ret)
        if not won(worst, source.best_return):
            turns = specs[worst.seed][0].script or ()
            longest = max(map(len, turns), default=0)
            raise InvariantError(
                f"the gold player scores {worst.ret:g} of {source.best_return:g} on task {worst.task_id!r}: its "
                f"{len(turns)} turns have at most {longest} tokens, {worst.cut_turns} were cut off, and the episode "
                f"ended by {worst.stop.value}; raise the limit that it met (rollout.turn_tokens, "
                "rollout.episode_tokens, env.args.max_turns), or correct gold or reward: agentrl check-env shows it"
            )
        groups += collected.groups
    return groups


def _gold_specs(config: Config, renderer: Renderer, source: TaskSource, count: int) -> list[list[EpisodeSpec]]:
    """Return one episode of each of ``count`` tasks of an environment, or of all that it has, with the gold turns."""
    renderer = renderer.describing(source.dialect.template_tools, source.dialect.marks)

    def script(task: Task) -> tuple[tuple[int, ...], ...]:
        turns = source.gold(task, "the warm start learns", "set sft.steps=0")
        say = functools.partial(renderer.turn, marks=source.dialect.marks)
        # Some templates end a turn by who answers it: a tool, except after the last turn, also of a sub-agent.
        ends = [isinstance(turn, SubTurn) and not isinstance(after, SubTurn) for turn, after in pairwise(turns)]
        ends[len(turns) - 1 :] = [True]
        written = [say(turn, answered_by="user" if end else "tool") for turn, end in zip(turns, ends, strict=True)]
        return tuple(map(tuple, written))

    size = source.tasks.size
    count = count if size is None else min(size, count)
    # A finite set has no tasks to spare. Its oracle tasks come from a pass with another shuffle than training's first:
    # so training does not begin with exactly the tasks just taught.
    tasks = source.pick(count, start=_FIRST_TASK if size is None else -size, seed=config.run.seed)
    return [
        [EpisodeSpec(task_id=task.id, seed=index, env=source.name, script=script(task))]
        for index, task in enumerate(tasks)
    ]


def warm_start(
    config: Config,
    learner: Learner,
    groups: Sequence[Group],
    on_step: Callable[[SftStep], None] = lambda _: None,
) -> int:
    """Train on oracle episodes for ``sft.steps`` updates, or until their likelihood has reached ``sft.stop_at``.

    The learning rate is warmed up, held, and cooled down to 0 over the last updates. It is held because a skill such
    as copying is learned late and suddenly. It is cooled down because a policy that stops while its weights oscillate
    is certain of some mistakes. Reinforcement learning can't undo a mistake that all episodes of a group make.
    For the same reason ``sft.temperature`` may be below the sampling temperature: the policy then stays uncertain
    enough to sample every answer form sometimes.

    Returns:
        The number of updates.

    Raises:
        InvariantError: a gradient is not finite.
    """
    sft = config.sft
    batch = as_batch(groups)
    # The warm start has its own optimizer: reinforcement learning begins without moments of other gradients.
    optim = config.optim.model_copy(update={"betas": (0.9, 0.98), "weight_decay": 0.01})
    learner.renew(optim, sft.temperature)
    generator = torch.Generator().manual_seed(derive_seed(config.run.seed, "sft"))
    order: list[int] = []
    smooth: float | None = None
    step, last = 0, sft.steps
    while step < last:
        step += 1
        # Shuffled passes are laid end to end, so that every episode is seen equally often whatever ``sft.episodes`` is.
        if len(order) < sft.episodes:
            order += torch.randperm(len(batch.episode_group), generator=generator).tolist()
        episodes, order = order[: sft.episodes], order[sft.episodes :]
        rate = sft.lr * min(1.0, step / _WARMUP_STEPS, (last - step + 1) / (_COOLING_STEPS + 1))
        nll, likelihood = _update(learner, learner.packs(batch, episodes), rate)
        smooth = likelihood if smooth is None else _SMOOTHING * smooth + (1 - _SMOOTHING) * likelihood
        on_step(SftStep(step=step, loss=nll, likelihood=smooth))
        # Reaching the target brings the end forward; the updates that cool the rate down still follow.
        if smooth >= sft.stop_at:
            last = min(last, step + _COOLING_STEPS)
    learner.renew(config.optim, config.rollout.temperature)
    return step


def _update(learner: Learner, packs: Sequence[Batch], rate: float) -> tuple[float, float]:
    """Do one update; return the mean negative log-prob of an oracle token and the mean probability of an episode."""
    total, count = sum(len(pack.sampled) for pack in packs), sum(len(pack.episode_group) for pack in packs)
    losses: list[float] = []
    likelihoods: list[float] = []

    def loss_of(number: int, stats: TokenStats) -> Tensor:
        # Divided by the tokens of all packs, so that packing does not change the gradient.
        loss = -stats.logp.sum() / total
        losses.append(float(loss.detach()))
        per_episode = packs[number].in_time(stats.logp.detach()).split(packs[number].episode_starts.diff().tolist())
        likelihoods.append(sum(math.exp(float(part.sum())) for part in per_episode) / count)
        return loss

    if not math.isfinite(learner.update(packs, loss_of, rate)):
        raise InvariantError("the gradient of the warm start is not finite: lower sft.lr, or raise sft.temperature")
    return sum(losses), sum(likelihoods)
