"""vLLM as the engine, for real: one is started for all tests of this file, which go by its order."""

import asyncio
import copy
import os
import signal
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from agentrl.engines import CPU_HEADS, make_engine
from agentrl.engines.base import Completion, Sampling
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.models.tiny import make_model

from .asking import PROMPT, expected_logprobs, full_logp, model_for_vllm, ragged

# What vLLM and its packages warn of is not ours to mend.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
NEEDED = "needs vLLM: pip install 'agentrl[vllm]'"
Require = Callable[[bool, str], None]
CLOSE = 1e-4
"""Nats: a hundred times what float32 was seen to explain."""


class Served:
    """An engine, the loop that it serves, and three models of its shape; version n of its weights is the n-th."""

    def __init__(self, tokenizer: Any) -> None:
        made = model_for_vllm(tokenizer)
        made.config.eos_token_id = list(range(100, 200))
        self.models = [changed(made, seed) for seed in range(3)]
        self.runner = asyncio.Runner()
        before = descendants()
        options = {"slots": 16, "max_length": 512, "memory": 0.1}
        self.engine: Any = make_engine("vllm", self.models[0], options)
        self.folder = Path(self.engine._folder.name)
        assert descendants() - before
        for model in self.models:
            model.set_attn_implementation("eager")

    def run(self, *waiting: Awaitable[Any]) -> list[Any]:
        """The results, exceptions too."""

        async def gather() -> list[Any]:
            return list(await asyncio.gather(*waiting, return_exceptions=True))

        return self.runner.run(gather())

    def generate(self, prompt: Sequence[int] = PROMPT, *, seed: int = 0, **sampling: Any) -> Awaitable[Completion]:
        return self.engine.generate(tuple(prompt), Sampling(**{"max_tokens": 8, **sampling}), seed=seed)

    def ask(self, prompt: Sequence[int] = PROMPT, *, seed: int = 0, **sampling: Any) -> Completion:
        (done,) = self.run(self.generate(prompt, seed=seed, **sampling))
        if isinstance(done, BaseException):
            raise done
        return done

    def load(self, version: int) -> None:
        (failed,) = self.run(self.engine.load_weights(self.models[version % 3].named_parameters(), version))
        if failed:
            raise failed

    def expected(self, version: int, prompt: Sequence[int], done: Completion, temperature: float = 1.0) -> list[float]:
        """The log-probs of the completion under one version, by a plain forward of the whole row."""
        return expected_logprobs(self.models[version % 3], prompt, done, temperature)

    def kill(self) -> None:
        """End vLLM's process as a lack of memory would."""
        # The last one that began: one that was closed may still be ending.
        parents = (process for process in psutil.Process().children() if process.children())
        core = max(parents, key=psutil.Process.create_time)
        os.kill(core.pid, signal.SIGKILL)


