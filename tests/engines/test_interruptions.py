"""The embedded engine when something comes between: cancelled requests, new weights, and models that break."""

import asyncio
import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.engines.base import Completion, Sampling
from agentrl.errors import InfrastructureError
from agentrl.types import Segment

from .asking import PROMPT, MakeEngine, ask, expected_logprobs, outcomes

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_cancelled_request_disturbs_nobody(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)

    async def scenario() -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate((*PROMPT, n), Sampling(max_tokens=20), seed=n)) for n in range(4)]
        while engine.computed_tokens < 20:
            await asyncio.sleep(0)
        tasks[0].cancel()  # under way
        tasks[3].cancel()  # waiting
        rest = [await tasks[1], await tasks[2]]
        assert tasks[0].cancelled() and tasks[3].cancelled()
        return rest

    for number, completion in zip((1, 2), asyncio.run(scenario()), strict=True):
        alone = ask(make_engine(), (*PROMPT, number), seed=number, max_tokens=20)
        assert completion.token_ids == alone.token_ids
    assert ask(engine, seed=4).token_ids == ask(make_engine(), seed=4).token_ids


def test_weights_can_be_loaded_as_soon_as_the_last_request_is_cancelled(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=1)

    async def scenario() -> None:
        tasks = [asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=20), seed=n)) for n in range(2)]
        while engine.computed_tokens < 10:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await engine.load_weights([], 3)  # before the engine itself has had a turn to notice
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await engine.generate(PROMPT, Sampling(max_tokens=1), seed=0)).version == 3

    asyncio.run(scenario())


def test_an_engine_outlives_an_event_loop_that_was_left_in_the_middle(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)

    async def leave() -> None:
        async with asyncio.timeout(0.02):
            await asyncio.gather(*(engine.generate(PROMPT, Sampling(max_tokens=4000), seed=n) for n in range(3)))

    with pytest.raises(TimeoutError):
        asyncio.run(leave())
    asyncio.run(engine.load_weights([], 1))
    assert ask(engine, seed=4).token_ids == ask(make_engine(), seed=4).token_ids


def new_weights(model: Any) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (name, weights + 0.1 * weights.std().nan_to_num() * torch.randn(weights.shape, generator=generator))
        for name, weights in model.named_parameters()
    ]


def test_new_weights_are_sampled_from_and_nothing_old_is_kept(make_engine: MakeEngine, reference: Any) -> None:
    engine = make_engine()
    answer = ask(engine, seed=1)
    weights = new_weights(reference)
    asyncio.run(engine.load_weights(((name, tensor) for name, tensor in weights), 7))
    changed = copy.deepcopy(reference)
    assert not changed.load_state_dict(dict(weights), strict=False).unexpected_keys
    computed, prompt = engine.computed_tokens, (*PROMPT, *answer.token_ids, 8)
    second = ask(engine, prompt, seed=1)
    assert engine.computed_tokens - computed == len(prompt) + 7, "what the old weights had cached is computed again"
    assert second.logprobs == pytest.approx(expected_logprobs(changed, prompt, second, 1.0), abs=1e-4)
    assert second.logprobs != pytest.approx(expected_logprobs(reference, prompt, second, 1.0), abs=1e-2)
    assert (answer.version, second.version) == (0, 7)


def test_requests_under_way_go_on_with_new_weights_and_no_old_keys(make_engine: MakeEngine, reference: Any) -> None:
    engine, models = make_engine(slots=4), [reference]
    for _ in range(2):
        models.append(copy.deepcopy(models[-1]))
        assert not models[-1].load_state_dict(dict(new_weights(reference)), strict=False).unexpected_keys
        asyncio.run(engine.load_weights(models[-1].named_parameters(), 0))
    asyncio.run(engine.load_weights(reference.named_parameters(), 0))
    # Two groups that share a prompt, more requests than slots, and one that ends before the first swap.
    prompts = [(9,), *((*PROMPT, position // 3) for position in range(6))]

    async def scenario() -> list[Completion]:
        requests = (
            engine.generate(prompt, Sampling(max_tokens=2 if len(prompt) == 1 else 30), seed=seed)
            for seed, prompt in enumerate(prompts)
        )
        tasks = [asyncio.create_task(request) for request in requests]
        for version in (1, 2):
            before = engine.computed_tokens
            while engine.computed_tokens < before + 40:
                await asyncio.sleep(0)
            await engine.load_weights(models[version].named_parameters(), version)
        return await asyncio.gather(*tasks)

    done = asyncio.run(scenario())
    assert {len(answer.swaps) for answer in done} == {0, 2} and {answer.version for answer in done} == {0, 2}
    for prompt, answer in zip(prompts, done, strict=True):
        segment = Segment("policy", answer.token_ids, answer.logprobs, answer.version, swaps=answer.swaps)
        under = [expected_logprobs(model, prompt, answer, 1.0) for model in models]
        wanted = [under[version][position] for position, version in enumerate(segment.token_versions)]
        assert answer.logprobs == pytest.approx(wanted, abs=1e-4), "tokens are of their versions, on their keys"
    assert done[0].version == 0 and not done[0].swaps, "who has ended by then has met the old weights only"


def test_a_closed_engine_leaves_nobody_waiting(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=1)

    async def scenario() -> list[Any]:
        tasks = [asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=60), seed=n)) for n in range(2)]
        await asyncio.sleep(0)
        engine.close()
        engine.close()
        async with asyncio.timeout(20):
            return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(error, InfrastructureError) and "closed" in str(error) for error in asyncio.run(scenario()))


@pytest.mark.parametrize("shape", [None, (1,), (3, 3)])
def test_weights_that_do_not_fit_are_refused(
    make_engine: MakeEngine, model: Any, shape: tuple[int, ...] | None
) -> None:
    engine = make_engine()
    name, right = next(model.named_parameters())
    wrong = ("no.such", right) if shape is None else (name, torch.ones(shape))
    answer = ask(engine, seed=1)
    with pytest.raises(InfrastructureError, match="no parameter"):
        asyncio.run(engine.load_weights([(name, right + 0.1), wrong], 1))
    computed, prompt = engine.computed_tokens, (*PROMPT, *answer.token_ids, 8)
    ask(engine, prompt)
    assert engine.computed_tokens - computed == len(prompt) + 7, "half of the weights are new: the cache is void"


@pytest.mark.parametrize("when", ["at the first step", "in the middle"])
def test_a_model_that_breaks_fails_every_request_and_the_next_ones_work(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    engine = make_engine(slots=2)
    steps, forward = 0, engine._compute.forward

    def out_of_memory(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        if when == "at the first step" or steps == 4:
            raise MemoryError("no room")
        return forward(*arguments)

    ask(engine, seed=3)
    monkeypatch.setattr(engine._compute, "forward", out_of_memory)
    failures = outcomes(*(engine.generate((*PROMPT, n), Sampling(max_tokens=9), seed=n) for n in range(5)))
    assert [type(failure) for failure in failures] == [InfrastructureError] * 5
    assert all("MemoryError('no room')" in str(failure) for failure in failures)
    monkeypatch.undo()
    asyncio.run(engine.load_weights([], 2))
    assert ask(engine, seed=4).token_ids == ask(make_engine(), seed=4).token_ids
