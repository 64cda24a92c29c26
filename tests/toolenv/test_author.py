"""What an environment's author can get wrong: every mistake is one sentence that names the class and what to do."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from agentrl.errors import EnvContractError, InfrastructureError
from agentrl.sandboxes import SandboxError
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tools.function import tool
from agentrl.toolenv.tools.python import PythonTool
from agentrl.types import Message, Task


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


def constant(value: object) -> Callable[..., object]:
    return lambda *_: value


def broken(**members: Any) -> ToolEnv:
    """An instance of a class with these tools and methods that give these values, its first episode begun."""
    made = {name: value if name == "tools" else constant(value) for name, value in members.items()}
    env = type("Broken", (Plain,), {"gold": constant([]), **made})()
    env.reset(seed=0)
    return env


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ({"tasks": None}, r"Broken\.tasks gave None \(NoneType\): return a list of Task, or a TaskSet"),
        ({"tasks": "one"}, r"Broken\.tasks gave 'one' \(str\)"),
        ({"tasks": ["one"]}, r"Broken\.tasks gave 'one' \(str\)"),
        ({"tasks": []}, r"Broken\.tasks: a set of tasks needs at least one task"),
        ({"tasks": [Task(id="a", prompt="")] * 2}, r"Broken\.tasks: two tasks of one set share an id"),
        ({"respond": None}, r"Broken\.respond gave None \(NoneType\): return a tuple of Messages"),
        ({"respond": "Go on."}, r"Broken\.respond gave 'Go on\.' \(str\)"),
        ({"respond": ["Go on."]}, r"Broken\.respond gave 'Go on\.' \(str\)"),
        ({"turn_reward": None}, r"Broken\.turn_reward raised TypeError.* on task 'one': correct it there"),
        ({"reward": 1.0}, r"Broken\.reward gave 1\.0 \(float\): return named parts"),
        ({"reward": {"correct": "high"}}, r"Broken\.reward raised ValueError"),
        ({"reward": {"speed": 1.0}}, r"Broken\.reward: the part 'speed' has no weight"),
        ({"gold": "All at once."}, r"Broken\.gold gave 'All at once\.' \(str\): return a list of texts"),
        ({"gold": [1]}, r"Broken\.gold gave 1 \(int\)"),
        ({"gold": None}, r"Broken\.gold gave None"),
        ({"tools": [python]}, r"Broken\.tools gave <function .*: list tools; a function becomes one by @tool"),
        ({"tools": count}, r"Broken\.tools gave <.*: list tools, as in tools = \(search,\)"),
        ({"tools": (count, count)}, r"Broken\.tools has two tools called 'count': rename one"),
        ({"tools": (Uncopied(),)}, r"Broken\.tools can't be copied .* make them in __init__"),
        ({"tools": (Unopened(),)}, r"Broken\.tools: python\.open raised SystemExit\(0\) on task 'one'"),
    ],
)
def test_a_mistake_of_the_environments_author_is_named(members: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EnvContractError, match=sentence):
        env = broken(**members)
        env.gold_turns(env.episode.task)
        env.step("```count\nx\n```")
        env.step("done")


class Raises(Plain):
    """Raises in the method that it is told."""

    def __init__(self, *, method: str, error: BaseException) -> None:
        super().__init__()
        self.method, self.error = method, error

    def _raise(self, method: str) -> None:
        if method == self.method:
            raise self.error

    def tasks(self, split: str) -> list[Task]:
        self._raise("tasks")
        return super().tasks(split)

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        self._raise("respond")
        return ()

    def turn_reward(self, episode: Episode) -> float:
        self._raise("turn_reward")
        return 0.0

    def reward(self, episode: Episode) -> Mapping[str, float]:
        self._raise("reward")
        return {}

    def gold(self, task: Task) -> Sequence[str]:
        self._raise("gold")
        return []


@pytest.mark.parametrize("method", ["tasks", "respond", "turn_reward", "reward", "gold"])
def test_what_an_environments_own_code_raises_names_it(method: str) -> None:
    def play(error: BaseException) -> None:
        env = Raises(method=method, error=error)
        env.reset(seed=0)
        env.gold_turns(env.episode.task)
        env.step("```count\nx\n```")
        env.step("done")

    with pytest.raises(EnvContractError, match=rf"Raises\.{method} raised KeyError\('x'\)") as caught:
        play(KeyError("x"))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(EnvContractError, match=rf"Raises\.{method} raised SystemExit\(0\)"):
        play(SystemExit(0))
    with pytest.raises(KeyboardInterrupt):  # in the main thread it is a person's
        play(KeyboardInterrupt())
    with ThreadPoolExecutor() as pool, pytest.raises(EnvContractError, match=rf"Raises\.{method} raised KeyboardInter"):
        pool.submit(play, KeyboardInterrupt()).result()
    with pytest.raises(InfrastructureError, match="gone"):
        play(InfrastructureError("gone"))
    with pytest.raises(InfrastructureError, match="sandbox failed: gone"):
        play(SandboxError("gone"))


def test_a_tool_that_can_not_be_closed_keeps_no_other_open() -> None:
    env = Plain()
    env.tools = tuple(Mock(**{"close.side_effect": error}) for error in (OSError("busy"), None))
    with pytest.raises(EnvContractError, match=r"close raised OSError\('busy'\)"):
        env.close()
    assert [one.close.call_count for one in env.tools] == [1, 1]
