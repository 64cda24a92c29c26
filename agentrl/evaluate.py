"""Evaluation: episodes on held-out tasks, and a table with confidence intervals.

An episode *succeeds* when its return reaches the most that the environment's reward weights allow.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentrl.assemble import pick_tasks
from agentrl.config import EvalSettings
from agentrl.engines.base import Engine, Sampling
from agentrl.env import ToolEnv
from agentrl.rng import derive_seed
from agentrl.rollout import Collector, EpisodeSpec, always
from agentrl.types import Group, Trajectory, flatten

_Z = 1.959964
"""Two-sided 95% quantile of the normal distribution."""
_SLACK = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What an agent did on held-out tasks."""

    tasks: int
    """How many tasks."""
    attempts: int
    """Episodes per task."""
    success: float
    """Share of episodes that succeeded, averaged over tasks."""
    low: float
    """Lower end of its 95% confidence interval."""
    high: float
    """Upper end of it."""
    pass_at: dict[int, float]
    """k to the chance that at least one of k attempts succeeds, estimated without bias from all attempts."""
    reward_mean: float
    """Mean return."""
    turns_mean: float
    """Mean number of the assistant's turns."""
    tool_calls_mean: float
    """Mean number of tool calls per episode."""
    tool_errors_mean: float
    """Mean number of tool calls per episode that did not answer."""
    truncated: int
    """Episodes cut off by a limit of turns or tokens."""
    cut_turns: int
    """Turns cut off by a limit of tokens."""
    lost: int
    """Tasks left out because of infrastructure faults."""

    def row(self) -> dict[str, Any]:
        """Plain data, for one line of JSON."""
        return asdict(self) | {"pass_at": {str(k): value for k, value in self.pass_at.items()}}


def plan(env: ToolEnv, settings: EvalSettings, seed: int) -> list[list[EpisodeSpec]]:
    """The episodes of the first ``settings.tasks`` tasks, as far as there are so many, ``settings.attempts`` of each.

    Args:
        env: an environment of the split.
        settings: tasks and attempts.
        seed: of sampling; the same seed plays the same episodes.
    """
    size = env.task_set.size
    tasks = pick_tasks(env, settings.tasks if size is None else min(size, settings.tasks))
    return [
        [
            EpisodeSpec(task_id=task.id, seed=derive_seed(seed, "eval", task.id, attempt))
            for attempt in range(settings.attempts)
        ]
        for task in tasks
    ]


async def evaluate(
    collector: Collector,
    engine: Engine,
    specs: Sequence[Sequence[EpisodeSpec]],
    sampling: Sampling,
    *,
    done: Iterable[Trajectory] = (),
    on_episode: Callable[[Trajectory], None] = lambda _: None,
) -> Evaluation:
    """Play what is planned.

    Args:
        collector: plays the split.
        engine: samples.
        specs: what ``plan`` gave.
        sampling: temperature; ``max_tokens`` limits a turn.
        done: episodes that need not be played again.
        on_episode: called with each episode that has been played.

    Raises:
        FaultRateError: too many tasks were lost to infrastructure faults.
    """
    played = {(episode.task_id, episode.seed): episode for episode in done}

    def ended(episode: Trajectory) -> None:
        played[episode.task_id, episode.seed] = episode
        on_episode(episode)

    missing = [[spec for spec in group if (spec.task_id, spec.seed) not in played] for group in specs]
    await collector.collect([group for group in missing if group], always(engine), sampling, on_episode=ended)
    found = [[played.get((spec.task_id, spec.seed)) for spec in group] for group in specs]
    groups = [Group(tuple(episode for episode in group if episode)) for group in found if all(group)]
    return summarise(groups, best_return=collector.env.best_return, lost=len(specs) - len(groups))


def summarise(groups: Sequence[Group], *, best_return: float, lost: int = 0) -> Evaluation:
    """The table of ``groups``, one per task, all with the same number of attempts."""
    episodes = flatten(groups)
    count, attempts = len(episodes), len(groups[0])
    wins = [sum(trajectory.ret >= best_return - _SLACK for trajectory in group) for group in groups]
    success = sum(wins) / count
    low, high = interval([won / attempts for won in wins])
    runs = [run for trajectory in episodes for run in trajectory.tool_runs]
    ks = [2**power for power in range(attempts.bit_length()) if 2**power <= attempts]
    return Evaluation(
        tasks=len(groups),
        attempts=attempts,
        success=success,
        low=low,
        high=high,
        pass_at={k: sum(pass_at_k(attempts, won, k) for won in wins) / len(groups) for k in sorted({*ks, attempts})},
        reward_mean=sum(trajectory.ret for trajectory in episodes) / count,
        turns_mean=sum(len(trajectory.sampled) for trajectory in episodes) / count,
        tool_calls_mean=len(runs) / count,
        tool_errors_mean=sum(not run.ok for run in runs) / count,
        truncated=sum(trajectory.stop.truncated for trajectory in episodes),
        cut_turns=sum(trajectory.cut_turns for trajectory in episodes),
        lost=lost,
    )


def pass_at_k(attempts: int, wins: int, k: int) -> float:
    """Chance that at least one of ``k`` attempts succeeds, without bias: 1 - C(n-c, k)/C(n, k).

    Chen et al., Evaluating Large Language Models Trained on Code (arXiv 2107.03374), equation 1.
    """
    return 1.0 - math.comb(attempts - wins, k) / math.comb(attempts, k)


def interval(rates: Sequence[float]) -> tuple[float, float]:
    """95% confidence interval of the mean of ``rates``, one per task: the share of successes in its attempts.

    Where every task was won or lost altogether this is Wilson's interval (1927). Otherwise it is the normal one over
    tasks, so that several attempts at one task do not count as independent.
    """
    n = len(rates)
    mean = sum(rates) / n
    if set(rates) <= {0.0, 1.0}:
        return wilson(mean, n)
    half = _Z * math.sqrt(sum((rate - mean) ** 2 for rate in rates) / max(n - 1, 1) / n)
    return max(0.0, mean - half), min(1.0, mean + half)


def wilson(share: float, n: int) -> tuple[float, float]:
    """95% confidence interval of a chance of which ``share`` was seen in ``n`` independent trials (Wilson, 1927)."""
    centre = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)
