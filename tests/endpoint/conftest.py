"""A policy that speaks a script, and a session of it."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from agentrl.endpoint.server import Endpoint, Ticket
from agentrl.engines.base import Sampling
from agentrl.render.renderer import Renderer
from agentrl.rollout.gate import Gate
from agentrl.rollout.plan import EpisodeSpec
from agentrl.rollout.player import EpisodeLimits, Player
from agentrl.rollout.policy import Policy
from agentrl.segments import complete_rows

from ..rollout.test_policy import Prompts, Told
from .client import Client

Serve = Callable[..., Any]


class Room(NamedTuple):
    """A session that is served, and a client of it."""

    endpoint: Any
    ticket: Ticket
    session: Any
    policy: Any
    engine: Told
    client: Client


def scripted(renderer: Renderer, turns: list[str], *, wait: float = 0.0) -> tuple[Told, Policy]:
    """Return an engine that says ``turns``, and a policy of it without limits that matter here."""
    bounds = EpisodeLimits(episode_tokens=10**7, total_tokens=10**9)
    player = Player(limits=bounds, threads=ThreadPoolExecutor(1), gate=Gate(64, bounds.episode_tokens))
    engine = Told([renderer.turn(turn) for turn in turns], wait)
    return engine, Policy(engine, renderer, EpisodeSpec(task_id="t", seed=5), Sampling(max_tokens=10**5), player)


def recorded(policy: Policy) -> Prompts:
    """Return each turn in the record, with all tokens before it."""
    turns, rows = Prompts(), policy.rows()
    for row, token_ids in zip(rows, complete_rows(rows), strict=True):
        end = row.fork
        for segment in row.segments:
            begin, end = end, end + len(segment.token_ids)
            turns += [(token_ids[:begin], token_ids[begin:end])] if segment.trained else []
    return turns


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a loop of its own."""
    if not inspect.iscoroutinefunction(test := pyfuncitem.obj):
        return None
    options = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(asyncio.wait_for(test(**options), 100))
    return True


@pytest.fixture(scope="session")
def renderer(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer)


@pytest.fixture
def serve(renderer: Renderer) -> Serve:
    """Serve a policy that says the given turns; used by ``async with``."""

    @asynccontextmanager
    async def serving(
        turns: list[str], dialect: str = "hermes", renderer: Renderer = renderer, **options: Any
    ) -> AsyncGenerator[Room]:
        engine, policy = scripted(renderer, turns)
        endpoint = Endpoint(**options)
        await endpoint.start()
        ticket = endpoint.open(policy, dialect, 5)
        async with Client(endpoint.url, ticket) as client:
            yield Room(endpoint, ticket, ticket.session, policy, engine, client)
        await endpoint.close(ticket)
        await endpoint.stop()

    return serving
