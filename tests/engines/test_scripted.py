"""The engine that says what it was told to."""

import asyncio

import pytest
import torch

from agentrl.engines.base import Completion, Engine, Sampling
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import InfrastructureError

STOP = 9


def say(engine: Engine, max_tokens: int = 10) -> Completion:
    return asyncio.run(engine.generate((1, 2), Sampling(max_tokens=max_tokens, stop_ids=(STOP,)), seed=0))


def test_turns_come_in_order_and_end_where_they_stop_or_at_the_limit() -> None:
    turns = [[4, 5, STOP], [4], [], [4, 5, 6, STOP]]
    engine = ScriptedEngine(turns)
    turns[0].insert(0, 7)
    turns.append([8])
    asyncio.run(engine.load_weights([("any", torch.zeros(1))], 5))
    opening, *completions = [say(engine, max_tokens=3) for _ in range(4)]
    assert opening == Completion(token_ids=(4, 5, STOP), logprobs=(0.0, 0.0, 0.0), finish="stop", version=5)
    assert [completion.token_ids for completion in completions] == [(4,), (), (4, 5, 6)]
    assert {completion.finish for completion in completions} == {"length"}
    with pytest.raises(InfrastructureError, match="no more turns"):
        say(engine)
