"""The embedded engine: continuous batching over a transformers model, on a CPU or a GPU.

Every request has a slot, a row of the key-value cache. When a turn ends, its slot is *parked*, its cache intact. The
episode's next turn is recognised by its tokens, which begin with the parked ones, and only the new ones are computed. A
step runs new tokens of all active slots through the model at once: one token for slots that generate, and up to
``CHUNK`` of a prompt or tool answer for slots that join, so that a long one takes several steps and holds up nobody.

Legend: B active slots, d hidden size.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from agentrl.engines.base import Completion, Sampling, check_request
from agentrl.engines.eager import EagerStep
from agentrl.engines.native.step import NativeStep
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.models.attention import NAME
from agentrl.models.load import ROUNDING
from agentrl.native import Unavailable

CHUNK = 512
"""Most new tokens of a slot that a step runs."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    done: "asyncio.Future[Completion]"
    sampled: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    """Version of the weights that sampled each of them."""


@dataclass(slots=True, kw_only=True)
class _Slot:
    cached: list[int] = field(default_factory=list[int])
    """Tokens whose keys and values are cached."""
    new: list[int] = field(default_factory=list[int])
    """Tokens to run through the model in the next steps."""
    request: _Request | None = None
    used_at: int = 0
    """Step in which the slot was last active: the least recently used one is evicted first."""


