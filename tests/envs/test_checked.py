"""Our own checker has nothing to say about the environments that come along."""

from collections.abc import Mapping

import gymnasium
import pytest

import agentrl
from agentrl.toolenv.checker import tasks as checker_tasks
from agentrl.toolenv.dialects import DIALECTS

GENERATED = ("agentrl/Calculus-v0", "agentrl/Countdown-v0", "agentrl/LinearSystems-v0")
CHECKED: list[tuple[str, Mapping[str, object]]] = [
    *(("agentrl/Code-v0", {}), ("agentrl/Math-v0", {}), ("agentrl/MathPython-v0", {"dialect": "hermes"})),
    *(("agentrl/Arithmetic-v0", {"level": [1, 5]}), ("agentrl/Countdown-v0", {})),
    *((env_id, {"level": [1, 2, 3, 4], "tool": False}) for env_id in GENERATED),
]
FURTHER: list[tuple[str, Mapping[str, object]]] = [
    *(("agentrl/Arithmetic-v0", {"level": level}) for level in (1, 2, 3, 4, 5)),
    *(("agentrl/Calculus-v0", {}), ("agentrl/LinearSystems-v0", {})),
    *((f"agentrl/{name}-v0", {"dialect": "native-glm"}) for name in ("Code", "Math")),
    *(("agentrl/MathPython-v0", {"dialect": dialect}) for dialect in DIALECTS if dialect != "hermes"),
]
IN_CI = [pytest.param(*row, marks=pytest.mark.ci) for row in FURTHER]


@pytest.mark.slow
@pytest.mark.usefixtures("graders")
@pytest.mark.parametrize(("env_id", "options"), [*CHECKED, *IN_CI])
def test_our_checker_is_content(monkeypatch: pytest.MonkeyPatch, env_id: str, options: Mapping[str, object]) -> None:
    monkeypatch.setattr(checker_tasks, "SPLIT_SAMPLE", 50)
    env = agentrl.make(env_id, **options)
    report = agentrl.check_env(env, tasks=3 if env_id in GENERATED else 2)
    assert report.ok and not report.skipped, report
    env.reset(options={"task": env.task_set[0].id})
    for turn in env.gold(env.task_set[0]):
        env.step(turn)
    # Votes are counted over these answers; two programs are never the same.
    assert bool(env.episode.answer) is (env_id != "agentrl/Code-v0")
    env.close()


def test_all_that_come_along_are_checked() -> None:
    # tests/envs/test_reasoning_gym.py checks those of reasoning-gym, and tests/envs/adapters those of other projects.
    ours = {env_id for env_id in agentrl.list_envs() if env_id.startswith("agentrl/")}
    adapters = {env_id for env_id in ours if ".adapters." in str(gymnasium.registry[env_id].entry_point)}
    assert ours - adapters == {env_id for env_id, _ in CHECKED}
