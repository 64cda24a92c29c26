"""vLLM as the engine: token ids in, ids and log-probs out, computed in processes of its own on a GPU or a CPU.

New weights go the way that ``agentrl.engines.vllm_cards`` chooses: by vLLM's CUDA IPC or NCCL, of which nothing has
been run yet, or through a safetensors file, in memory where ``/dev/shm`` has room. vLLM starts from the folder of that
file, so a vLLM that is started again has the newest weights if they came through it.
"""

import asyncio
import copy
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Coroutine, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.engines import check_cpu_heads
from agentrl.engines.base import Completion, Sampling, check_request
from agentrl.engines.vllm_cards import Copies, choose_backend, engine_cards
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.models.load import ROUNDING

for _name, _value in {
    # Standard output belongs to the command.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # What its processes warn of is not the user's to mend.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    # A fork would copy the locks that PyTorch's threads hold.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}.items():
    os.environ.setdefault(_name, _value)

# Only now, since it reads these variables while it is imported; and so, since pyright takes the name for this file.
_vllm: Any = import_module("vllm")
_sampling: Any = import_module("vllm.sampling_params")
_engine: Any = import_module("vllm.v1.engine.async_llm")
_loggers: Any = import_module("vllm.v1.metrics.loggers")
_platforms: Any = import_module("vllm.platforms")
_transfer: Any = import_module("agentrl.engines.vllm_weights")

_COLDEST = 0.01
"""vLLM would silently sample at this temperature where a lower one is asked for."""
_SHARED = "/dev/shm"
"""Files here are memory."""
_GLANCE_S = 0.5
"""Interval at which a call checks that vLLM's process is alive: vLLM's own call would wait for ever."""
_SILENCE_S = 1800.0
"""Time without a step or an answer after which vLLM's process is ended, since it hangs."""
_ALWAYS: dict[str, Any] = {
    "seed": 0,
    "skip_tokenizer_init": True,
    # Of the distribution that was sampled from, temperature included.
    "logprobs_mode": "processed_logprobs",
    # Else the model's own file may set a penalty or top-k.
    "generation_config": "vllm",
    "enable_prefix_caching": True,
    "worker_extension_cls": "agentrl.engines.vllm_worker.Extension",
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
}
_ON_CPU = {
    # Only complete blocks are cached: with the default of 128 tokens, no prefix of a short prompt would be.
    "block_size": 32,
    # A prompt that is computed in parts would end vLLM's process: a CPU's generator can't take back what was drawn for
    # the first part.
    "enable_chunked_prefill": False,
    # Compiling takes minutes.
    "enforce_eager": True,
}
"""Fields of ``vllm.AsyncEngineArgs``; those before hold on a GPU too."""


class _Watch(_loggers.StatLoggerBase):
    """A logger that vLLM calls after each of its steps."""

    def __init__(self) -> None:
        self.heard = time.monotonic()

    def record(self, *_: object, **__: object) -> None:
        """Note the time: vLLM is alive."""
        self.heard = time.monotonic()

    def log_engine_initialized(self) -> None:
        """Log nothing."""


class VllmEngine:
    """Samples with vLLM.

    An engine serves one event loop. Requests that run while new weights come continue with them, with all keys and
    values computed anew; the versions of a completion say from which token on. If vLLM dies, or hangs for half an hour,
    its requests fail, and the next request starts it again with the newest weights. If it dies once more before it gets
    new weights, it stays dead. With weights that came from GPU to GPU there is nothing to start it with: it stays dead.

    Args:
        model: a causal language model; its configuration and weights are copied.
        slots: most requests that generate at the same time; further ones wait.
        max_length: most tokens of prompt and completion together.
        memory: share of the GPU's memory, or on a CPU of the machine's, for weights, keys and values.
        sleep: let ``sleep`` free the GPU's memory, for a trainer on the same GPU.
        weights_on: device that new weights come on, if it is not the model's.
        options: further fields of ``vllm.AsyncEngineArgs``, such as ``tensor_parallel_size`` and
            ``data_parallel_size`` (its number of GPUs is their product) and ``device_ids`` (which GPUs).

    Raises:
        ConfigError: there are too few GPUs, or vLLM does not start with this model and these options.
    """

    exact = False
    """What is computed beside a request may change its log-probs by rounding, and so a token."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = 64,
        max_length: int = 4096,
        memory: float = 0.3,
        sleep: bool = False,
        weights_on: str = "",
        **options: Any,
    ) -> None:
        config: Any = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        on_cpu = _platforms.current_platform.is_cpu()
        if on_cpu:
            check_cpu_heads(config.get_text_config())
        self._cards = engine_cards(options, 0 if on_cpu else torch.cuda.device_count())
        self._device = torch.device(weights_on or model.device)
        self.backend = choose_backend(self._device, self._cards)
        self._dtype, self._vocab, self._max_length = model.dtype, int(config.vocab_size), max_length
        self.rounding = ROUNDING[model.dtype]
        self._shapes = {name: weights.shape for name, weights in model.named_parameters()}
        # Twice, since new weights are written beside the old ones.
        room = _shared(2 * model.get_memory_footprint())
        self._folder = tempfile.TemporaryDirectory(prefix="agentrl-vllm-", dir=room)
        config.save_pretrained(self._folder.name)
        self._weights = Path(self._folder.name, "model.safetensors")
        self._write(self._checked(model.named_parameters(), "cpu"))
        arguments: dict[str, Any] = {
            "model": self._folder.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_num_seqs": slots,
            "max_model_len": max_length,
            "gpu_memory_utilization": memory,
            "weight_transfer_config": {"backend": self.backend},
            # vLLM refuses it on a CPU, where it ignores the calls.
            "enable_sleep_mode": sleep and not on_cpu,
        }
        # vLLM's own Qwen3 leaves out the bias of attention's output without a word, and our tiny model has one.
        if config.model_type == "qwen3" and config.attention_bias:
            arguments["model_impl"] = "transformers"
        self._arguments = _ALWAYS | arguments | (_ON_CPU if on_cpu else {}) | options
        self._version = 0
        self._may_die, self._closed = True, False
        self._sleeps, self._asleep = sleep, False
        self._copies = Copies(options.get("data_parallel_size", 1))
        self._starting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch = _Watch()
        self._numbers = itertools.count()
        try:
            self._start()
        except (ValueError, TypeError, RuntimeError) as error:
            self._folder.cleanup()
            raise ConfigError(f"vLLM does not start: {' '.join(str(error).split())}") from error

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        """Sample a continuation of ``prompt_ids``; see :class:`agentrl.engines.base.Engine`.

        Raises:
            ConfigError: the prompt is empty or not in the vocabulary, prompt and completion may not fit into
                ``max_length``, the seed is not in [0, 2⁶³), or the temperature lies between 0 and 0.01.
            InfrastructureError: vLLM failed or sleeps, or ended the request before it was complete.
        """
        check_request(prompt_ids, sampling, seed, vocab=self._vocab, max_length=self._max_length)
        if 0 < sampling.temperature < _COLDEST:
            raise ConfigError(f"vLLM can't sample at temperature {sampling.temperature}: use 0, or {_COLDEST} and more")
        if self._asleep:
            raise InfrastructureError("vLLM sleeps: it samples when it has new weights")
        llm, kinds, rank = await self._alive(), _sampling.RequestOutputKind, self._copies.own()
        params = _sampling.SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_ids),
            # Else it stops at the end that the model's configuration names, too.
            ignore_eos=True,
            seed=seed,
            # Of the sampled token and no others.
            logprobs=0,
            detokenize=False,
            output_kind=kinds.FINAL_ONLY if sampling.watch is None else kinds.CUMULATIVE,
        )
        prompt = {"prompt_token_ids": list(prompt_ids)}

        async def sampled() -> tuple[Any, int | None]:
            """Return the completion, and how many of its tokens there are where it is to end before it would."""
            done, heard, end, number = None, 0, None, str(next(self._numbers))
            async for output in llm.generate(prompt, params, number, data_parallel_rank=rank):
                (done,) = output.outputs
                while sampling.watch and end is None and heard < len(done.token_ids):
                    heard += 1
                    if sampling.watch(done.token_ids[heard - 1]):
                        # The last output, which says what weights sampled which token, is still to come.
                        end = heard
                        await llm.abort(number)
            return done, end

        try:
            done, end = await self._answered(llm, sampled())
        except (_engine.EngineDeadError, _engine.EngineGenerateError) as error:
            raise InfrastructureError(f"vLLM failed: {error.__cause__ or error}") from error
        return self._completion(done, end, greedy=sampling.temperature == 0)

    def _completion(self, done: Any, end: int | None, *, greedy: bool) -> Completion:
        if end is None and done.finish_reason not in ("stop", "length"):
            raise InfrastructureError(f"vLLM ended a request before it was complete: {done.finish_reason!r}")
        # Rounding may give a log-prob slightly above 0, which the trainer would refuse.
        pairs = zip(done.token_ids, done.logprobs, strict=True)
        logprobs = tuple(0.0 if greedy else min(0.0, logprob_of[token].logprob) for token, logprob_of in pairs)
        # vLLM calls the weights that it has started from "default".
        (_, version), *swaps = [
            (span.start, self._first if span.version == "default" else int(span.version))
            for span in done.weight_versions
        ]
        return Completion(
            token_ids=tuple(done.token_ids[:end]),
            logprobs=logprobs[:end],
            finish=done.finish_reason if end is None else "stop",
            version=version,
            swaps=tuple(swap for swap in swaps if end is None or swap[0] < end),
        )

    async def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load all weights; requests that are running continue with them, and if vLLM sleeps, it wakes up.

        Raises:
            InfrastructureError: a parameter of the model is missing, a tensor is unknown to it or of another shape, or
                vLLM failed.
        """
        # Not while vLLM starts, which reads that file.
        async with self._starting:
            in_file = self.backend == "file"
            tensors = self._checked(named_tensors, "cpu" if in_file else self._device)
            if in_file:
                self._write(tensors)
            self._version, self._may_die = version, in_file
        llm = await self._alive()
        try:
            if self._asleep:
                torch.cuda.empty_cache()  # the trainer's free memory, which vLLM needs now
                await self._answered(llm, llm.wake_up(["weights"]))
            else:
                # Without a pause a request would be computed with half of the weights. The cache is of the old weights.
                await self._answered(llm, llm.pause_generation(mode="keep", clear_cache=True))
            try:
                await self._answered(llm, asyncio.to_thread(self._send, llm, tensors))
            finally:
                await self._answered(llm, llm.wake_up(["kv_cache"]) if self._asleep else llm.resume_generation())
                self._asleep = False
        except Exception as error:  # what a worker raises arrives as a plain Exception
            if not llm.errored:
                raise InfrastructureError(f"vLLM did not take the weights: {error}") from error
            await self._alive()

    async def sleep(self) -> None:
        """Free the GPU's memory until new weights come, if the engine was made with ``sleep``; requests end first.

        Raises:
            InfrastructureError: vLLM failed.
        """
        if self._sleeps and not self._asleep:
            llm = await self._alive()
            try:
                # Level 2 discards the weights: it wakes up with new ones.
                await self._answered(llm, llm.sleep(2, "wait"))
            except _engine.EngineDeadError as error:
                raise InfrastructureError("vLLM died before it slept") from error
            self._asleep = True

    def _send(self, llm: Any, tensors: Mapping[str, Tensor]) -> None:
        """Send weights; in a thread, since vLLM's trainer side waits for answers that come on the event loop."""
        assert self._loop is not None
        # CUDA's current device is a thread's own.
        with torch.accelerator.device_index(self._device.index):
            if self._transfer is None:
                where = self.backend, self._cards, self._weights
                self._transfer = _transfer.Transfer(llm, self._loop, self._answered, *where)
            self._transfer.send(tensors, self._version)

    def close(self) -> None:
        """End vLLM's processes."""
        if not self._closed:
            self._closed = True
            self._llm.shutdown()
            # Collected while Python ends, it would fail and say so.
            self._llm = None
            self._folder.cleanup()

    def _start(self) -> None:
        # Its processes end with this one. By name, since vLLM's module for workers is for them alone.
        os.environ["AGENTRL_VLLM_OWNER"] = str(os.getpid())
        if self.backend == "ipc":
            # Handles of CUDA's memory are pickled, on their way to processes of our own.
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        arguments = _vllm.AsyncEngineArgs(**self._arguments)
        self._llm: Any = _engine.AsyncLLM.from_engine_args(arguments, stat_loggers=[self._watching])
        self._first, self._transfer, self._asleep = self._version, None, False
        if self._closed:  # meanwhile
            self._llm.shutdown()

    def _watching(self, *_: object) -> _Watch:
        return self._watch

    async def _answered(self, llm: Any, work: Coroutine[Any, Any, Any]) -> Any:
        """Wait for an answer of vLLM's, as long as its process is alive and makes steps.

        Raises:
            EngineDeadError: the process has died, or hangs.
        """
        waiting, began = asyncio.ensure_future(work), time.monotonic()
        try:
            while not (await asyncio.wait([waiting], timeout=_GLANCE_S))[0]:
                if time.monotonic() - max(began, self._watch.heard) > _SILENCE_S:
                    llm.shutdown()
                if llm.errored:
                    raise _engine.EngineDeadError()
            return waiting.result()
        finally:
            waiting.cancel()

    async def _alive(self) -> Any:
        """Return the running vLLM, started again if it has died."""
        loop = asyncio.get_running_loop()
        # vLLM's own tasks are in the first loop: in another one a request would wait for ever.
        if self._loop not in (None, loop):
            raise ConfigError("a vLLM engine serves the event loop of its first request: make an engine for each loop")
        self._loop = loop
        async with self._starting:
            if self._closed:
                raise InfrastructureError("the engine is closed")
            if self._llm.errored:
                if not self._may_die:
                    why = "twice with the same weights" if self.backend == "file" else "and its weights are in no file"
                    raise InfrastructureError(f"vLLM has died {why}: go on from the last checkpoint")
                self._may_die = False
                self._llm.shutdown()
                try:
                    await asyncio.to_thread(self._start)
                except (ValueError, RuntimeError) as error:
                    raise InfrastructureError(f"vLLM died and does not start again: {error}") from error
            return self._llm

    def _checked(self, named_tensors: Iterable[tuple[str, Tensor]], device: str | torch.device) -> dict[str, Tensor]:
        """Copy all weights to a device, in the engine's type, where they have another one; check that all are there."""
        tensors = {name: tensor.detach().to(device, self._dtype).contiguous() for name, tensor in named_tensors}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if wrong := shapes.items() ^ self._shapes.items():
            name = min(name for name, _ in wrong)
            raise InfrastructureError(f"of vLLM's weights {name!r} is missing, unknown or of another shape")
        return tensors

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        written = self._weights.with_suffix(".new")
        save_file(dict(tensors), written)
        written.replace(self._weights)


def _shared(size: int) -> str | None:
    """Return the folder whose files are in memory; None where it has no room for so many bytes."""
    return _SHARED if os.path.isdir(_SHARED) and shutil.disk_usage(_SHARED).free > size else None
