"""What an episode holds: begun and given back on every path, in the one thread that all of its functions run in."""

import copy
import gc
import pickle
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import gymnasium
import pytest

from agentrl.errors import EnvContractError, InfrastructureError, UnknownNameError
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.toolenv.tasks import GeneratedTasks
from agentrl.toolenv.tools.function import ToolContext, tool
from agentrl.toolenv.tools.timed import ToolThread
from agentrl.types import Stop, Task

# Some environments here are forgotten while they are open; from Python 3.13 on SQLite complains of that.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")


@tool
def query(sql: str, ctx: ToolContext) -> list[Any]:
    """Query the database."""
    return ctx.state["db"].execute(sql).fetchall()


@tool(timeout=0.2)
def fail(how: str, ctx: ToolContext) -> str:
    """Go wrong."""
    if how == "infrastructure":
        raise InfrastructureError("the server is gone")
    if how == "overrun":
        ctx.state["release"].wait(30)
    if how == "at the end":
        ctx.end()
    raise ValueError(how)


class Database(sqlite3.Connection):
    """Of one thread, as those of sqlite3 are, but closed by any: the thread of an overrun closes none."""

    def __init__(self, path: str) -> None:
        super().__init__(path, check_same_thread=False)
        self._thread = threading.get_ident()

    def execute(self, *words: Any) -> Any:
        if threading.get_ident() != self._thread:
            raise sqlite3.ProgrammingError("a database can only be used in that same thread")
        return super().execute(*words)

    def __del__(self) -> None:
        self.close()


class Shop(ToolEnv):
    """Count the bags; the database is in memory, and SQLite keeps it to the thread that opened it."""

    tools = (query, fail)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log: list[str] = []
        self.threads: set[int] = set()

    def tasks(self, split: str) -> GeneratedTasks:
        return GeneratedTasks(split, lambda index: Task(id="", prompt="How many?", answer=str(index)))

    def open_episode(self, context: ToolContext) -> None:
        self._saw("open")
        context.state["release"] = threading.Event()
        context.state["db"] = Database(":memory:")
        context.state["db"].execute("create table bags (n int)")

    def close_episode(self, context: ToolContext) -> None:
        self._saw("close")
        context.state["release"].set()
        context.state["db"].close()

    def respond(self, episode: Episode) -> tuple[()]:
        self._saw("respond")
        return ()

    def turn_reward(self, episode: Episode) -> float:
        return 0.01 * self._count(episode)

    def reward(self, episode: Episode) -> Mapping[str, float]:
        self._saw("reward")
        if episode.final == "no number":
            raise ValueError(episode.final)
        return {"correct": float(str(self._count(episode)) == episode.final)}

    def _count(self, episode: Episode) -> int:
        (count,) = episode.state["db"].execute("select count(*) from bags").fetchone()
        return count

    def _saw(self, what: str) -> None:
        self.log.append(what)
        self.threads.add(threading.get_ident())


INSERT = "```query\ninsert into bags values (1)\n```"
FAULT = "```fail infrastructure ```"
COUNT = "```query\nselect count(*) from bags\n```"
ENDS: Mapping[str, Callable[[Shop], object]] = {
    "a final answer": lambda env: env.step("1"),
    "a tool": lambda env: env.step("```fail\nat the end\n```"),
    "the turn limit": lambda env: [env.step("```fail\nx\n```") for _ in range(2)],
    "close": lambda env: env.close(),
    "the next reset": lambda env: env.reset(seed=1),
    "a fault, then close": lambda env: (faulty(env, FAULT), env.close()),
    "a fault, then reset": lambda env: (faulty(env, FAULT), env.reset(seed=1)),
    "a reward that raises, then close": lambda env: (faulty(env, "no number"), env.close()),
}


def faulty(env: Shop, text: str) -> None:
    with pytest.raises(InfrastructureError if text == FAULT else EnvContractError, match=r"^the server|^Shop\.reward"):
        env.step(text)


def workers(before: Collection[threading.Thread]) -> int:
    """How many threads of tools there are beside those of earlier tests, some of which may not have ended yet."""
    gc.collect()
    return sum(thread.name == "agentrl-tool" and thread not in before for thread in threading.enumerate())


@pytest.fixture
def env() -> Shop:
    made = Shop(max_turns=3)
    made.reset(seed=0)
    return made


def test_one_thread_has_all_of_an_episode(env: Shop) -> None:
    answers = [env.step(text)[0][0]["content"] for text in (INSERT, COUNT)]
    assert answers == ["[]", "[[1]]"]
    assert env.step("1")[1] == 1.01
    assert env.log == ["open", "respond", "respond", "reward", "close"]
    assert len(env.threads) == 1 and threading.get_ident() not in env.threads


@pytest.mark.parametrize("how", ENDS)
def test_what_was_opened_is_closed_once(env: Shop, how: str) -> None:
    env.step(INSERT)
    state = env.episode.state
    ENDS[how](env)
    assert env.log.count("close") == 1 and state["release"].is_set()
    env.close()
    env.close()
    assert env.log.count("close") == env.log.count("open")