class TransformersEngine:
    """Samples from ``model`` with continuous batching.

    Args:
        model: a causal language model loaded with ``attn_implementation="agentrl"``; the engine owns it.
        slots: most requests that generate at the same time; further ones wait.
        max_length: most tokens of prompt and completion together.
        native: on a CPU compute in C where that can be (``agentrl.engines.native``), and by PyTorch elsewhere.

    Raises:
        ConfigError: the model was loaded with another attention implementation, or ``slots`` is below 1.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int = 64, max_length: int = 4096, native: bool = True) -> None:
        config: Any = model.config
        if config._attn_implementation != NAME:
            raise ConfigError(f"load the engine's model with attn_implementation={NAME!r}")
        if slots < 1:
            raise ConfigError(f"slots is {slots}: an engine needs at least one to generate anything")
        if max_length < 1:
            raise ConfigError(f"max_length is {max_length}: an engine needs room for at least one token")
        self._shapes = {name: weight.shape for name, weight in model.named_parameters()}
        # Noise comes from seed and position. On a CPU a row's sums do not depend on the other rows either; a GPU's
        # products are summed in an order that follows their number.
        self.exact = model.device.type == "cpu"
        self.rounding = ROUNDING[model.dtype]
        self._max_length = max_length
        self._vocab: int = config.vocab_size
        self._slots = [_Slot() for _ in range(slots)]
        self._compute, self.step = _step(model.eval(), slots, max_length, native)
        self._waiting: list[_Request] = []
        self._worker: asyncio.Task[None] | None = None
        self._version = 0
        self._steps = 0
        self.computed_tokens = 0
        """Tokens run through the model so far: prompts, tool answers and samples."""

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, *, seed: int) -> Completion:
        """Sample a continuation of ``prompt_ids``; see :class:`agentrl.engines.base.Engine`.

        Raises:
            ConfigError: the prompt is empty or not in the vocabulary, prompt and completion may not fit into
                ``max_length``, or the seed is not in [0, 2⁶³).
            InfrastructureError: the model failed, for example out of memory.
        """
        check_request(prompt_ids, sampling, seed, vocab=self._vocab, max_length=self._max_length)
        loop = asyncio.get_running_loop()
        request = _Request(prompt=prompt_ids, sampling=sampling, seed=seed, done=loop.create_future())
        self._waiting.append(request)
        # A worker that never ended would outlive the event loop that it was made in.
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return await request.done

    async def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights in, between two steps, and drop all cached keys and values.

        Requests under way continue with the new weights; the keys and values of all their tokens are computed anew.

        Raises:
            InfrastructureError: a tensor is unknown to the model or of another shape.
        """
        # Dropped first, since a load that fails half-way must not leave keys and values of other weights.
        self._forget()
        for name, tensor in named_tensors:
            if self._shapes.get(name) != tensor.shape:
                raise InfrastructureError(f"the engine's model has no parameter {name!r} {list(tensor.shape)}")
            self._compute.take(name, tensor)
        self._version = version

    def close(self) -> None:
        """Drop all cached keys and values; pending requests fail."""
        self._fail(InfrastructureError("the engine is closed"))

    async def _work(self) -> None:
        try:
            while self._waiting or any(slot.request for slot in self._slots):
                self._drop_cancelled()
                self._admit()
                self._step()
                # A step blocks the loop: in between, finished turns go to their environments and new requests come in.
                await asyncio.sleep(0)
        except Exception as error:  # a step serves all requests: each fails, with the cause
            self._fail(error)

    def _forget(self) -> None:
        """Drop all cached keys and values, and their memory; those of requests under way are to be computed again."""
        for slot in self._slots:
            slot.cached, slot.new = [], slot.cached + slot.new
        self._compute.forget()

    def _fail(self, error: Exception) -> None:
        requests = [*self._waiting, *(slot.request for slot in self._slots if slot.request)]
        self._waiting = []
        # A step that failed may have written some layers' keys and values and not others.
        self._forget()
        for slot in self._slots:
            slot.request, slot.new = None, []
        for request in requests:
            if not request.done.done():
                request.done.set_exception(InfrastructureError(f"the engine failed: {error!r}"))

    def _drop_cancelled(self) -> None:
        """Drop requests whose caller was cancelled; their slots are parked with what they have computed."""
        self._waiting = [request for request in self._waiting if not request.done.done()]
        for slot in self._slots:
            if slot.request and slot.request.done.done():
                slot.request = None

    def _admit(self) -> None:
        """Assign waiting requests to slots: the one with the longest cached prefix, else the least recently used."""
        if not self._waiting:
            return
        idle = [index for index, slot in enumerate(self._slots) if slot.request is None]
        for request in list(self._waiting):
            if not idle:
                return
            prompt = list(request.prompt)
            own = [index for index in idle if self._continues(index, prompt)]
            if own:
                best = max(own, key=lambda index: len(self._slots[index].cached))
            # The rest of a group waits until the prompt, which is computed once, can be copied.
            elif self._prompt_under_way(request.prompt):
                continue
            else:
                best = min(idle, key=lambda index: self._slots[index].used_at)
                self._slots[best].cached = self._shared_prompt(request.prompt, best)
            idle.remove(best)
            slot = self._slots[best]
            slot.request, slot.new = request, list(request.prompt[len(slot.cached) :])
            self._waiting.remove(request)

    def _continues(self, index: int, prompt: list[int]) -> bool:
        """Return True if a prompt continues the tokens that a slot has cached."""
        cached = self._slots[index].cached
        # An empty slot begins nothing, and at least one token of a prompt must be run to sample the next.
        return 0 < len(cached) < len(prompt) and _begins_with(prompt, cached)

    def _prompt_under_way(self, prompt: tuple[int, ...]) -> bool:
        """Return True if this very prompt is being computed for another request."""
        # A slot with one token to run has copied the rest, or samples already.
        return any(slot.request and slot.request.prompt == prompt and len(slot.new) > 1 for slot in self._slots)

    def _shared_prompt(self, prompt: tuple[int, ...], target: int) -> list[int]:
        """Copy a prompt's keys and values from a slot that has computed them; return the copied tokens."""
        # Without the last token, which must go through the model again: the first sample needs its hidden state.
        wanted = list(prompt[:-1])
        holders = (index for index, slot in enumerate(self._slots) if _begins_with(slot.cached, wanted))
        if (source := next(holders, None)) is None:
            wanted, source = [], target
        self._compute.copy_prefix(source, target, len(wanted))
        return wanted

    def _step(self) -> None:
        """Run every active slot's new tokens through the model and sample one token for each slot."""
        active = [index for index, slot in enumerate(self._slots) if slot.request]
        if not active:
            return
        slots = [self._slots[index] for index in active]
        new = [slot.new[:CHUNK] for slot in slots]
        self.computed_tokens += sum(map(len, new))
        hidden = self._compute.forward(active, [len(slot.cached) for slot in slots], new)
        self._steps += 1
        for slot in slots:
            slot.cached += slot.new[:CHUNK]
            slot.new, slot.used_at = slot.new[CHUNK:], self._steps
        # Slots whose prompt has been run to its end.
        ready = [index for index, slot in enumerate(slots) if not slot.new]
        if ready:
            self._sample(hidden if len(ready) == len(slots) else hidden[ready], [slots[index] for index in ready])

    def _finish_if_done(self, slot: _Slot, request: _Request) -> None:
        stopped = request.sampling.ends(request.sampled[-1])
        if stopped or len(request.sampled) == request.sampling.max_tokens:
            slot.request = None
            request.done.set_result(
                Completion(
                    token_ids=tuple(request.sampled),
                    logprobs=tuple(request.logprobs),
                    finish="stop" if stopped else "length",
                    version=request.versions[0],
                    swaps=tuple(
                        (index, new)
                        for index, (old, new) in enumerate(pairwise(request.versions), start=1)
                        if new != old
                    ),
                )
            )

    def _sample(self, hidden: Tensor, slots: list[_Slot]) -> None:
        """Sample a token for each slot from its last hidden state [B, d]."""
        requests = [request for slot in slots if (request := slot.request)]
        tokens, logprobs = self._compute.sample(
            hidden,
            [request.sampling.temperature for request in requests],
            [request.seed for request in requests],
            [len(request.sampled) for request in requests],
        )
        for slot, request, token, logprob in zip(slots, requests, tokens, logprobs, strict=True):
            # It has no keys and values yet: it gets them when the next step, or turn, runs it.
            slot.new = [token]
            request.sampled.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self._version)
            self._finish_if_done(slot, request)


def _step(model: PreTrainedModel, slots: int, max_length: int, native: bool) -> tuple[NativeStep | EagerStep, str]:
    """Return the code that computes the steps, and its name."""
    why = ""
    if native and model.device.type == "cpu":
        try:
            step = NativeStep(model, slots, max_length)
        except Unavailable as reason:
            why = f", since {reason}"
        else:
            return step, step.name
    return EagerStep(model, slots), EagerStep.name + why


def _begins_with(tokens: list[int], beginning: list[int]) -> bool:
    length = len(beginning)
    # The last token differs in most cases: its comparison saves the copy for comparing all tokens.
    return tokens[length - 1 : length] == beginning[-1:] and tokens[:length] == beginning
