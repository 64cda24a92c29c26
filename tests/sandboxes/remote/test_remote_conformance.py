"""Every case that the local back end must pass, on a local back end behind a server over loopback."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from agentrl.sandboxes import Sandbox
from agentrl.sandboxes.remote.client import RemoteSandbox

from ..conformance import Case, Outcome, cases
from .conftest import KEY, Served

# What only some back ends promise is asked by the name of the back end, and this one is named after the way to it.
CASES = [replace(case, backends=frozenset()) for case in cases() if not case.backends or "local" in case.backends]


@pytest.fixture(scope="module")
def outcomes(sandbox: Sandbox) -> Iterator[dict[str, Future[Outcome]]]:
    served = Served("--limits", "wall_factor=2")
    try:
        with RemoteSandbox(served.name, key=KEY) as remote, ThreadPoolExecutor(4) as pool:
            yield {case.name: pool.submit(case.run, remote) for case in CASES}
            # Another worker may have taken some of the tests.
            pool.shutdown(cancel_futures=True)
            assert remote.health().sessions == 0 and remote.counters().faults == 0
    finally:
        served.close()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(outcomes: dict[str, Future[Outcome]], case: Case) -> None:
    outcome = outcomes[case.name].result()
    assert outcome.passed, outcome
