"""Sessions with random forks, retries, hang-ups and parallel calls: what was delivered is recorded, once."""

import asyncio
import os
import random
from itertools import count
from typing import Any

import httpx2
import pytest

from agentrl.endpoint.server import Endpoint
from agentrl.endpoint.session import Session
from agentrl.engines.base import Completion, Sampling
from agentrl.render.renderer import Renderer

from .client import PATHS, Answered, Body, Client, ask, read_text, result
from .conftest import recorded, scripted

EVERYTHING = os.environ.get("AGENTRL_EVERYTHING") == "1"
SESSIONS = 2000 if EVERYTHING else 200
AT_ONCE = 16
TEXTS = ["Hello.\n", "{x}\n", "<think>Hm.\n</think>", "", " ", "STOP", "é\n", "<tool_call>bad"]


class Noting:
    """Samples random turns token by token, and notes each with its prompt and what it was."""

    exact, rounding = False, 0.0

    def __init__(self, renderer: Renderer, seed: int) -> None:
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._renderer, self._random, self._numbers = renderer, random.Random(seed), count()

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        choose = self._random
        text = "".join(choose.choices(TEXTS, k=choose.randrange(4)))
        # Numbers make most turns different, as they would be.
        text += f"{next(self._numbers)}\n" if choose.random() < 0.8 else ""
        calls = choose.choice([0, 0, 1, 2])
        text += f'<tool_call>{{"name": "python", "arguments": {{"code": "{choose.random()}"}}}}</tool_call>' * calls
        token_ids, finish = list[int](), "length"
        for token in self._renderer.turn(text)[: sampling.max_tokens]:
            token_ids.append(token)
            await asyncio.sleep(0 if choose.random() < 0.98 else 0.002)
            if sampling.ends(token):
                finish = "stop"
                break
        self.sampled.append((prompt_ids, tuple(token_ids)))
        return Completion(token_ids=tuple(token_ids), logprobs=(0.0,) * len(token_ids), finish=finish, version=0)  # pyright: ignore[reportArgumentType]


class Player:
    """A client that does what clients do, at random."""

    def __init__(self, client: Client, seed: int) -> None:
        self.delivered: list[Answered] = []
        self.choose = random.Random(seed)
        self.protocol = self.choose.choice([*PATHS])
        self.client = client

    def ask(self, history: list[Body]) -> Body:
        stop = {"chat": {"stop": ["STOP"]}, "messages": {"stop_sequences": ["STOP"]}, "responses": {}}[self.protocol]
        return ask(self.protocol, history, stream=self.choose.random() < 0.6, **stop)

    async def say(self, body: Body, **headers: str) -> Answered:
        answer = await self.client.say(self.protocol, body, **headers)
        self.delivered.append(answer)
        return answer

    async def play(self, history: list[Body], depth: int = 0) -> None:
        for _ in range(self.choose.randrange(1, 5)):
            kind = self.choose.choices(["go", "hang up", "retry", "parallel", "fork"], [8, 1, 1, 1, 1])[0]
            body = self.ask(history)
            if kind == "hang up":
                asking = asyncio.create_task(self.client.post(self.protocol, body))
                await asyncio.wait([asking], timeout=self.choose.random() * 0.01)
                asking.cancel()
                await asyncio.wait([asking])
                continue
            if kind == "retry":
                attempt = asyncio.create_task(self.client.post(self.protocol, body))
                await asyncio.sleep(self.choose.random() * 0.02)
                retry = asyncio.create_task(self.client.post(self.protocol, body))
                answers = await asyncio.gather(attempt, retry, return_exceptions=True)
                # One has ended the other, whichever came first; a stream that is ended is cut off.
                assert all(isinstance(answer, httpx2.Response | httpx2.TransportError) for answer in answers)
                arrived = [answer for answer in answers if isinstance(answer, httpx2.Response) and answer.is_success]
                self.delivered += [read_text(self.protocol, body, answer.text) for answer in arrived]
                answer = self.delivered[-1]
                assert arrived
            elif kind == "parallel":
                again = {"x-stainless-retry-count": "0"}
                answer, _ = await asyncio.gather(self.say(body, **again), self.say(self.ask(history), **again))
            else:
                answer = await self.say(body)
            if kind == "fork" and depth < 2:
                await self.play([*history, {"role": "user", "content": f"fork {depth}"}], depth + 1)
            results = [result(self.protocol, call_id, "4") for call_id, _, _ in answer.calls]
            history = [*history, *answer.items, *results, {"role": "user", "content": "Go on."}]


async def play(endpoint: Endpoint, renderer: Renderer, number: int) -> dict[str, int]:
    engine, (_, policy) = Noting(renderer, number), scripted(renderer, [])
    vars(policy)["_engine"] = engine
    ticket = endpoint.open(policy, "hermes", number)
    async with Client(endpoint.url, ticket) as client:
        player = Player(client, number)
        await player.play([{"role": "user", "content": f"Task {number}"}])
    await endpoint.close(ticket)
    session: Session = ticket.session
    assert session.fault is None
    turns, sampled = recorded(policy), list(engine.sampled)
    for turn in turns:
        sampled.remove(turn)
    # What was sampled and is not recorded did not arrive; a retry's first attempt may have arrived too.
    assert len(sampled) <= session.counts["never delivered"]
    assert len(player.delivered) <= len(turns) == len(policy.rewards)
    assert not session.counts["edited"]
    return dict(session.counts)


@pytest.mark.slow
def test_what_was_sampled_and_delivered_is_recorded_once(renderer: Renderer, monkeypatch: Any) -> None:
    monkeypatch.setattr("agentrl.endpoint.speech._LOOK_S", 0.001)
    numbers = iter(range(SESSIONS))
    counts = list[dict[str, int]]()

    async def work(endpoint: Endpoint) -> None:
        for number in numbers:
            counts.append(await play(endpoint, renderer, number))

    async def soak() -> None:
        endpoint = Endpoint()
        await endpoint.start()
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work(endpoint))
        await endpoint.stop()

    asyncio.run(soak())
    assert len(counts) == SESSIONS
    for name in ("never delivered", "retried", "requests main"):
        assert sum(count.get(name, 0) for count in counts) > SESSIONS // 20