@pytest.mark.parametrize("by", ["tool", "respond"])
def test_a_call_may_be_the_last_turn(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    env = Shop(max_turns=1)
    if by == "respond":

        def leave(env: Shop, _: Episode) -> tuple[()]:
            assert env._held is not None
            env._held.end()
            return ()

        monkeypatch.setattr(Shop, "respond", leave)
    for _ in range(2):
        env.reset(seed=0)
        (result,), reward, *ends, info = env.step("```fail\nat the end\n```" if by == "tool" else INSERT)
        assert (result["role"], ends, info) == ("tool", [True, False], {"parts": {"correct": 0.0}})
        assert reward == (0.0 if by == "tool" else 0.01) and env.episode.stop is Stop.TERMINATED
        with pytest.raises(EnvContractError, match="the episode is over"):
            env.step("1")


def test_a_reset_that_is_refused_leaves_the_episode(env: Shop) -> None:
    env.step(INSERT)
    with pytest.raises(UnknownNameError):
        env.reset(options={"task": "no such task"})
    assert env.step("1")[1] == 1.01 and env.log.count("close") == 1
    env.reset()
    assert env.step(COUNT)[0][0]["content"] == "[[0]]", "the next one has another database"


@pytest.mark.slow
@pytest.mark.parametrize("closed", [True, False])
def test_no_thread_is_left_after_close_or_without_the_environment(closed: bool) -> None:
    before = threading.enumerate()
    env = Shop()
    env.reset(seed=0)
    assert workers(before) == 1
    if closed:
        env.close()
    else:
        del env
    while workers(before):
        time.sleep(0.01)


def test_a_state_made_by_a_tool_may_be_used_by_the_next() -> None:
    @tool
    def connect(table: str, ctx: ToolContext) -> None:
        """Connect."""
        ctx.state["db"] = Database(":memory:")
        ctx.state["db"].execute(table)

    class Lazy(Shop):
        tools = (connect, query)
        open_episode = ToolEnv.open_episode

        def close_episode(self, context: ToolContext) -> None:
            context.state["db"].close()

    with closing(Lazy()) as env:
        env.reset(seed=0)
        assert env.step(f"```connect\ncreate table bags (n int)\n```\n{COUNT}")[0][1]["content"] == "[[0]]"
        assert env.step("0")[1] == 1.0


def test_after_an_overrun_another_thread_goes_on(env: Shop) -> None:
    env.turn_reward = lambda episode: 0.0  # the database stays with the thread that hangs
    assert "longer than 0.2 s" in env.step("```fail overrun ```")[0][0]["content"]
    assert "same thread" in env.step(COUNT)[0][0]["content"]
    env.episode.state["release"].set()


def test_what_the_hooks_raise_names_them() -> None:
    env = Shop()
    env.open_episode = Mock(side_effect=[KeyError("db"), None])
    env.close_episode = Mock(side_effect=KeyError("file"))
    with pytest.raises(EnvContractError, match=r"Shop\.open_episode raised KeyError\('db'\) on task 'train:"):
        env.reset(seed=0)
    env.close()
    assert not env.close_episode.called, "what was not opened is not closed"
    env.reset(seed=0)
    with pytest.raises(EnvContractError, match=r"Shop\.close_episode raised KeyError\('file'\)"):
        env.close()
    env.close()
    assert env.close_episode.call_count == 1


def test_an_environment_without_hooks_and_tools_needs_no_thread() -> None:
    env = ToolEnv()
    env.tasks = lambda split: [Task(id="one", prompt="Where?")]
    env.reward = lambda episode: {"correct": float(threading.current_thread() is threading.main_thread())}
    env.reset(seed=0)
    assert env.step("here")[1] == 1.0


def test_a_played_environment_can_be_copied_and_sent() -> None:
    env: Any = gymnasium.make("agentrl/LinearSystems-v0").unwrapped
    env.reset(seed=3)
    for other in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert other.episode == env.episode and other.task_set[5] == env.task_set[5]
        assert other.step(rf"\boxed{{{env.episode.task.answer}}}")[1] == 1.0
    thread = pickle.loads(pickle.dumps(begun := ToolThread()))
    assert begun.run(threading.get_ident, begin=True) != thread.run(threading.get_ident, begin=True)


def test_a_thread_returns_what_is_returned_and_raises_what_is_raised() -> None:
    thread = ToolThread()
    assert thread.run(threading.get_ident) == threading.get_ident()
    (ident,) = {thread.call(threading.get_ident, 5.0).result() for _ in range(5)}
    assert thread.run(threading.get_ident) == ident != threading.get_ident()
    assert thread.run(lambda: thread.run(threading.get_ident)) == ident
    assert thread.run(lambda: thread.call(threading.get_ident, 5.0).result()) != ident, "it can't wait for itself"
    with pytest.raises(SystemExit):
        thread.run(lambda: exec("raise SystemExit"))
    thread.close()
    thread.close()
    assert thread.run(threading.get_ident) == threading.get_ident()
