"""What a sandbox counts, and what it says of its health."""

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.sandboxes import Limits, Result, Sandbox, SandboxError
from agentrl.sandboxes.base import LATENCY_BOUNDS_S, ForkRefused, SandboxClosed
from agentrl.sandboxes.host.counters import Meter
from agentrl.sandboxes.host.local import LocalSandbox


@given(st.lists(st.tuples(st.floats(0, 300), st.floats(0, 300))))
def test_latency_falls_into_the_bucket_below_its_bound(times: list[tuple[float, float]]) -> None:
    meter, edges = Meter(), (0.0, *LATENCY_BOUNDS_S, float("inf"))
    for queue, wall in times:
        meter.ran(Result(status="ok", queue_s=queue, wall_s=wall))
    waited = [queue + wall for queue, wall in times]
    expected = [sum(low < s <= high or s == low == 0.0 for s in waited) for low, high in pairwise(edges)]
    counted = meter.snapshot()
    assert counted.latency == tuple(expected)
    assert counted.queue_s == pytest.approx(sum(queue for queue, _ in times))


@pytest.mark.parametrize(("error", "faults"), [(SandboxError, 1), (SandboxClosed, 0), (ForkRefused, 0)])
def test_only_faults_are_faults(error: type[SandboxError], faults: int) -> None:
    def fail() -> Result:
        raise error("no")

    meter = Meter()
    with pytest.raises(error):
        meter.measure(fail)
    counted = meter.snapshot()
    assert counted.faults == faults and counted.runs == {}


def test_a_sandbox_counts_cells_and_programs(sandbox: Sandbox) -> None:
    with LocalSandbox(Limits(), ready=0) as own:
        own.run("1")
        own.run("1 / 0")
        with own.session() as session:
            session.run("x = 1")
            session.run("while True: pass", timeout=0.1)
            session.replay().close()
            assert own.health().sessions == 1
        counted = own.counters()
    assert counted.runs == {"ok": 3, "error": 1, "timeout": 1}
    assert (counted.faults, counted.reruns, sum(counted.latency)) == (0, 0, 5)
    assert counted.queue_s > 0
    own.close()
    for call in (partial(own.run, "1"), own._pools["plain"].start):  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(SandboxClosed, match="closed"):
            call()
    assert own.counters().faults == 0, "what the owner closed is no fault"
    assert not own.health().ok and own.health().sessions == 0 and "plain zygote closed" in own.health().detail
