"""Evaluation: play episodes on held-out tasks, and summarise them with confidence intervals.

An episode *succeeds* if its return reaches the maximum that the environment's reward weights allow.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentrl.config import EvalSettings
from agentrl.engines.base import Engine, Sampling
from agentrl.engines.rng import derive_seed
from agentrl.errors import FaultRateError, UsageError
from agentrl.eval.intervals import interval
from agentrl.rollout.collector import Collector
from agentrl.rollout.metrics import episode_means
from agentrl.rollout.plan import EpisodeSpec, TaskSource
from agentrl.types import Group, Trajectory, flatten, won


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Statistics of an agent's episodes on held-out tasks."""

    tasks: int
    """Number of tasks."""
    attempts: int
    """Episodes per task."""
    success: float
    """Share of episodes that succeeded, averaged over tasks."""
    low: float
    """Lower end of the 95% confidence interval of ``success``."""
    high: float
    """Upper end of that interval."""
    pass_at: dict[int, float]
    """Unbiased estimate of pass@k, the chance that at least one of k attempts succeeds, by k."""
    reward_mean: float
    """Mean return."""
    turns_mean: float
    """Mean number of the assistant's turns."""
    tool_calls_mean: float
    """Mean number of tool calls per episode."""
    tool_errors_mean: float
    """Mean number of failed tool calls per episode."""
    truncated: int
    """Episodes cut off by a limit of turns or tokens."""
    cut_turns: int
    """Turns cut off by a limit of tokens."""
    lost: int
    """Tasks skipped because of infrastructure faults."""
    tokens_mean: float = 0.0
    """Mean number of tokens that the agent wrote."""
    pass_interval: dict[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    """The 95% confidence interval of each of ``pass_at``."""
    majority: float | None = None
    """maj@n, the share of tasks whose most frequent answer is right; None where answers can't be compared."""
    majority_interval: tuple[float, float] | None = None
    """The 95% confidence interval of ``majority``."""

    def __str__(self) -> str:
        passes = "".join(f", pass@{k} {value:.1%}" for k, value in self.pass_at.items() if k > 1)
        passes += "" if self.majority is None or self.attempts < 2 else f", maj@{self.attempts} {self.majority:.1%}"
        return (
            f"success {self.success:.1%} (95% CI {self.low:.1%} to {self.high:.1%}) on {self.tasks} tasks{passes}, "
            f"{self.turns_mean:.2f} turns, {self.tool_calls_mean:.2f} tool calls, {self.tool_errors_mean:.2f} tool "
            f"errors, {self.truncated} truncated, {self.cut_turns} cut turns"
        )

    def row(self) -> dict[str, Any]:
        """Return plain data, for one line of JSON."""
        # As JSON reads it back: keys are texts, and there are no tuples.
        return json.loads(json.dumps(asdict(self)))


def plan_episodes(source: TaskSource, settings: EvalSettings, seed: int) -> list[list[EpisodeSpec]]:
    """Plan ``settings.attempts`` episodes of each of the first ``settings.tasks`` tasks, or of all if there are fewer.

    Args:
        source: the tasks of the split.
        settings: numbers of tasks and attempts.
        seed: of sampling; the same seed plays the same episodes.
    """
    size = source.tasks.size
    tasks = source.pick(settings.tasks if size is None else min(size, settings.tasks))
    # Seeds by task and attempt, so that raising either number later leaves the other episodes as they were.
    return [
        [
            EpisodeSpec(
                task_id=task.id, seed=derive_seed(seed, "eval", task.id, attempt), env=source.name, attempt=attempt
            )
            for attempt in range(settings.attempts)
        ]
        for task in tasks
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTasks:
    """The episodes of a plan that were played."""

    groups: list[Group]
    """The tasks with all of their attempts."""
    lost: int
    """Tasks skipped because of infrastructure faults, or because a server refuses them."""
    refused: Sequence[str] = ()
    """Episodes that a server refuses to continue, a sentence each."""
    silent: int = 0
    """Episodes whose prompt left no room for a turn."""


async def play_tasks(
    collector: Collector,
    engine: Engine,
    specs: Sequence[Sequence[EpisodeSpec]],
    sampling: Sampling,
    *,
    done: Iterable[Trajectory] = (),
    on_episode: Callable[[Trajectory], None] = lambda _: None,
) -> PlayedTasks:
    """Play the planned episodes.

    Args:
        collector: plays the split.
        engine: samples.
        specs: result of ``plan_episodes``.
        sampling: temperature; ``max_tokens`` limits a turn.
        done: episodes that were played before.
        on_episode: called with each newly played episode.

    Raises:
        FaultRateError: too many tasks were lost to infrastructure faults, or none was played to its end.
        UsageError: no episode had room for a turn, so nothing was sampled.
    """
    played = {(episode.task_id, episode.seed): episode for episode in done}

    def ended(episode: Trajectory) -> None:
        played[episode.task_id, episode.seed] = episode
        on_episode(episode)

    # Task and seed name an episode. Other episodes in ``done`` are not looked up, and so are not counted.
    missing = [[spec for spec in group if (spec.task_id, spec.seed) not in played] for group in specs]
    new = await collector.collect([group for group in missing if group], engine, sampling, on_episode=ended)
    # A task counts only with all of its attempts: pass@k and the interval need the same number of each.
    attempts = [[played.get((spec.task_id, spec.seed)) for spec in group] for group in specs]
    groups = [Group(tuple(episode for episode in group if episode)) for group in attempts if all(group)]
    refused = [f"task {spec.task_id!r}, attempt {spec.attempt}: {error}" for spec, error in new.refused.items()]
    if not groups:
        raise FaultRateError(f"no task was played to its end; {refused[0] if refused else new.last_fault}")
    prompts = [len(episode.token_ids) for episode in flatten(groups) if not episode.sampled]
    if len(prompts) == len(flatten(groups)):
        raise UsageError(
            f"no episode had room for a turn: their prompts have {min(prompts)} tokens or more, and "
            "rollout.episode_tokens allows no more in all; raise it with --set rollout.episode_tokens=…"
        )
    return PlayedTasks(groups=groups, lost=len(specs) - len(groups), refused=refused, silent=len(prompts))


def summarise(groups: Sequence[Group], *, best_return: float, lost: int = 0) -> Evaluation:
    """Summarise ``groups``, at least one, one per task and all with the same number of attempts."""
    episodes = flatten(groups)
    count, attempts = len(episodes), len(groups[0])
    wins = [sum(won(trajectory, best_return) for trajectory in group) for group in groups]
    success = sum(wins) / count
    low, high = interval([won / attempts for won in wins], attempts)
    means = episode_means(episodes)
    # Powers of two show how pass@k grows, and the number of attempts is the largest k that can be estimated.
    ks = [2**power for power in range(attempts.bit_length()) if 2**power <= attempts]
    passes = {k: [pass_at_k(attempts, won, k) for won in wins] for k in sorted({*ks, attempts})}
    votes = [vote for group in groups if (vote := majority(group, best_return)) is not None]
    tied = any(0 < vote < 1 for vote in votes)
    return Evaluation(
        tasks=len(groups),
        attempts=attempts,
        success=success,
        low=low,
        high=high,
        pass_at={k: sum(rates) / len(groups) for k, rates in passes.items()},
        # The attempts left over by a subset of k say more of pass@k than one trial, but of pass@n there is only one.
        pass_interval={k: interval(rates, attempts // k) for k, rates in passes.items()},
        majority=sum(votes) / len(groups) if votes else None,
        # A tie of two says as much as two trials that end in two ways.
        majority_interval=interval([*votes, *[0.0] * (len(groups) - len(votes))], 1 + tied) if votes else None,
        reward_mean=means["reward_mean"],
        tokens_mean=sum(trajectory.written for trajectory in episodes) / count,
        turns_mean=means["turns_mean"],
        tool_calls_mean=means["tool_calls_mean"],
        tool_errors_mean=means["tool_errors_mean"],
        truncated=sum(trajectory.stop.truncated for trajectory in episodes),
        cut_turns=sum(trajectory.cut_turns for trajectory in episodes),
        lost=lost,
    )


def pass_at_k(attempts: int, wins: int, k: int) -> float:
    """Estimate without bias the chance that at least one of ``k`` attempts succeeds: 1 - C(n-c, k)/C(n, k).

    Here n is ``attempts`` and c is ``wins``.

    Chen et al., Evaluating Large Language Models Trained on Code (arXiv 2107.03374), equation 1.
    """
    return 1.0 - math.comb(attempts - wins, k) / math.comb(attempts, k)


def majority(group: Group, best_return: float) -> float | None:
    """Return the chance that the most frequent answer to a task is right; a tie is broken at random.

    None where no attempt has an answer that can be compared. An attempt without an answer has no vote.
    """
    episodes = [episode for episode in group if episode.answer is not None]
    if not episodes:
        return None
    counts = Counter(episode.answer for episode in episodes if episode.answer)
    most = [answer for answer, count in counts.items() if count == max(counts.values())]
    # Equal answers are graded alike, except by graders that look at more than the answer.
    graded = [[won(episode, best_return) for episode in episodes if episode.answer == answer] for answer in most]
    return sum(sum(wins) / len(wins) for wins in graded) / len(graded) if graded else 0.0


def by_tag(groups: Sequence[Group], *, best_return: float) -> dict[str, Evaluation]:
    """Summarise the tasks of each tag, by tag."""
    tagged: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        for tag in group.trajectories[0].tags:
            tagged[tag].append(group)
    return {tag: summarise(some, best_return=best_return) for tag, some in sorted(tagged.items())}
