"""A tool plays turns of the policy that calls it: they are rows of the same episode."""

import asyncio
import importlib
import pickle
import re
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import gymnasium
import pytest

import agentrl
from agentrl.engines.base import Completion, Sampling
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.render.renderer import Renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.driver import StepDriver
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.player import EpisodeLimits
from agentrl.rollout.policy import Policy
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.checker import check_env
from agentrl.toolenv.tools.context import SubTurn, scripted
from agentrl.toolenv.tools.subagent import SubAgent
from agentrl.types import Message, Task, Trajectory

from .conftest import ANSWER, Collected, collect, only, specs
from .test_policy import Told, check

PAGE = Path(__file__).parents[2] / "docs" / "drivers.md"
DELEGATE = "```{}\n2+2\n```"


def user(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


@agentrl.tool(timeout=None)
def waits(task: str, context: agentrl.ToolContext) -> str:
    """Two turns of one sub-agent."""
    text = context.policy.turn(user(task))
    return context.policy.turn([*user(task), Message(role="assistant", content=text), *user("Sure?")])


@agentrl.tool(timeout=None)
async def gathers(task: str, context: agentrl.ToolContext) -> str:
    """Three sub-agents side by side."""
    return " ".join(await asyncio.gather(*(context.policy.turn_async(user(f"{task} {n}")) for n in range(3))))


@agentrl.tool(timeout=None)
def pools(task: str, context: agentrl.ToolContext) -> str:
    """Three sub-agents in threads."""
    with ThreadPoolExecutor(3) as pool:
        return " ".join(pool.map(context.policy.turn, [user(f"{task} {n}") for n in range(3)]))


@agentrl.tool(timeout=0.05)
def hurries(task: str, context: agentrl.ToolContext) -> str:
    """Play until the policy is not to be had any more."""
    while True:
        context.policy.turn(user(task))


@agentrl.tool(timeout=None)
def rambles(task: str, context: agentrl.ToolContext) -> str:
    """Talk at length."""
    return context.policy.turn(user(f"{task} " * 500))


@agentrl.tool(timeout=None)
def hides(task: str, context: agentrl.ToolContext) -> str:
    """Answer whatever happens."""
    try:
        return context.policy.turn(user(task))
    except Exception:
        return "fine"


class Boss(ToolEnv):
    """An agent with all of these tools."""

    tools = (waits, gathers, pools, hurries, rambles, hides)

    def tasks(self, split: str) -> list[Task]:
        return [Task(id="sum", prompt="2+2?", answer="4")]

    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": float(episode.final == "4")}

    def turn_reward(self, episode: Episode) -> float:
        return 0.25


class Keeps(StepDriver):
    """Keeps what it played last."""

    async def play(self, env: ToolEnv, policy: Policy, spec: EpisodeSpec) -> None:
        self.env, self.policy = env, policy
        await super().play(env, policy, spec)


class Play:
    """Plays one episode with turns that are texts."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer, self.driver = renderer, Keeps()

    def __call__(self, *turns: str, kind: type[Told] = Told, episode_tokens: int = 2000) -> Collected:
        engine = self.engine(*turns, kind=kind)
        with closing(self.collector(episode_tokens)) as collector:
            collected = collect(collector, specs("sum"), engine=engine)
        if collected.groups:
            check(self.driver.policy, engine.asked[-len(only(collected).sampled) :])
        # The next episode of the environment has another policy.
        pickle.dumps(self.driver.env.sub_policy)
        return collected

    def engine(self, *turns: str, kind: type[Told] = Told) -> Told:
        return kind([self.renderer.turn(turn) for turn in turns])

    def collector(self, episode_tokens: int = 2000) -> Collector:
        bounds = EpisodeLimits(episode_tokens=episode_tokens)
        envs = {"": ("tests/Boss-v0", {})}
        return Collector(envs, self.renderer, limits=bounds, driver=self.driver, max_fault_rate=1.0)

    def texts(self, trajectory: Trajectory) -> list[str]:
        """Return the texts of all turns in time."""
        return [self.renderer.text(segment.token_ids) for segment in trajectory.sampled]


@pytest.fixture
def play(renderer: Renderer, clean_registry: None) -> Play:
    gymnasium.register("tests/Boss-v0", entry_point=Boss)  # pyright: ignore[reportArgumentType]
    return Play(renderer)


def results(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "tool"]


def test_turns_of_a_sub_agent_are_rows_of_the_episode(play: Play) -> None:
    turns = [DELEGATE.format("waits"), "4?", "Yes.", DELEGATE.format("waits"), "4!", "Sure.", ANSWER]
    trajectory = only(play(*turns))
    assert play.texts(trajectory) == turns and results(trajectory) == ["Yes.", "Sure."]
    assert [row.parent for row in trajectory.rows] == [None, None, 1]
    assert trajectory.forks == {"anew": 1, "again": 1}, "the same task begins with the same prompt"
    # The agent's turn is paid when its sub-agent has spoken; it lies in the future of all turns before.
    assert trajectory.rewards == (0, 0, 0.25, 0, 0, 0.25, 1.25)
    assert trajectory.steps == (0, 3, 6)
    again = only(play(*turns))
    assert replace(again, tool_runs=trajectory.tool_runs) == trajectory, "and it repeats exactly"


class Backwards(Told):
    """Ends the turns of three sub-agents in the reverse of the order in which they were asked for."""

    calls = 0

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        number, self.calls = self.calls, self.calls + 1
        while number and len(self.asked) < 4 - number:
            await asyncio.sleep(0.001)
        return await super().generate(prompt_ids, sampling, seed=seed)


@pytest.mark.parametrize("tool", ["gathers", "pools"])
def test_sub_agents_side_by_side_are_numbered_by_their_ends(play: Play, tool: str) -> None:
    trajectory = only(play(DELEGATE.format(tool), "A", "B", "C", ANSWER, kind=Backwards))
    assert play.texts(trajectory)[1:4] == ["A", "B", "C"] and len(trajectory.rows) == 4
    assert tool == "pools" or results(trajectory) == ["C B A"], "in the order in which it asked"


def test_without_tokens_the_agent_reads_why(play: Play) -> None:
    trajectory = only(play(DELEGATE.format("rambles"), ANSWER, episode_tokens=900))
    assert results(trajectory) == ["no tokens are left for a sub-agent"] and trajectory.parts == {"correct": 1.0}


class Faulty(Told):
    """Fails once, in the first sub-agent's first turn."""

    error: Exception = InfrastructureError("the server is gone")

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        done = await super().generate(prompt_ids, sampling, seed=seed)
        if len(self.asked) == 2:
            raise self.error
        return done


class Broken(Faulty):
    """Has a bug."""

    error = KeyError("a bug of the engine")


def test_a_fault_is_the_engines_whatever_the_tool_makes_of_it(play: Play) -> None:
    call = DELEGATE.format("hides")
    collected = play(call, "Lost.", call, "Four.", ANSWER, kind=Faulty)
    assert collected.faults == 1 and results(only(collected)) == ["Four."]
    with pytest.raises(KeyError, match="a bug of the engine"):
        play(call, "Lost.", kind=Broken)


class Endless(Told):
    """Never ends a turn of a sub-agent."""

    left = 0

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        if len(self.asked) != 1:
            return await super().generate(prompt_ids, sampling, seed=seed)
        try:
            return await asyncio.Event().wait()  # pyright: ignore[reportReturnType]
        finally:
            self.left += 1
            self.asked.append(self.asked[0])


def test_a_turn_that_the_tools_time_limit_cuts_off_leaves_no_trace(play: Play) -> None:
    with closing(play.collector()) as collector:
        engine = play.engine(DELEGATE.format("hurries"), ANSWER, kind=Endless)
        trajectory = only(collect(collector, specs("sum"), engine=engine))
    assert results(trajectory) == ["stopped: hurries ran longer than 0.05 s"] and trajectory.ret == 1.5
    assert len(trajectory.rows) == 1 and engine.left == 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("tool", ["waits", "hides", "gathers", "pools"])
def test_an_episode_that_is_cancelled_does_not_wait_for_its_sub_agents(play: Play, tool: str) -> None:
    engine = play.engine(DELEGATE.format(tool), ANSWER, kind=Endless)

    async def go() -> None:
        playing = asyncio.create_task(collector.collect(specs("sum"), engine, Sampling()))
        while len(engine.asked) < 1:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.wait([playing])

    with closing(play.collector()) as collector:
        asyncio.run(asyncio.wait_for(go(), 5))
    for thread in threading.enumerate():
        if thread.name == "agentrl-tool":
            thread.join(5)
            assert not thread.is_alive()


def test_without_a_policy_the_tool_fails_in_words() -> None:
    with closing(Boss()) as env:
        env.reset(seed=0)
        (message,) = env.step(DELEGATE.format("waits"))[0]
        assert message["content"] == "no policy plays sub-agents here: only a collector's episodes have one"


@pytest.fixture
def products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_registry: None) -> str:
    """The id of the environment of the page."""
    section = PAGE.read_text("utf-8").partition("## Sub-agents\n")[2].partition("\n## ")[0]
    monkeypatch.syspath_prepend(tmp_path)
    for text in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
        name = text.split()[1]
        (tmp_path / name).write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
        importlib.import_module(name.removesuffix(".py"))
    return "products:me/Products-v0"


