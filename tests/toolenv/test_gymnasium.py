"""Every environment that we ship is one of Gymnasium's: its checker, wrappers, vectors and specs take it as it is."""

from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import RecordEpisodeStatistics

import agentrl
from agentrl.errors import UsageError

# Adapters want servers and engines: tests/envs/adapters plays them.
OWN = [env_id for env_id in agentrl.list_envs() if ".adapters." not in str(gymnasium.registry[env_id].entry_point)]
SPECS = {env_id: gymnasium.registry[env_id] for env_id in reversed(OWN)}
ONE_OF_EACH = sorted(
    {(str(spec.entry_point), "tool" in spec.kwargs): env_id for env_id, spec in SPECS.items()}.values()
)
"""One id for each class of environments, with and without a tool: others of the class differ in their task only."""
IDS = [*ONE_OF_EACH, *sorted(SPECS.keys() - set(ONE_OF_EACH))[::15]]
VECTORS = [*((env_id, "sync") for env_id in ONE_OF_EACH), ("agentrl/Arithmetic-v0", "async")]
VECTORS += [pytest.param(env_id, "async", marks=pytest.mark.ci) for env_id in ONE_OF_EACH if env_id != VECTORS[-1][0]]
GIVES_UP = ["I do not know."]
Make = Callable[..., gymnasium.Env[Any, Any]]


@pytest.fixture
def make(require: Callable[[bool, str], None]) -> Generator[Make]:
    """Makes and resets an environment of Gymnasium's; one whose data or packages are not there is asked for."""
    made: list[gymnasium.Env[Any, Any]] = []

    def build(env_id: str) -> gymnasium.Env[Any, Any]:
        try:
            env = gymnasium.make(env_id)
            made.append(env)
            env.reset(seed=0)
        except UsageError as error:
            require(False, f"{env_id}: {error}")
            raise
        return env

    yield build
    for env in made:
        env.close()


def gold(env: agentrl.ToolEnv, task_id: str) -> list[str]:
    """A perfect episode's turns, or one that gives up where there is no perfect player."""
    try:
        return list(env.gold(env.task_set.find(task_id)))
    except NotImplementedError:
        return GIVES_UP


@pytest.mark.parametrize("env_id", IDS)
def test_gymnasiums_checker_has_nothing_to_say(make: Make, env_id: str) -> None:
    check_env(make(env_id).unwrapped)


# Vectors that fail are collected while another test runs, and then complain.
@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.parametrize(("env_id", "mode"), VECTORS)
def test_vectors_play_whole_episodes_and_begin_again(make: Make, env_id: str, mode: str) -> None:
    make(env_id)
    # Messages have no array form to lie in shared memory. A process that is forked off one with threads may hang.
    options = {"shared_memory": False, "context": "spawn"} if mode == "async" else {}
    made: dict[str, Any] = {"vector_kwargs": options, "wrappers": [RecordEpisodeStatistics]}
    envs = gymnasium.make_vec(env_id, num_envs=2, vectorization_mode=mode, **made)
    playing = agentrl.make(env_id)
    try:
        observations, info = envs.reset(seed=[3, 4])
        scripts = [deque(gold(playing, task_id)) for task_id in info["task_id"]]
        finished: list[float] = []
        while len(finished) < 4:
            assert envs.observation_space.contains(observations)
            actions = tuple(script.popleft() if script else "" for script in scripts)
            assert envs.action_space.contains(actions)
            observations, rewards, terminated, truncated, info = envs.step(actions)
            assert not truncated.any()
            for number in range(2):
                if terminated[number]:
                    finished.append(info["episode"]["r"][number])
                elif not scripts[number]:  # the step after the last one resets, whatever the action
                    assert observations[number][-1]["role"] == "user" and rewards[number] == 0.0
                    scripts[number] = deque(gold(playing, info["task_id"][number]))
        if gold(playing, playing.task_set[0].id) != GIVES_UP:
            assert finished == pytest.approx([playing.best_return] * len(finished))
    finally:
        envs.close()
        playing.close()
