"""Our own checker has nothing to say about the environments that come along."""

from collections.abc import Mapping

import pytest

import agentrl
from agentrl.toolenv.dialects import DIALECTS

GENERATED = ("agentrl/Calculus-v0", "agentrl/Countdown-v0", "agentrl/LinearSystems-v0")
CHECKED: list[tuple[str, Mapping[str, object]]] = [
    *(("agentrl/Arithmetic-v0", {"level": level}) for level in (1, 2, 3, 4, 5, [1, 5])),
    *((env_id, options) for env_id in GENERATED for options in ({}, {"level": [1, 2, 3, 4], "tool": False})),
    *((f"agentrl/{name}-v0", {"dialect": one}) for name in ("Code", "Math", "MathPython") for one in DIALECTS),
]


@pytest.mark.usefixtures("graders")
@pytest.mark.parametrize(("env_id", "options"), CHECKED)
def test_our_checker_is_content(env_id: str, options: Mapping[str, object]) -> None:
    env = agentrl.make(env_id, **options)
    report = agentrl.check_env(env, tasks=3 if env_id in GENERATED else 2)
    env.close()
    assert report.ok and not report.skipped, report
