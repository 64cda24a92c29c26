"""The policy records what was sampled, however a driver rewrites the history that it shows."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, ClassVar

import gymnasium
import pytest

import agentrl
from agentrl.engines.base import Completion, Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import TokenLimitError
from agentrl.render.renderer import Renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.player import EpisodeLimits, Player
from agentrl.rollout.policy import Policy
from agentrl.segments import complete_rows
from agentrl.toolenv.base import Episode, ToolEnv
from agentrl.types import Message, Stop, Task

from .conftest import ANSWER, CALL, collect, only, python, specs

OPENING = (Message(role="system", content="Be brief."), Message(role="user", content="2+2?"))
Prompts = list[tuple[tuple[int, ...], tuple[int, ...]]]


class Told(ScriptedEngine):
    """A script that notes each prompt with the turn that it got."""

    def __init__(self, turns: Sequence[Sequence[int]], wait: float = 0.0) -> None:
        super().__init__(turns)
        self.asked: Prompts = []
        self.wait = wait

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        done = await super().generate(prompt_ids, sampling, seed=seed)
        await asyncio.sleep(self.wait * len(self.turns))
        self.asked.append((prompt_ids, done.token_ids))
        return done


def policy_of(
    engine: Any, renderer: Renderer, episode_tokens: int = 2000, total_tokens: int = 0, turn_tokens: int = 500
) -> Policy:
    bounds = EpisodeLimits(episode_tokens=episode_tokens, total_tokens=total_tokens)
    player = Player(limits=bounds, threads=ThreadPoolExecutor(1))
    spec = EpisodeSpec(task_id="t", seed=5)
    return Policy(engine, renderer, spec, Sampling(max_tokens=turn_tokens), player)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


def tool(text: str, number: int = 0) -> Message:
    return Message(role="tool", content=text, name="python", tool_call_id=f"call{number:05}")


def recorded(policy: Policy) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Return each turn in the record: its number, all tokens before it, and its own."""
    rows = policy.rows()
    turns: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    for row, token_ids in zip(rows, complete_rows(rows), strict=True):
        end = row.fork
        for segment in row.segments:
            begin, end = end, end + len(segment.token_ids)
            if segment.trained:
                number = len(turns) if segment.turn is None else segment.turn
                turns.append((number, token_ids[:begin], token_ids[begin:end]))
    return turns


def check(policy: Policy, asked: Prompts) -> None:
    """Each turn is owned once, in the row that begins with its very prompt; numbers are the order of their ends."""
    assert sorted(recorded(policy)) == [(number, *pair) for number, pair in enumerate(asked)]


def test_a_history_that_only_grows_is_one_row(renderer: Renderer) -> None:
    engine = Told([renderer.turn(CALL), renderer.turn(CALL), renderer.turn(ANSWER)])
    policy = policy_of(engine, renderer)
    messages = [*OPENING]

    async def play() -> None:
        for number in range(3):
            text = await policy.turn(messages)
            messages.extend([assistant(text), tool(str(number), number)])

    asyncio.run(play())
    (row,) = policy.rows()
    assert not policy.forks and [segment.turn for segment in row.segments if segment.trained] == [None] * 3
    check(policy, engine.asked)


def test_rewritten_histories_fork_where_they_part(renderer: Renderer) -> None:
    turns = [renderer.turn(text) for text in (CALL, ANSWER, "Other.", "Again.", "Sub.", "Late.")]
    engine = Told(turns)
    policy = policy_of(engine, renderer)

    async def play() -> None:
        call = assistant(await policy.turn(OPENING))
        answer = assistant(await policy.turn([*OPENING, call, tool("4")]))
        # A branch, the same history once more, one that begins anew with an own turn in it, and a foreign turn.
        assert await policy.turn([*OPENING, call, tool("four")]) == "Other."
        assert await policy.turn([*OPENING, call, tool("4")]) == "Again."
        assert await policy.turn([Message(role="user", content="Summary."), call, tool("4")]) == "Sub."
        assert await policy.turn([*OPENING, assistant("Never sampled."), Message(role="user", content="?")]) == "Late."
        assert policy.forks == {"branch": 1, "again": 1, "anew": 2}
        assert answer["content"] == ANSWER

    asyncio.run(play())
    rows = policy.rows()
    assert [(row.parent, row.fork > 0) for row in rows] == [
        (None, False),
        (0, True),
        (0, True),
        (None, False),
        (None, False),
    ]
    anew = [segment.token_ids for segment in rows[3].segments if not segment.trained]
    assert tuple(turns[0]) in anew, "an own turn is its sampled tokens, also behind another prefix"
    assert rows[3].segments[-1].trained and sum(segment.trained for segment in rows[3].segments) == 1
    check(policy, engine.asked)


