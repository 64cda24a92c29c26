"""The embedded engine: continuous batching over a transformers model, on a CPU or a GPU.

Every request lives in a slot, a row of the key-value cache. When a turn ends its slot stays *parked* with all that it
holds; the episode's next turn is recognised by its tokens, which begin with the parked ones, and only what is new is
computed. A step runs the new tokens of all active slots through the model at once: one token for those that generate,
a whole prompt or tool answer for those that join.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from agentrl.attention import NAME, SlotCache, SlotPlan, padded_keys
from agentrl.engines.base import Completion, Sampling
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.linear import LANES
from agentrl.logits import logits_of
from agentrl.rng import uniforms


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    done: "asyncio.Future[Completion]"
    sampled: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])


@dataclass(slots=True, kw_only=True)
class _Slot:
    cached: list[int] = field(default_factory=list[int])
    """Tokens whose keys and values the slot holds."""
    new: list[int] = field(default_factory=list[int])
    """Tokens to run through the model in the next step."""
    request: _Request | None = None
    used_at: int = 0
    """When the slot was last active, in steps: the longest idle one is given away first."""


class TransformersEngine:
    """Samples from ``model``, many requests at once.

    Args:
        model: a causal language model loaded with ``attn_implementation="agentrl"``; the engine owns its weights.
        slots: requests that generate at the same time; more wait.
        max_length: most tokens of prompt and completion together.

    Raises:
        ConfigError: the model was loaded with another attention implementation, or there is no slot.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int = 64, max_length: int = 4096) -> None:
        config: Any = model.config
        if config._attn_implementation != NAME:
            raise ConfigError(f"load the engine's model with attn_implementation={NAME!r}")
        if slots < 1:
            raise ConfigError(f"slots is {slots}: an engine needs at least one to generate anything")
        self._model = model.eval()
        self._max_length = max_length
        self._vocab: int = config.vocab_size
        self._cache = SlotCache(slots)
        self._slots = [_Slot() for _ in range(slots)]
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
            InfrastructureError: the model failed, for example for want of memory.
        """
        self._check(prompt_ids, sampling, seed)
        loop = asyncio.get_running_loop()
        request = _Request(prompt=prompt_ids, sampling=sampling, seed=seed, done=loop.create_future())
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return await request.done

    def _check(self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int) -> None:
        """Refuse by itself what would break the step that it shares with others."""
        if not prompt_ids:
            raise ConfigError("the prompt is empty: there is nothing to continue")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._vocab:
            raise ConfigError(f"the prompt has tokens outside the model's vocabulary of {self._vocab}")
        if not 0 <= seed < 2**63:
            raise ConfigError(f"the seed {seed} is not in [0, 2⁶³)")
        if len(prompt_ids) + sampling.max_tokens > self._max_length:
            raise ConfigError(
                f"{len(prompt_ids)} prompt tokens and {sampling.max_tokens} new ones exceed the engine's max_length "
                f"of {self._max_length}"
            )

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights in and forget every cached key and value.

        Raises:
            InfrastructureError: requests are still being generated, or a tensor is unknown to the model or of another
                shape.
        """
        self._drop_cancelled()
        if self._waiting or any(slot.request for slot in self._slots):
            raise InfrastructureError("weights can't change while requests are being generated")
        own = dict(self._model.named_parameters())
        for slot in self._slots:
            slot.cached = []
        with torch.no_grad():
            for name, tensor in named_tensors:
                if name not in own or own[name].shape != tensor.shape:
                    raise InfrastructureError(f"the engine's model has no parameter {name!r} {list(tensor.shape)}")
                own[name].copy_(tensor)
        self._version = version

    async def _work(self) -> None:
        try:
            while self._waiting or any(slot.request for slot in self._slots):
                self._drop_cancelled()
                self._admit()
                self._step()
                # Lets finished turns go to their environments and new requests come in.
                await asyncio.sleep(0)
        except Exception as error:  # whatever broke the model breaks every request, each with the cause
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        requests = [*self._waiting, *(slot.request for slot in self._slots if slot.request)]
        self._waiting = []
        for slot in self._slots:
            slot.request, slot.cached, slot.new = None, [], []
        for request in requests:
            if not request.done.done():
                request.done.set_exception(InfrastructureError(f"the engine failed: {error!r}"))

    def _drop_cancelled(self) -> None:
        """Forget requests whose asker is gone; what their slots have computed stays parked."""
        self._waiting = [request for request in self._waiting if not request.done.done()]
        for slot in self._slots:
            if slot.request and slot.request.done.done():
                slot.request = None

    @torch.inference_mode()
    def _admit(self) -> None:
        """Give waiting requests a slot: the one that holds most of their tokens, else the longest idle one."""
        idle = [index for index, slot in enumerate(self._slots) if slot.request is None]
        for request in list(self._waiting):
            if not idle:
                return
            if self._prompt_under_way(request.prompt):
                continue
            own = [index for index in idle if _begins_with(request.prompt, self._slots[index].cached)]
            best = max(own, key=lambda index: len(self._slots[index].cached)) if own else idle[0]
            if not self._slots[best].cached or best not in own:
                best = min(idle, key=lambda index: self._slots[index].used_at)
                self._slots[best].cached = self._shared_prompt(request.prompt, best)
            idle.remove(best)
            slot = self._slots[best]
            slot.request, slot.new = request, list(request.prompt[len(slot.cached) :])
            self._waiting.remove(request)

    def _prompt_under_way(self, prompt: tuple[int, ...]) -> bool:
        """Whether the next step computes this very prompt: group members wait for it and then copy."""
        wanted = list(prompt)
        return any(slot.request is not None and not slot.cached and slot.new == wanted for slot in self._slots)

    def _shared_prompt(self, prompt: tuple[int, ...], target: int) -> list[int]:
        """Copy the keys and values of a prompt that some slot has computed already; what was copied."""
        wanted = list(prompt[:-1])
        for index, other in enumerate(self._slots):
            if wanted and other.cached[: len(wanted)] == wanted:
                self._cache.copy_prefix(index, target, len(wanted))
                return wanted
        return []

    @torch.inference_mode()
    def _step(self) -> None:
        """Run every active slot's new tokens through the model and sample one token for each slot."""
        active = [index for index, slot in enumerate(self._slots) if slot.request]
        if not active:
            return
        if 2 * len(active) <= active[-1]:
            active = self._compact(active)
        tokens, logprobs = self._sample(self._forward(active), active)
        self._steps += 1
        for index, token, logprob in zip(active, tokens, logprobs, strict=True):
            slot = self._slots[index]
            slot.cached += slot.new
            slot.new, slot.used_at = [token], self._steps
            assert slot.request is not None
            slot.request.sampled.append(token)
            slot.request.logprobs.append(logprob)
            self._finish_if_done(slot, slot.request)

    def _finish_if_done(self, slot: _Slot, request: _Request) -> None:
        stopped = request.sampled[-1] in request.sampling.stop_ids
        if stopped or len(request.sampled) == request.sampling.max_tokens:
            slot.request = None
            request.done.set_result(
                Completion(
                    token_ids=tuple(request.sampled),
                    logprobs=tuple(request.logprobs),
                    finish="stop" if stopped else "length",
                    version=self._version,
                )
            )

    def _compact(self, active: list[int]) -> list[int]:
        """Move the active slots to the front, so that the rows behind them cost nothing."""
        order = active + [index for index in range(active[-1] + 1) if self._slots[index].request is None]
        self._cache.move(order, list(range(len(order))))
        self._slots[: len(order)] = [self._slots[index] for index in order]
        return list(range(len(active)))

    def _forward(self, active: list[int]) -> Tensor:
        """Last hidden state of each active slot [B, d]."""
        slots = [self._slots[index] for index in active]
        counts = [len(slot.new) for slot in slots]
        self.computed_tokens += sum(counts)
        plan = self._plan(active, [len(slot.cached) for slot in slots], counts)
        tokens = torch.tensor([token for slot in slots for token in slot.new], device=self._model.device)
        padding = (0, -len(tokens) % LANES)
        out = self._model.base_model(
            input_ids=pad(tokens, padding)[None],
            position_ids=pad(plan.positions, padding)[None],
            use_cache=False,
            agentrl_plan=plan,
        )
        return out.last_hidden_state[0][plan.last]

    def _plan(self, active: list[int], cached: list[int], counts: list[int]) -> SlotPlan:
        ends = [have + count for have, count in zip(cached, counts, strict=True)]
        length, used = padded_keys(max(ends)), active[-1] + 1
        self._cache.reserve(length)
        like = torch.zeros((), dtype=self._model.dtype, device=self._model.device)
        device = like.device
        n = torch.tensor(counts, device=device)
        rows = torch.tensor(active, device=device)
        last = n.cumsum(0) - 1
        single = len(active) == sum(counts)
        final = torch.tensor(ends, device=device) - 1
        mask = like.new_zeros(used, 1, 1, length)
        keys = torch.arange(length, device=device)
        mask[rows, 0, 0] = like.new_zeros(len(active), length).masked_fill_(keys > final[:, None], float("-inf"))
        if single:
            return SlotPlan(
                cache=self._cache, rows=rows, positions=final, last=last, active=rows, used=used, length=length,
                mask=mask,
            )  # fmt: skip
        back = torch.repeat_interleave(last, n) - torch.arange(sum(counts), device=device)
        positions = torch.repeat_interleave(final, n) - back
        long = torch.nonzero(n > 1)[:, 0]
        first = last[long] - n[long] + 1
        offsets = torch.arange(int(n.max()) - 1, device=device)
        inside = offsets < (n[long] - 1)[:, None]
        extra = first[:, None] + torch.where(inside, offsets, 0)
        extra_mask = like.new_zeros(*extra.shape, length).masked_fill_(
            keys > positions[extra][..., None], float("-inf")
        )
        return SlotPlan(
            cache=self._cache, rows=torch.repeat_interleave(rows, n), positions=positions, last=last, active=rows,
            used=used, length=length, mask=mask, extra=extra, extra_rows=rows[long], extra_mask=extra_mask[:, None],
        )  # fmt: skip

    def _sample(self, hidden: Tensor, active: list[int]) -> tuple[list[int], list[float]]:
        requests = [request for index in active if (request := self._slots[index].request)]
        logits = logits_of(self._model, hidden)
        device = logits.device
        temperature = torch.tensor([request.sampling.temperature for request in requests], device=device)
        greedy = temperature == 0.0
        logp = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature)[:, None], dim=-1)
        seeds = torch.tensor([request.seed for request in requests], device=device)
        counters = torch.tensor([len(request.sampled) for request in requests], device=device)
        cdf = logp.exp().double().cumsum(-1)
        # right=True passes over tokens of probability 0; the last step of the cdf is met only by rounding.
        points = uniforms(seeds, counters)[:, None] * cdf[:, -1:]
        chosen = torch.searchsorted(cdf, points, right=True)[:, 0].clamp_(max=logp.shape[1] - 1)
        tokens = torch.where(greedy, logits.argmax(-1), chosen)
        logprobs = torch.where(greedy, 0.0, logp.gather(1, tokens[:, None])[:, 0])
        return tokens.tolist(), logprobs.clamp_(max=0.0).tolist()


def _begins_with(prompt: tuple[int, ...], cached: list[int]) -> bool:
    return len(cached) < len(prompt) and list(prompt[: len(cached)]) == cached
