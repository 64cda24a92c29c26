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


def test_turns_come_in_order_with_log_prob_0() -> None:
    engine = ScriptedEngine([[4, 5, STOP], (6, STOP)])
    opening, second = say(engine), say(engine)
    assert opening == Completion(token_ids=(4, 5, STOP), logprobs=(0.0, 0.0, 0.0), finish="stop", version=0)
    assert second.token_ids == (6, STOP)


def test_a_turn_without_a_stop_token_within_the_limit_has_not_stopped() -> None:
    engine = ScriptedEngine([[4], [], [4, 5, 6, STOP], [4, 5, STOP]])
    completions = [say(engine, max_tokens=3) for _ in range(4)]
    assert [len(completion.token_ids) for completion in completions] == [1, 0, 3, 3]
    assert [completion.finish for completion in completions] == ["length", "length", "length", "stop"]


def test_the_script_is_read_once() -> None:
    turns = [[4, STOP]]
    engine = ScriptedEngine(turns)
    turns[0].insert(0, 7)
    turns.append([8])
    assert say(engine).token_ids == (4, STOP)
    with pytest.raises(InfrastructureError, match="no more turns"):
        say(engine)


def test_a_version_is_taken_over() -> None:
    engine = ScriptedEngine([[STOP]])
    asyncio.run(engine.load_weights([("any", torch.zeros(1))], 5))
    assert say(engine).version == 5