@pytest.mark.parametrize("dialect", ["fence", "hermes", "native-hermes"])
def test_a_sub_agent_has_tools_of_its_own(products: str, renderer: Renderer, dialect: str) -> None:
    report = check_env(products, tasks=1, dialect=dialect)
    assert report.ok, str(report)
    with closing(agentrl.make(products, dialect=dialect)) as env:
        gold = env.gold_turns(env.task_set[0])
    limits = EpisodeLimits(episode_tokens=3000)
    with closing(Collector({"": (products, {"dialect": dialect})}, renderer, limits=limits)) as collector:
        trajectory = only(collect(collector, specs("train:0"), *gold, max_tokens=300))
    assert trajectory.parts == {"correct": 1.0} and len(trajectory.sampled) == 7 and len(trajectory.rows) == 3
    assert [run.ok for run in trajectory.tool_runs] == [True, True], "of the agent's own calls"


def test_a_sub_agent_without_an_answer_is_a_tool_that_failed(products: str) -> None:
    turns = ["```solve\n2*3\n```", *[SubTurn("```multiply\n2*3\n```")] * 4]
    with closing(agentrl.make(products)) as env:
        env.sub_policy = scripted(turns)
        env.reset(seed=0)
        messages = [*env.step(turns[0])[0], *env.step("```solve\n2\n```\n```multiply\n2*3\n```")[0]]
    assert [message["content"] for message in messages] == ["the sub-agent had no answer after 4 turns", ""]
    with pytest.raises(ConfigError, match="at least one turn"):
        SubAgent("solve", "Solve it.", max_turns=0)
