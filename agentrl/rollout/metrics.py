"""Metrics of episodes, and of the sandbox behind the ``python`` tool during a step."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, get_args

from agentrl.sandboxes import Counters
from agentrl.sandboxes.base import LATENCY_BOUNDS_S, Status
from agentrl.types import Trajectory

_UNUSED: Final = Counters()


def episode_means(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the means over ``episodes``, at least one, that training and evaluation both report."""
    runs = [run for episode in episodes for run in episode.tool_runs]
    sums = {
        "reward_mean": sum(episode.learned_return for episode in episodes),
        "penalty_mean": sum(episode.penalty for episode in episodes),
        "rows_mean": sum(len(episode.rows) for episode in episodes),
        "turns_mean": sum(len(episode.sampled) for episode in episodes),
        "tool_calls_mean": len(runs),
        "tool_errors_mean": sum(not run.ok for run in runs),
        "truncated_mean": sum(episode.stop.truncated for episode in episodes),
        "sampled_tokens_mean": sum(episode.n_sampled for episode in episodes),
    }
    return {name: total / len(episodes) for name, total in sums.items()}


def sandbox_metrics(before: Counters | None, after: Counters | None) -> dict[str, float]:
    """Compute by how much the sandbox's counters grew.

    Args:
        before: the counters at the start of the step; ``None`` where the process had no sandbox yet.
        after: the same at its end; ``None`` where no tool has used one.

    Returns:
        ``sandbox_<status>`` for each of the eight statuses, ``sandbox_faults`` and ``sandbox_reruns``;
        ``seconds_sandbox_queue``, summed over the runs; ``seconds_sandbox_p50`` and ``seconds_sandbox_p99``: upper
        bounds of the percentiles of a run's time, queueing included, to a third of a power of ten.
    """
    # A resumed run's new process may not have used a sandbox yet: its rows must have the same keys all the same.
    start, end = before or _UNUSED, after or _UNUSED
    latency = [now - then for now, then in zip(end.latency, start.latency, strict=True)]
    return {
        **{f"sandbox_{status}": end.runs.get(status, 0) - start.runs.get(status, 0) for status in get_args(Status)},
        "sandbox_faults": end.faults - start.faults,
        "sandbox_reruns": end.reruns - start.reruns,
        "seconds_sandbox_queue": end.queue_s - start.queue_s,
        "seconds_sandbox_p50": _bound(latency, 0.5),
        "seconds_sandbox_p99": _bound(latency, 0.99),
    }


def _bound(latency: list[int], share: float) -> float:
    """Find the least bound that this share of the runs kept; 0 without runs, and the last one for longer runs."""
    wanted = share * sum(latency)
    bounds = (0.0, *LATENCY_BOUNDS_S, LATENCY_BOUNDS_S[-1])
    return next(bound for bound, seen in zip(bounds, accumulate([0, *latency]), strict=True) if seen >= wanted)
