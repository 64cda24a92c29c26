"""A policy that speaks a script, and a session of it."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from agentrl.endpoint.server import Endpoint, Ticket
from agentrl.engines.base import Completion, Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.render.renderer import Renderer
from agentrl.rollout.policy import Policy

from ..rollout import test_policy
from ..rollout.test_policy import Prompts, Told, policy_of
from .client import Client

Serve = Callable[..., Any]


class Failing(ScriptedEngine):
    """Raises each of the failures, and then says its turns."""

    def __init__(self, failures: list[Exception], *turns: Sequence[int]) -> None:
        super().__init__(turns)
        self.failures = failures

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        if self.failures:
            raise self.failures.pop()
        return await super().generate(prompt_ids, sampling, seed=seed)


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
    engine = Told([renderer.turn(turn) for turn in turns], wait)
    return engine, policy_of(engine, renderer, 10**7, 10**9, turn_tokens=10**5)


def recorded(policy: Policy) -> Prompts:
    """Return each turn in the record, with all tokens before it."""
    return [(before, token_ids) for _, before, token_ids in test_policy.recorded(policy)]


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
