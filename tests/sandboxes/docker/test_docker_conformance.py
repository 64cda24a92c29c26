"""Every case that the local back end must pass, on containers of runc and of gVisor."""

import os
import tomllib
from pathlib import Path

import pytest

from agentrl.sandboxes import Sandbox

from ..conformance import Case, cases

_BUSY = "gVisor counts waiting for a core as CPU time, so on a busy machine the time limit comes first"
GVISOR: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("gvisor.toml").read_text())
WHY = {name: why for why, names in GVISOR.items() for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=str)
def test_conformance(sandbox: Sandbox, runtime: str, case: Case) -> None:
    outcome = case.run(sandbox)
    late = "timeout" in outcome.seen and os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    why = WHY.get(case.name, _BUSY if late else "")
    if runtime == "runsc" and why and not outcome.passed:
        assert sandbox.run("6 * 7").value == "42", "whatever a program met, the next one must run"
        pytest.xfail(why)
    assert outcome.passed, outcome
