"""A source of tasks: which come next, the gold player's turns, and where an episode says that it comes from."""

import re

import pytest

from agentrl.engines.base import Sampling
from agentrl.errors import ConfigError
from agentrl.rollout.plan import TaskSource
from agentrl.sandboxes import Sandbox
from agentrl.toolenv.registry import make

from .conftest import Numbers


@pytest.fixture
def seven(numbers: str) -> TaskSource:
    return TaskSource(numbers, {"max_turns": 3}, "train")


def test_finite_tasks_begin_again(seven: TaskSource) -> None:
    assert [task.id for task in seven.pick(5, start=5)] == ["5", "6", "0", "1", "2"]
    with pytest.raises(ConfigError, match="the test learns from gold episodes, and Numbers has no gold player: do so"):
        seven.gold(seven.tasks[0], "the test learns", "do so")


@pytest.mark.parametrize("step", [1, 3, 7, 20])
def test_a_seed_shuffles_every_pass_through_finite_tasks(seven: TaskSource, step: int) -> None:
    def order(seed: int) -> list[str]:
        return [task.id for at in range(0, 70, step) for task in seven.pick(step, start=at, seed=seed)][:70]

    passes = [order(3)[at : at + 7] for at in range(0, 70, 7)]
    assert all(sorted(each) == list("0123456") for each in passes), "every task once a pass"
    assert len(set(map(tuple, passes))) > 7 and list("0123456") not in passes
    assert order(3) == [task.id for task in seven.pick(70, seed=3)], "however many a step takes, from the start on"
    assert order(4) != order(3)
    assert seven.pick(7, start=-7, seed=3) != seven.pick(7, start=0, seed=3)


def test_endless_tasks_come_by_index_whatever_the_seed() -> None:
    source, env = TaskSource("agentrl/Arithmetic-v0", {}, "train"), make("agentrl/Arithmetic-v0")
    assert [task.id for task in source.pick(3, start=5, seed=1)] == [env.task_set[at].id for at in (5, 6, 7)]
    assert source.gold(source.tasks[0], "it learns", "do") == tuple(env.gold(env.task_set[0]))


def test_the_environment_is_made_once_and_says_where_episodes_come_from(seven: TaskSource) -> None:
    before = Numbers.made
    origin = seven.origin(Sampling(temperature=0.7, max_tokens=9))
    assert (seven.tasks.size, seven.has_tools, Numbers.made) == (7, False, before)
    assert (origin.env_id, origin.env_args, origin.split) == ("test/Numbers-v0", {"max_turns": 3}, "train")
    assert (origin.best_return, origin.temperature, origin.turn_tokens) == (1.0, 0.7, 9)
    assert origin.dialect == seven.dialect.label and origin.versions["python"]
    assert " " not in origin.versions["sandbox"], "nothing of it runs in one"


def test_an_episode_names_the_sandbox_that_its_tools_run_in(sandbox: Sandbox) -> None:
    origin = TaskSource("agentrl/MathPython-v0", {}, "train").origin(Sampling(temperature=0.7, max_tokens=9))
    assert re.fullmatch(rf"[0-9a-f]{{12}} {sandbox.backend}", origin.versions["sandbox"])
