"""Two copies of a model in one vLLM, which sleeps and wakes; and, without it, which GPUs and ways it takes."""

import asyncio
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from agentrl.engines import make_engine
from agentrl.engines.base import Completion, Sampling, Sleeper
from agentrl.engines.vllm_cards import Copies, choose_backend, engine_cards
from agentrl.errors import ConfigError, InfrastructureError

from .asking import expected_logprobs, model_for_vllm

TP, DP = "tensor_parallel_size", "data_parallel_size"


@pytest.mark.parametrize(
    ("options", "available", "device", "wanted"),
    [
        ({}, 1, "cuda:0", ([0], "ipc")),
        ({}, 2, "cuda:1", ([0], "nccl")),
        ({TP: 2}, 3, "cuda:2", ([0, 1], "nccl")),
        ({TP: 2, DP: 2, "device_ids": [4, 5, 6, 7]}, 8, "cuda:0", ([4, 5, 6, 7], "nccl")),
        ({DP: 2}, 2, "cuda:1", ([0, 1], "file")),
        ({}, 1, "cpu", ([0], "file")),
        ({DP: 2}, 0, "cpu", ([], "file")),
        ({TP: 2}, 1, "cuda:0", r"for 2 GPUs \(data_parallel_size x .*\), and 1 are here: set smaller ones"),
        ({DP: 2, "device_ids": [0]}, 4, "cuda:0", r"for 2 GPUs .* or device_ids to 2 of \[0, 1, 2, 3\]"),
        ({"device_ids": [4]}, 4, "cuda:0", "and 4 are here"),
        ({TP: 2}, 0, "cpu", "for 2 GPUs .* and 0 are here"),
    ],
)
def test_which_gpus_vllm_takes_and_how_weights_get_there(
    options: dict[str, Any], available: int, device: str, wanted: Any
) -> None:
    if isinstance(wanted, str):
        with pytest.raises(ConfigError, match=wanted):
            engine_cards(options, available)
    else:
        cards = engine_cards(options, available)
        assert ([*cards], choose_backend(torch.device(device), cards)) == wanted


def test_an_episode_stays_with_its_copy_and_episodes_are_spread() -> None:
    async def episode(copies: Copies) -> list[int | None]:
        before = copies.own()
        await asyncio.sleep(0)
        return [before, copies.own()]

    async def play(copies: Copies) -> list[list[int | None]]:
        return sorted(await asyncio.gather(*(episode(copies) for _ in range(6))))

    assert asyncio.run(play(Copies(3))) == [[0, 0], [0, 0], [1, 1], [1, 1], [2, 2], [2, 2]]
    assert asyncio.run(play(Copies(1))) == [[None, None]] * 6


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_two_copies_play_sleep_and_wake_with_new_weights(
    require: Callable[[bool, str], None], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(find_spec("vllm") is not None, "needs vLLM: pip install 'agentrl[vllm]'")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    model, cached = model_for_vllm(tokenizer), list[tuple[int, int]]()
    options = {"slots": 8, "max_length": 256, "memory": 0.05, DP: 2, "sleep": True}
    engine: Any = make_engine("vllm", model, options)
    assert issubclass(type(engine), Sleeper)
    generate = engine._llm.generate

    async def watched(*args: Any, data_parallel_rank: int) -> Any:
        async for output in generate(*args, data_parallel_rank=data_parallel_rank):
            cached.append((data_parallel_rank, output.num_cached_tokens))
            yield output

    async def episode(number: int) -> list[tuple[tuple[int, ...], Completion]]:
        prompt, turns = tuple(range(3 + number, 80)), list[tuple[tuple[int, ...], Completion]]()
        for turn in range(2):
            done = await engine.generate(prompt, Sampling(max_tokens=24), seed=turn)
            turns.append((prompt, done))
            prompt = (*prompt, *done.token_ids, 9)
        return turns

    async def scenario() -> list[Any]:
        await engine.load_weights(model.named_parameters(), 0)
        before = await asyncio.gather(episode(0), episode(1))
        await engine.sleep()
        with pytest.raises(InfrastructureError, match="vLLM sleeps"):
            await episode(0)
        with torch.no_grad():
            for weights in model.parameters():
                weights += 0.2 * torch.randn(weights.shape)
        await engine.load_weights(model.named_parameters(), 1)
        return [before, await asyncio.gather(episode(0), episode(1))]

    try:
        monkeypatch.setattr(engine._llm, "generate", watched)
        _, after = asyncio.run(scenario())
    finally:
        engine.close()
    assert sorted(cached) == [(rank, tokens) for rank in (0, 1) for tokens in (0, 0, 96, 96)], "no cache of old weights"
    model.set_attn_implementation("eager")
    for prompt, done in (turn for turns in after for turn in turns):
        assert (done.version, done.swaps) == (1, ())
        assert done.logprobs == pytest.approx(expected_logprobs(model, prompt, done, 1.0), abs=1e-4)