def changed(model: Any, seed: int) -> Any:
    """The model with other weights, large enough that no two versions give alike log-probs."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.2 * torch.randn(weights.shape, generator=generator)
    return model


def descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_heads_that_it_has_no_kernel_for_are_refused(require: Require, tokenizer: Any) -> None:
    require(find_spec("vllm") is not None, NEEDED)
    words = r"heads of 32, 64, .* not of 16: choose another model, or model\.tiny\.heads"
    with pytest.raises(ConfigError, match=words):
        make_engine("vllm", make_model(tokenizer, hidden=64, layers=1, heads=4, seed=0), {})
    backend: Any = import_module("vllm.v1.attention.backends.cpu_attn")
    assert [*CPU_HEADS] == backend.CPUAttentionBackend.get_supported_head_sizes()


@pytest.fixture(scope="module")
def served(require: Require, tokenizer: Any) -> Generator[Served]:
    require(find_spec("vllm") is not None, NEEDED)
    started = Served(tokenizer)
    yield started
    started.engine.close()
    started.runner.close()


def test_who_watches_sees_each_token_and_ends_the_completion(served: Served) -> None:
    seen = list[int]()
    alone = served.ask(temperature=0.0)
    watched = served.ask(temperature=0.0, watch=lambda token: seen.append(token) or len(seen) == 3)
    assert tuple(seen) == watched.token_ids == alone.token_ids[:3]
    assert (watched.finish, alone.finish, len(watched.logprobs)) == ("stop", "length", 3)
    assert served.ask(temperature=0.0) == alone, "a request that was ended early leaves nothing behind"


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probs_are_those_of_the_distribution_that_was_sampled(served: Served, temperature: float) -> None:
    prompts = ragged(12)
    options = {"temperature": temperature, "max_tokens": 24}
    asked = [served.generate(prompt, seed=n, **options) for n, prompt in enumerate(prompts)]
    for prompt, done in zip(prompts, served.run(*asked), strict=True):
        assert len(done.token_ids) == 24 and done.finish == "length" and (done.version, done.swaps) == (0, ())
        assert done.logprobs == pytest.approx(served.expected(0, prompt, done, temperature), abs=CLOSE)


def test_greedy_tokens_are_the_most_probable_and_have_log_prob_0(served: Served) -> None:
    done = served.ask(temperature=0.0)
    assert done.logprobs == (0.0,) * 8
    assert full_logp(served.models[0], [*PROMPT, *done.token_ids]).argmax(-1).tolist()[5:-1] == list(done.token_ids)


def test_same_seed_same_tokens_alone_and_in_company(served: Served) -> None:
    alone = [served.ask(seed=seed) for seed in (3, 3, 4, 2**63 - 1)]
    assert alone[0] == alone[1] and len({completion.token_ids for completion in alone}) == 3
    crowd = served.run(*(served.generate(seed=seed, max_tokens=8 + seed % 9) for seed in range(12)))
    assert crowd[3].token_ids[:8] == alone[0].token_ids


def test_only_our_stop_ids_end_a_completion(served: Served) -> None:
    long = served.ask(seed=5, max_tokens=400)
    assert len(long.token_ids) == 400 and set(range(100, 200)) & set(long.token_ids)
    stop = long.token_ids[6]
    short = served.ask(seed=5, max_tokens=400, stop_ids=(stop, 299))
    assert short.token_ids == long.token_ids[: long.token_ids.index(stop) + 1] and short.finish == "stop"


@pytest.mark.parametrize(
    ("prompt", "options", "wanted"),
    [
        ((5, 300), {}, "outside the model's vocabulary of 300"),
        ((5, -1), {}, "outside the model's vocabulary"),
        ((), {}, "the prompt is empty"),
        ((5,) * 505, {}, "505 prompt tokens and 8 new ones exceed"),
        ((5,), {"seed": 2**63}, "seed"),
        ((5,), {"temperature": 0.001}, "use 0, or 0.01 and more"),
    ],
)
def test_what_it_can_not_do_is_refused_at_once(served: Served, prompt: Any, options: Any, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        served.ask(prompt, **options)
    assert len(served.ask().token_ids) == 8


def test_another_event_loop_is_refused(served: Served) -> None:
    with pytest.raises(ConfigError, match="make an engine for each loop"):
        asyncio.run(served.engine.generate(PROMPT, Sampling(), seed=0))


def test_prefixes_are_computed_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    cached: list[int] = []
    generate = served.engine._llm.generate

    async def watched(*args: Any, **options: Any) -> Any:
        async for output in generate(*args, **options):
            cached.append(output.num_cached_tokens)
            yield output

    monkeypatch.setattr(served.engine._llm, "generate", watched)
    prompt = tuple(range(3, 80))
    answer = served.ask(prompt)
    served.ask((*prompt, *answer.token_ids, 9))
    assert cached == [0, 64], "all whole blocks of 32 tokens"


def test_more_prompts_at_once_than_fit_into_a_step(served: Served) -> None:
    prompts = [tuple((7 * n + 13 * index) % 250 + 3 for index in range(480)) for n in range(16)]
    done = served.run(*(served.generate(prompt, seed=n) for n, prompt in enumerate(prompts)))
    for prompt, completion in zip(prompts, done, strict=True):
        assert completion.logprobs == pytest.approx(served.expected(0, prompt, completion), abs=CLOSE)


def test_a_cancelled_request_disturbs_nobody(served: Served) -> None:
    async def scenario() -> Completion:
        tasks = [asyncio.create_task(served.generate(seed=n, max_tokens=400)) for n in range(3)]
        other = asyncio.create_task(served.generate(seed=3))
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        return await other

    (done,) = served.run(scenario())
    assert done.token_ids == served.ask(seed=3).token_ids
    assert served.engine._llm.get_num_unfinished_requests() == 0


def test_a_request_that_vllm_ends_itself_is_no_completion(served: Served) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(served.generate(max_tokens=400))
        await asyncio.sleep(0.1)
        await served.engine._llm.abort(str(next(served.engine._numbers) - 1))
        await task

    (failed,) = served.run(scenario())
    assert isinstance(failed, InfrastructureError) and "'abort'" in str(failed)


def test_new_weights_are_sampled_from_and_nothing_old_is_kept(served: Served) -> None:
    prompt = tuple(range(3, 80))
    before = served.ask(prompt, seed=7)
    for version in (1, 2):
        served.load(version)
        done = served.ask(prompt, seed=7, temperature=0.7)
        assert (done.version, done.swaps) == (version, ()) and done.token_ids != before.token_ids
        assert done.logprobs == pytest.approx(served.expected(version, prompt, done, 0.7), abs=CLOSE)


def test_requests_under_way_go_on_with_the_new_weights_from_a_token_that_is_told(served: Served) -> None:
    async def scenario() -> list[Completion]:
        tasks = [asyncio.create_task(served.generate(seed=n, max_tokens=200 + n)) for n in range(3)]
        await asyncio.sleep(0.1)
        await served.engine.load_weights(served.models[0].named_parameters(), 3)
        return await asyncio.gather(*tasks)

    for completion in served.run(scenario())[0]:
        old, ((start, new),) = completion.version, completion.swaps
        assert (old, new) == (2, 3) and 0 < start < 200
        both = [*served.expected(2, PROMPT, completion)[:start], *served.expected(3, PROMPT, completion)[start:]]
        assert completion.logprobs == pytest.approx(both, abs=CLOSE)


@pytest.mark.parametrize("wrong", ["missing", "unknown", "another shape"])
def test_weights_that_do_not_fit_are_refused(served: Served, wrong: str) -> None:
    weights = dict(served.models[1].named_parameters())
    name, tensor = weights.popitem()
    if wrong != "missing":
        weights["no.such" if wrong == "unknown" else name] = tensor[:1]
    (failed,) = served.run(served.engine.load_weights(weights.items(), 9))
    assert isinstance(failed, InfrastructureError) and "missing, unknown or of another shape" in str(failed)
    done = served.ask()
    assert done.version == 3 and done.logprobs == pytest.approx(served.expected(3, PROMPT, done), abs=CLOSE)


def test_a_worker_that_can_not_load_is_an_infrastructure_fault(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.engine, "_write", lambda _: None)
    monkeypatch.setattr(served.engine._transfer, "path", Path("/nowhere"))
    (failed,) = served.run(served.engine.load_weights(served.models[1].named_parameters(), 3))
    assert isinstance(failed, InfrastructureError) and "did not take the weights" in str(failed)
    assert served.ask().version == 3


def test_a_process_that_dies_as_it_takes_weights_is_started_again_with_them(served: Served) -> None:
    llm = served.engine._llm
    load = llm.collective_rpc

    async def dying(*args: Any, **options: Any) -> None:
        served.kill()
        await load(*args, **options)

    async def scenario() -> list[Any]:
        tasks = [asyncio.create_task(served.generate(seed=n, max_tokens=400)) for n in range(3)]
        await asyncio.sleep(0.1)
        llm.collective_rpc = dying
        loading = served.engine.load_weights(served.models[1].named_parameters(), 4)
        return await asyncio.gather(loading, *tasks, return_exceptions=True)

    ((loaded, *failed),) = served.run(scenario())
    assert loaded is None and [type(error) for error in failed] == [InfrastructureError] * 3
    again = served.run(*(served.generate(seed=n) for n in range(3)))
    assert [error.version for error in again] == [4] * 3
    assert again[0].logprobs == pytest.approx(served.expected(4, PROMPT, again[0]), abs=CLOSE)
    served.kill()
    while not served.engine._llm.errored:
        time.sleep(0.1)
    with pytest.raises(InfrastructureError, match="died twice"):
        served.ask()
    served.load(5)
    done = served.ask()
    assert done.version == 5 and done.logprobs == pytest.approx(served.expected(5, PROMPT, done), abs=CLOSE)


def test_a_closed_engine_leaves_nobody_waiting_and_nothing_behind(served: Served) -> None:
    async def scenario() -> list[Any]:
        tasks = [asyncio.create_task(served.generate(seed=n, max_tokens=400)) for n in range(2)]
        await asyncio.sleep(0.1)
        served.engine.close()
        served.engine.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    (failed,) = served.run(scenario())
    assert [type(process) for process in failed] == [InfrastructureError] * 2
    with pytest.raises(InfrastructureError, match="closed"):
        served.ask()
    assert not served.folder.exists()
    # vLLM collects no child that has ended, and one that it has killed takes a moment to end on a busy machine.
    running = [process for process in descendants() if "VLLM" in process.name()]
    assert not psutil.wait_procs(running, timeout=60)[1]
