"""Every environment that we ship is one of Gymnasium's: its checker, wrappers, vectors and specs take it as it is."""

import pickle
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import RecordEpisodeStatistics

import agentrl
from agentrl.errors import UsageError

SPECS = {env_id: gymnasium.registry[env_id] for env_id in reversed(agentrl.list_envs())}
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

    def build(env_id: str | EnvSpec, **options: Any) -> gymnasium.Env[Any, Any]:
        try:
            env = gymnasium.make(env_id, **options)
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


@pytest.mark.parametrize("env_id", IDS)
def test_wrappers_take_it(make: Make, env_id: str) -> None:
    env = RecordEpisodeStatistics(make(env_id))
    _, info = env.reset(seed=1)
    playing = agentrl.make(env_id)
    turns = gold(playing, info["task_id"])
    for turn in turns:
        observation, _, terminated, truncated, info = env.step(turn)
        assert env.observation_space.contains(observation) and env.action_space.contains(turn)
    assert terminated and not truncated
    assert info["episode"]["l"] == len(turns)
    if turns != GIVES_UP:
        assert info["episode"]["r"] == pytest.approx(playing.best_return)
    playing.close()


@pytest.mark.parametrize("env_id", IDS)
def test_spec_goes_through_json_and_pickle(make: Make, env_id: str) -> None:
    env = make(env_id)
    assert env.spec is not None
    for spec in (EnvSpec.from_json(env.spec.to_json()), pickle.loads(pickle.dumps(env.spec))):
        assert spec == env.spec and spec.id == env_id
        again = make(spec)
        assert type(again.unwrapped) is type(env.unwrapped)
        assert again.reset(seed=4)[0] == env.reset(seed=4)[0]


@pytest.mark.parametrize(("env_id", "mode"), VECTORS)
def test_vectors_play_whole_episodes_and_begin_again(make: Make, env_id: str, mode: str) -> None:
    make(env_id)
    # Messages have no array form to lie in shared memory. A process that is forked off one with threads may hang.
    options = {"shared_memory": False, "context": "spawn"} if mode == "async" else {}
    envs = gymnasium.make_vec(env_id, num_envs=2, vectorization_mode=mode, vector_kwargs=options)
    playing = agentrl.make(env_id)
    try:
        observations, info = envs.reset(seed=[3, 4])
        scripts = [deque(gold(playing, task_id)) for task_id in info["task_id"]]
        returns = [0.0, 0.0]
        finished: list[float] = []
        while len(finished) < 4:
            assert envs.observation_space.contains(observations)
            actions = tuple(script.popleft() if script else "" for script in scripts)
            observations, rewards, terminated, truncated, info = envs.step(actions)
            assert not truncated.any()
            for number in range(2):
                returns[number] += float(rewards[number])
                if terminated[number]:
                    finished.append(returns[number])
                elif not scripts[number]:  # the step after the last one resets, whatever the action
                    assert observations[number][-1]["role"] == "user" and rewards[number] == 0.0
                    scripts[number], returns[number] = deque(gold(playing, info["task_id"][number])), 0.0
        if gold(playing, playing.task_set[0].id) != GIVES_UP:
            assert finished == pytest.approx([playing.best_return] * len(finished))
    finally:
        envs.close()
        playing.close()
