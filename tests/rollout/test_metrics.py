"""What the sandbox's counters become in a step's metrics."""

import numpy as np
import pytest

from agentrl.rollout.metrics import sandbox_metrics
from agentrl.sandboxes import Result, SandboxError
from agentrl.sandboxes.base import LATENCY_BOUNDS_S
from agentrl.sandboxes.host.counters import Meter


def counted(*waits: float, queue_s: float = 0.0) -> Meter:
    """A meter that saw runs of so many seconds."""
    meter = Meter()
    for wait in waits:
        meter.ran(Result(status="ok", wall_s=wait, queue_s=queue_s))
    return meter


def test_without_a_sandbox_or_a_run_there_are_the_same_keys_and_zeros() -> None:
    nothing = sandbox_metrics(None, None)
    assert nothing.keys() == sandbox_metrics(None, counted(0.1).snapshot()).keys()
    still = counted().snapshot()
    assert set(nothing.values()) == set(sandbox_metrics(still, still).values()) == {0}


def test_a_first_step_counts_from_nothing() -> None:
    meter = counted(0.002, 0.2, queue_s=0.5)
    meter.rerun()
    meter.fault(SandboxError("gone"))
    metrics = sandbox_metrics(None, meter.snapshot())
    assert metrics["sandbox_ok"] == 2
    assert (metrics["sandbox_faults"], metrics["sandbox_reruns"], metrics["seconds_sandbox_queue"]) == (1, 1, 1.0)
    assert metrics["sandbox_timeout"] == 0


def test_only_what_came_since_counts() -> None:
    meter = counted(5.0)
    before = meter.snapshot()
    meter.ran(Result(status="timeout", wall_s=0.5))
    metrics = sandbox_metrics(before, meter.snapshot())
    assert (metrics["sandbox_ok"], metrics["sandbox_timeout"]) == (0, 1)
    assert 0.5 <= metrics["seconds_sandbox_p99"] <= 0.5 * 10 ** (1 / 3)


@pytest.mark.parametrize("seed", range(3))
def test_percentiles_are_the_bounds_around_numpys(seed: int) -> None:
    waits = 10 ** np.random.default_rng(seed).uniform(-3, 1.5, 500)
    metrics = sandbox_metrics(None, counted(*waits).snapshot())
    for key, share in (("seconds_sandbox_p50", 0.5), ("seconds_sandbox_p99", 0.99)):
        exact = np.quantile(waits, share, method="inverted_cdf")
        assert metrics[key] == min(bound for bound in LATENCY_BOUNDS_S if bound >= exact)


def test_what_took_longer_than_the_last_bound_is_told_as_the_last_bound() -> None:
    assert sandbox_metrics(None, counted(1e6).snapshot())["seconds_sandbox_p50"] == LATENCY_BOUNDS_S[-1]
