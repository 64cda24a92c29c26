"""Ways to ask an engine, and what a plain forward of the whole row says to its answers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.engines.base import Completion, Sampling
from agentrl.engines.transformers import TransformersEngine
from agentrl.models.tiny import make_model

MakeEngine = Callable[..., TransformersEngine]
PROMPT = (5, 90, 17, 44, 201, 33)


def ragged(count: int) -> list[tuple[int, ...]]:
    return [tuple((7 * i + 13 * j) % 250 + 3 for j in range(1 + (5 * i) % 23)) for i in range(count)]


def together(*requests: Awaitable[Completion]) -> list[Completion]:
    async def gather() -> list[Completion]:
        return list(await asyncio.gather(*requests))

    return asyncio.run(gather())


def outcomes(*requests: Awaitable[Any]) -> list[Any]:
    """What comes of requests that may fail: their completions and errors; none of them waits for ever."""

    async def gather() -> list[Any]:
        async with asyncio.timeout(20):
            return await asyncio.gather(*requests, return_exceptions=True)

    return asyncio.run(gather())


def ask(engine: TransformersEngine, prompt: Sequence[int] = PROMPT, *, seed: int = 0, **sampling: Any) -> Completion:
    return together(engine.generate(tuple(prompt), Sampling(**{"max_tokens": 8, **sampling}), seed=seed))[0]


def model_for_vllm(tokenizer: Any) -> Any:
    # vLLM's kernels for a CPU know no heads narrower than 32.
    made: Any = make_model(tokenizer, hidden=64, layers=2, heads=2, seed=0)
    # Nor does its own Qwen3 know the biases of our tiny model, which tests/train/test_vllm_run.py has.
    made.config.attention_bias = False
    for name, module in made.named_modules():
        if name.endswith("_proj"):
            module.bias = None
    return made


@torch.no_grad()
def full_logp(reference: Any, tokens: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Log-probs of every next token after each of ``tokens`` [n, V], by a plain forward of the whole row."""
    return torch.log_softmax(reference(torch.tensor([tokens])).logits[0].float() / temperature, dim=-1)


def expected_logprobs(reference: Any, prompt: Sequence[int], completion: Completion, temperature: float) -> list[float]:
    logp = full_logp(reference, [*prompt, *completion.token_ids], temperature)[len(prompt) - 1 : -1]
    return logp.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0].tolist()
