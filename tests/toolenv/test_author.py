"""What an environment's author can get wrong: every mistake is one sentence that names the class and what to do."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from agentrl.errors import EnvContractError, InfrastructureError
from agentrl.sandboxes import SandboxError
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tools.function import tool
from agentrl.toolenv.tools.python import PythonTool
from agentrl.types import Task


def python(code: str) -> str:
    """A function that is no tool yet."""
    return code


@tool
def count(code: str) -> int:
    """Count."""
    return len(code)


class Plain(ToolEnv):
    """Nothing is wrong with it."""

    tools = (count,)

    def tasks(self, split: str) -> list[Task]:
        return [Task(id="one", prompt="Count.")]

    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": 1.0}


class Uncopied(PythonTool):
    def __deepcopy__(self, memo: object) -> "Uncopied":
        raise TypeError("it holds a connection")


class Unopened(PythonTool):
    def open(self, seed: int) -> None:
        raise SystemExit(0)


def play(**members: Any) -> None:
    """Play with a class that has these tools, and methods that give these values or raise these errors."""
    made = {name: it if name == "tools" else lambda *_, it=it: give(it) for name, it in members.items()}
    env = type("Broken", (Plain,), {"gold": lambda *_: [], **made})()
    env.reset(seed=0)
    env.gold_turns(env.episode.task)
    env.step("```count\nx\n```")
    env.step("done")


def give(value: object) -> object:
    if isinstance(value, BaseException):
        raise value
    return value


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"tasks": None}, r"Broken\.tasks gave None \(NoneType\): return a list of Task, or a TaskSet"),
        ({"tasks": "one"}, r"Broken\.tasks gave 'one' \(str\)"),
        ({"tasks": ["one"]}, r"Broken\.tasks gave 'one' \(str\)"),
        ({"tasks": []}, r"Broken\.tasks: a set of tasks needs at least one task"),
        ({"tasks": [Task(id="a", prompt="")] * 2}, r"Broken\.tasks: two tasks of one set share the id 'a'"),
        ({"respond": "Go on."}, r"Broken\.respond gave 'Go on\.' \(str\): return a tuple of Messages"),
        ({"respond": [{"role": "narrator", "content": "x"}]}, r"Broken\.respond gave .*: .* a known role and a text"),
        ({"respond": [{"role": "user", "content": None}]}, r"Broken\.respond gave .*: .* a known role and a text"),
        ({"turn_reward": None}, r"Broken\.turn_reward raised TypeError.* on task 'one': correct it there"),
        ({"reward": 1.0}, r"Broken\.reward gave 1\.0 \(float\): return named parts"),
        ({"reward": {"correct": "high"}}, r"Broken\.reward raised ValueError"),
        ({"reward": {"speed": 1.0}}, r"Broken\.reward: the part 'speed' has no weight"),
        ({"reward": {1: 1.0}}, r"Broken\.reward gave 1 \(int\): name each part by a text"),
        ({"gold": "All at once."}, r"Broken\.gold gave 'All at once\.' \(str\): return a list of texts"),
        ({"tools": [python]}, r"Broken\.tools gave <function .*: list tools; a function becomes one by @tool"),
        ({"tools": count}, r"Broken\.tools gave <.*: list tools, as in tools = \(search,\)"),
        ({"tools": (count, count)}, r"Broken\.tools has two tools called 'count': rename one"),
        ({"tools": (Uncopied(),)}, r"Broken\.tools can't be copied .* make them in __init__"),
        ({"tools": (Unopened(),)}, r"Broken\.tools: python\.open raised SystemExit\(0\) on task 'one'"),
    ],
)
def test_a_mistake_of_the_environments_author_is_named(members: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EnvContractError, match=sentence):
        play(**members)


@pytest.mark.parametrize(
    "method", ["tasks", "open_episode", "respond", "turn_reward", "answer_of", "close_episode", "gold"]
)
def test_a_method_that_is_async_is_named(method: str) -> None:
    async def asked(*_: object) -> None: ...

    with pytest.raises(EnvContractError, match=rf"Broken\.{method} is async, and nobody awaits it: write def"):
        play(**{method: asked()})


@pytest.mark.parametrize("method", ["tasks", "respond", "turn_reward", "reward", "gold"])
def test_what_an_environments_own_code_raises_names_it(method: str) -> None:
    with pytest.raises(EnvContractError, match=rf"Broken\.{method} raised KeyError\('x'\)") as caught:
        play(**{method: KeyError("x")})
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(EnvContractError, match=rf"Broken\.{method} raised SystemExit\(0\)"):
        play(**{method: SystemExit(0)})
    with pytest.raises(KeyboardInterrupt):  # in the main thread it is a person's
        play(**{method: KeyboardInterrupt()})
    with ThreadPoolExecutor() as pool, pytest.raises(EnvContractError, match=rf"Broken\.{method} raised KeyboardInter"):
        pool.submit(play, **{method: KeyboardInterrupt()}).result()
    with pytest.raises(InfrastructureError, match="gone"):
        play(**{method: InfrastructureError("gone")})
    with pytest.raises(InfrastructureError, match="sandbox failed: gone"):
        play(**{method: SandboxError("gone")})


def test_a_tool_that_can_not_be_closed_keeps_no_other_open() -> None:
    env = Plain()
    env.tools = tuple(Mock(**{"close.side_effect": error}) for error in (OSError("busy"), None))
    with pytest.raises(EnvContractError, match=r"close raised OSError\('busy'\)"):
        env.close()
    assert [tool_.close.call_count for tool_ in env.tools] == [1, 1]
