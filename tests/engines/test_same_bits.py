"""On a CPU a request's log-probs are the same to the last bit, whatever runs beside it and whatever was parked."""

import asyncio
import copy
import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from agentrl.engines.base import Completion, Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.models.attention import NAME
from agentrl.models.linear import use_fast_linear

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"vocab_size": 300, "num_hidden_layers": 2, "num_attention_heads": 4}
NARROW = {**SIZES, "hidden_size": 64, "intermediate_size": 200, "num_key_value_heads": 2}
CONFIGS = {
    "grouped": Qwen3Config(**NARROW, head_dim=16),
    "biased": Qwen2Config(**NARROW),
    # Widths that fill no vector of the processor, and as many key heads as query heads.
    "odd": LlamaConfig(**SIZES, hidden_size=56, intermediate_size=100, num_key_value_heads=4),
    # Heads as those of larger models have, where the kernels treat few queries in another way.
    "deep": Qwen3Config(**NARROW, head_dim=128),
    "capped": Gemma2Config(**NARROW, head_dim=16, sliding_window=20),
    "windowed": Gemma3TextConfig(**NARROW, head_dim=16, sliding_window=20),
}


def talk(model: Any, slots: int, seed: int, native: bool) -> list[list[Completion]]:
    """Conversations of three turns, in any order and company that ``seed`` and few ``slots`` make."""
    engine = TransformersEngine(copy.deepcopy(model), slots=slots, max_length=2048, native=native)
    assert engine.step.startswith("native ") is native
    order = random.Random(seed)

    async def conversation(number: int) -> list[Completion]:
        words, turns = random.Random(number), list[Completion]()
        tokens = [(7 * number + 13 * i) % 250 + 3 for i in range(1 + 67 * number + 600 * (number > 6))]
        for turn in range(3):
            for _ in range(order.randrange(30)):
                await asyncio.sleep(0)
            sampling = Sampling(max_tokens=3 + words.randrange(6), temperature=0.8)
            turns.append(await engine.generate(tuple(tokens), sampling, seed=10 * number + turn))
            tokens += [*turns[-1].token_ids, *(words.randrange(3, 250) for _ in range(words.randrange(30)))]
        return turns

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*map(conversation, range(8)))

    return asyncio.run(all_of_them())


EAGER = [pytest.param(name, False, marks=pytest.mark.ci if name != "deep" else ()) for name in CONFIGS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "native"), [*((name, True) for name in CONFIGS), *EAGER])
def test_log_probs_have_the_same_bits_in_any_company(request: pytest.FixtureRequest, name: str, native: bool) -> None:
    """Computed in C, and by PyTorch."""
    if native:
        request.getfixturevalue("compiler")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(4 if weights.ndim > 1 else 1)  # so that tokens differ in probability, and rounding shows
    model.set_attn_implementation(NAME)
    use_fast_linear(model)
    conversations = talk(model, slots=64, seed=0, native=native)
    assert sum(len(turn.token_ids) for turns in conversations for turn in turns) > 100
    for slots, seed in ((3, 1), (1, 2)):
        assert talk(model, slots, seed, native) == conversations