@pytest.mark.parametrize("seed", range(20))
def test_any_driver_is_recorded_exactly(renderer: Renderer, seed: int) -> None:
    rng = random.Random(seed)
    engine = Told([renderer.turn(f"{CALL}\n{rng.random()}" if rng.random() < 0.6 else CALL) for _ in range(12)])
    policy = policy_of(engine, renderer)

    async def play() -> None:
        histories: list[list[Message]] = [[*OPENING]]
        for number in range(12):
            history = [*rng.choice(histories)]
            if rng.random() < 0.3 and len(history) > 3:
                cut = rng.randrange(2, len(history))
                history = [
                    *history[:cut],
                    *[Message(role="user", content="Go on.")][: history[cut - 1]["role"] == "assistant"],
                ]
            if rng.random() < 0.2:
                history = [Message(role="user", content=f"Summary {number}."), *history[2:]]
            histories.append([*history, assistant(await policy.turn(history)), tool(str(number), number)])

    asyncio.run(play())
    check(policy, engine.asked)


def test_turns_that_run_side_by_side_are_numbered_by_their_ends(renderer: Renderer) -> None:
    engine = Told([renderer.turn(text) for text in ("One.", "Two.", "Three.")], wait=0.02)
    policy = policy_of(engine, renderer)

    async def play() -> None:
        tasks = [[*OPENING], [Message(role="user", content="Other.")], [*OPENING]]
        assert await asyncio.gather(*map(policy.turn, tasks)) == ["One.", "Two.", "Three."]

    asyncio.run(play())
    texts = {renderer.text(s.token_ids): s.turn for row in policy.rows() for s in row.segments if s.trained}
    assert texts == {"Three.": 0, "Two.": 1, "One.": 2}
    check(policy, engine.asked)


def test_rows_and_the_episode_have_limits_of_tokens(renderer: Renderer) -> None:
    prompt = len(renderer.prompt(OPENING).token_ids)
    engine = Told([renderer.turn(ANSWER)] * 5)
    policy = policy_of(engine, renderer, episode_tokens=prompt + 60, total_tokens=2 * prompt + 20)

    async def play() -> None:
        assert await policy.turn(OPENING) == ANSWER
        with pytest.raises(TokenLimitError):
            await policy.turn([*OPENING, assistant(ANSWER), Message(role="user", content="long " * 60)])
        other = Message(role="user", content="2+3?")
        assert str(await policy.turn([OPENING[0], other]))
        with pytest.raises(TokenLimitError):
            await policy.turn([Message(role="user", content="2+5? Say it in other words.")])

    asyncio.run(play())
    assert len(policy.rows()) == 2
    check(policy, engine.asked)


class Graded(ToolEnv):
    """Pays a half for an episode that was truncated, after asking a judge."""

    tools = (agentrl.tool(python),)
    stops: ClassVar[list[Stop | None]] = []

    def tasks(self, split: str) -> list[Task]:
        return [Task(id="sum", prompt="2+2?", answer="4")]

    async def reward(self, episode: Episode) -> Mapping[str, float]:
        await asyncio.sleep(0)
        self.stops.append(episode.stop)
        return {"correct": 1.0 if episode.stop is Stop.TERMINATED else 0.5}

    def respond(self, episode: Episode) -> tuple[Message, ...]:
        return (Message(role="user", content="long " * 200),)


def test_every_end_is_graded_also_by_who_waits(renderer: Renderer, clean_registry: None) -> None:
    gymnasium.register("tests/Graded-v0", entry_point=Graded)  # pyright: ignore[reportArgumentType]
    Graded.stops.clear()
    limits = EpisodeLimits(episode_tokens=400)
    with closing(Collector({"": ("tests/Graded-v0", {})}, renderer, limits=limits)) as collector:
        answered = only(collect(collector, specs("sum"), ANSWER))
        full = only(collect(collector, specs("sum"), CALL, ANSWER))
    assert (answered.stop, answered.rewards, answered.parts) == (Stop.TERMINATED, (1.0,), {"correct": 1.0})
    assert (full.stop, full.rewards, full.parts) == (Stop.TOKEN_LIMIT, (0.5,), {"correct": 0.5})
    assert Graded.stops == [Stop.TERMINATED, Stop.TOKEN_LIMIT]


async def test_an_episode_whose_turns_were_all_cancelled_has_a_row(renderer: Renderer) -> None:
    policy = policy_of(Told([renderer.turn("late"), renderer.turn("x")], wait=100), renderer)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(policy.turn([Message(role="user", content="Hello.")]), 0.1)
    (row,) = policy.rows()
    assert [segment.source for segment in row.segments] == ["prompt"] and not policy.rewards
