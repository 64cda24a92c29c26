"""An environment of which each task misbehaves in its own way, and what plays it."""

import asyncio
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import pytest

from agentrl.engines.base import Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import InfrastructureError
from agentrl.render.renderer import Renderer
from agentrl.rollout.collector import Collected, Collector
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.player import EpisodeLimits
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import TaskList
from agentrl.toolenv.tools.function import FunctionTool, ToolContext
from agentrl.types import Message, Task, Trajectory

CALL, ANSWER = "```python\n2+2\n```", "4"
TASKS = ["calm", "late", "calm2", "chatty", "fault-once", "fault-always", "bug", "slow", "fickle", "exit"]


@dataclass
class Journal:
    """What the environments of a test did."""

    played: Counter[str] = field(default_factory=Counter[str])
    made: int = 0
    at_once: int = 0
    most_at_once: int = 0
    open_tools: set[int] = field(default_factory=set[int])
    hold: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


journal = Journal()
Make = Callable[..., Collector]


class Python(FunctionTool):
    """Answers every code with a number; holds something from its first call until it is closed."""

    def __init__(self) -> None:
        super().__init__(python)

    def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
        journal.open_tools.add(id(self))
        return super().call(arguments, ctx)

    def close(self) -> None:
        journal.open_tools.discard(id(self))


def python(code: str) -> str:
    """Add two and two."""
    return "the sum is " * code.count("long") * 5 + "4"


class Numbers(ToolEnv):
    """So many numbered tasks, in order."""

    reward_weights = {"found": 1.0, "slow": -0.25}  # noqa: RUF012
    made = 0

    def __init__(self, *, count: int = 7, **options: Any) -> None:
        super().__init__(**options)
        self.count = count
        Numbers.made += 1

    def tasks(self, split: str) -> TaskList:
        return TaskList([Task(id=str(number), prompt="?") for number in range(self.count)])


@pytest.fixture(scope="module")
def numbers() -> Generator[str]:
    gymnasium.register("test/Numbers-v0", entry_point=Numbers)
    yield "test/Numbers-v0"
    del gymnasium.registry["test/Numbers-v0"]


class Sums(ToolEnv):
    """Each task misbehaves in the way its name says."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tools = (Python(),)
        journal.made += 1

    def tasks(self, split: str) -> TaskList:
        return TaskList([Task(id=name, prompt="2+2?", answer="4") for name in TASKS])

    def reset(self, **options: Any) -> Any:
        messages, info = super().reset(**options)
        if self.episode.task.id == "fickle":
            messages = (Message(role="user", content=str(self.np_random.integers(10**9))),)
        return messages, info

    def step(self, action: str) -> Any:
        with journal.lock:
            journal.played[self.episode.task.id] += 1
            journal.at_once += 1
            journal.most_at_once = max(journal.most_at_once, journal.at_once)
        try:
            return self.misbehave(super().step, action)
        finally:
            with journal.lock:
                journal.at_once -= 1

    def misbehave(self, step: Callable[[str], Any], action: str) -> Any:
        name = self.episode.task.id
        if name == "slow":
            time.sleep(0.02)
        if name == "bug":
            raise KeyError("a bug in the environment")
        if name == "exit":
            sys.exit(0)
        if name == "fault-always" or (name == "fault-once" and journal.played[name] == 2):
            raise InfrastructureError("the sandbox is gone")
        done = step(action)
        assert name != "late" or journal.hold.wait(60)
        return done

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        return (Message(role="user", content="Go on."),) if episode.task.id == "chatty" else ()

    def turn_reward(self, episode: Episode) -> float:
        return 0.25

    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": float(episode.final == episode.task.answer)}


@pytest.fixture
def registered() -> Generator[None]:
    vars(journal).update(vars(Journal()))
    gymnasium.register("tests/Sums-v0", entry_point=Sums)
    yield
    del gymnasium.registry["tests/Sums-v0"]


@pytest.fixture
def make_collector(renderer: Renderer) -> Generator[Make]:
    made: list[Collector] = []

    def make(*, tokens: int = 2000, **options: Any) -> Collector:
        env_args = {"max_turns": options.pop("max_turns", 4)}
        limits = EpisodeLimits(episode_tokens=tokens)
        made.append(Collector({"": ("tests/Sums-v0", env_args)}, renderer, limits=limits, **options))
        return made[-1]

    yield make
    for collector in made:
        collector.close()
    assert not journal.open_tools and not journal.at_once, "nothing is left running"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("agentrl-env")]


def specs(*names: str, members: int = 1) -> list[list[EpisodeSpec]]:
    seeds = itertools.count(1)
    return [[EpisodeSpec(task_id=name, seed=next(seeds)) for _ in range(members)] for name in names]


def only(collected: Collected) -> Trajectory:
    ((trajectory,),) = collected.groups
    return trajectory


def scripted(collector: Collector, asked: list[list[EpisodeSpec]], *turns: str) -> list[list[EpisodeSpec]]:
    """Have every episode say ``turns``."""
    script = tuple(tuple(collector._renderer.turn(turn)) for turn in turns)
    return [[replace(spec, script=script) for spec in group] for group in asked]


def collect(collector: Collector, asked: list[list[EpisodeSpec]], *turns: str, **options: Any) -> Collected:
    """Every episode says ``turns``, or what ``engine`` samples."""
    if "engine" not in options:
        asked = scripted(collector, asked, *turns)
    sampling = Sampling(max_tokens=options.pop("max_tokens", 60))
    return asyncio.run(collector.collect(asked, options.pop("engine", ScriptedEngine(())), sampling, **options))
