"""Run a decoder's step in C: the rows' memory, new tokens through the model, and samples.

Legend: T new tokens end to end, B rows, d hidden size.
"""

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from agentrl.engines.native.weights import LANES, Asking, Weights
from agentrl.native import Unavailable
from agentrl.native.build import Library, library

_TOLERANCE = 1e-4
"""Largest difference of a hidden state from the model's own, in standard deviations of theirs."""
_CHECKED = (53, 37)
"""Lengths of the rows that are compared; no multiple of any vector."""
FEWEST = 64
"""Fewest tokens that a row has memory for."""


class NativeStep:
    """Computes steps of ``model`` in C.

    Args:
        model: a causal language model loaded with ``attn_implementation="agentrl"``.
        rows: rows of the cache.
        max_length: most tokens of a row.

    Raises:
        Unavailable: there is no compiler, or the step in C does not compute this model.
    """

    def __init__(self, model: Any, rows: int, max_length: int) -> None:
        if model.device.type != "cpu" or model.dtype != torch.float32:
            kind = str(model.dtype).removeprefix("torch.")
            raise Unavailable(f"it computes float32 on a CPU, and the model is {kind} on {model.device.type}")
        compiled = library()
        self._calls, self._threads = compiled.calls, torch.get_num_threads()
        self.name = f"native {compiled.digest}"
        """Name in a run's record: the bits follow from the digest."""
        self._weights, self._width = _checked_weights(compiled, model, max_length), model.config.hidden_size
        self._model = ctypes.byref(self._weights.c)
        self._rows, self._max_length = rows, max_length
        self.forget()

    def take(self, name: str, weight: Tensor) -> None:
        """Copy a weight in, by the name that the model has for it."""
        self._weights.take(name, weight)

    def forget(self) -> None:
        """Drop all cached keys and values, and their memory."""
        self._memory: list[Tensor | None] = [None] * self._rows
        self._capacity = [0] * self._rows

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Replace all of one row by the first ``length`` cached tokens of another, or of its own."""
        if source != target and length:
            self._reserve(target, length, 0)
            self._copy(source, self._memory[target], self._capacity[target], length)

    def forward(self, rows: Sequence[int], cached: Sequence[int], new: Sequence[Sequence[int]]) -> Tensor:
        """Run new tokens of ``rows``, which hold ``cached`` tokens each; the last hidden state of each row [B, d].

        Raises:
            MemoryError: there is no memory for it.
        """
        counts = [len(tokens) for tokens in new]
        for row, have, count in zip(rows, cached, counts, strict=True):
            if have + count > self._capacity[row]:
                self._reserve(row, have + count, have)
        positions = chain.from_iterable(range(have, have + count) for have, count in zip(cached, counts, strict=True))
        addresses = [memory.data_ptr() if (memory := self._memory[row]) is not None else 0 for row in rows]
        capacities = [self._capacity[row] for row in rows]
        hidden = _forward(
            self._calls, self._model, self._width, self._threads,
            array("q", chain.from_iterable(new)), array("q", positions),
            array("Q", _repeated(addresses, counts)), array("q", _repeated(capacities, counts)),
        )  # fmt: skip
        if len(hidden) == len(counts):
            return hidden
        return hidden[torch.tensor(counts).cumsum(0) - 1]

    def sample(
        self, hidden: Tensor, temperatures: Sequence[float], seeds: Sequence[int], counters: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        """Sample a token for each hidden state; see :meth:`agentrl.engines.eager.EagerStep.sample`.

        Raises:
            MemoryError: there is no memory for it.
        """
        count, hidden = len(hidden), hidden.contiguous()
        tokens, logprobs = array("q", bytes(8 * count)), array("f", bytes(4 * count))
        inputs = array("f", temperatures), array("q", seeds), array("q", counters)
        self._calls.use_threads(ctypes.c_int64(self._threads))
        if self._calls.sample(
            self._model, ctypes.c_int64(count), ctypes.c_void_p(hidden.data_ptr()),
            *map(_address, (*inputs, tokens, logprobs)),
        ):  # fmt: skip
            raise MemoryError("there is no memory for the logits")
        return tokens.tolist(), logprobs.tolist()

    def _reserve(self, row: int, length: int, keep: int) -> None:
        """Make room for ``length`` tokens of a row, and keep its first ones."""
        # A row grows by half at least, so that the sum of all copies is proportional to its final size.
        more = min(self._capacity[row] * 3 // 2, self._max_length)
        capacity = _padded(max(length, more, FEWEST))
        memory = self._weights.room(capacity)
        if keep:
            self._copy(row, memory, capacity, keep)
        self._memory[row], self._capacity[row] = memory, capacity

    def _copy(self, source: int, target: Tensor | None, capacity: int, length: int) -> None:
        held = self._memory[source]
        assert held is not None and target is not None
        self._calls.copy_prefix(
            self._model, ctypes.c_void_p(held.data_ptr()), ctypes.c_int64(self._capacity[source]),
            ctypes.c_void_p(target.data_ptr()), ctypes.c_int64(capacity), ctypes.c_int64(length),
        )  # fmt: skip


def _forward(
    calls: ctypes.CDLL, model: Any, width: int, threads: int, tokens: "array[int]", *places: "array[int]"
) -> Tensor:
    """Call step.c's forward; the hidden states [T, d]."""
    hidden = torch.empty(len(tokens), width)
    calls.use_threads(ctypes.c_int64(threads))
    if calls.forward(
        model, ctypes.c_int64(len(tokens)), *map(_address, (tokens, *places)), ctypes.c_void_p(hidden.data_ptr())
    ):
        raise MemoryError("there is no memory for a step")
    return hidden


def _address(numbers: "array[Any]") -> ctypes.c_void_p:
    return ctypes.c_void_p(numbers.buffer_info()[0])


def _repeated(values: Sequence[int], counts: Sequence[int]) -> list[int]:
    if sum(counts) == len(counts):
        return list(values)
    return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]


def _padded(length: int) -> int:
    return -(-length // LANES) * LANES


@torch.no_grad()
def _checked_weights(compiled: Library, model: Any, max_length: int) -> Weights:
    """Read a model's weights, and compare what the step makes of them with the model's own forward pass.

    Raises:
        Unavailable: the model is laid out in another way, or the two differ.
    """
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (sum(_CHECKED),), generator=random)
    at = torch.cat([torch.arange(length) for length in _CHECKED])
    asking = Asking(torch.tensor([0, _CHECKED[0], sum(_CHECKED)]))
    try:
        with torch.inference_mode():
            options = {"input_ids": tokens[None], "position_ids": at[None], "use_cache": False}
            true: Tensor = model.base_model(**options, agentrl_plan=asking).last_hidden_state[0]
        for interleaved in (False, True):
            positions = max(max_length, sum(_CHECKED))
            weights = Weights(compiled, model, asking.seen, positions=positions, interleaved=interleaved)
            rows = [weights.room(_padded(length)) for length in _CHECKED]
            hidden = _forward(
                compiled.calls, ctypes.byref(weights.c), model.config.hidden_size, 1,
                array("q", tokens.tolist()), array("q", at.tolist()),
                array("Q", _repeated([row.data_ptr() for row in rows], _CHECKED)),
                array("q", _repeated([_padded(length) for length in _CHECKED], _CHECKED)),
            )  # fmt: skip
            if torch.allclose(hidden, true, atol=_TOLERANCE * float(true.std()), rtol=_TOLERANCE):
                return weights
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        # A model of another make lacks some part, or has it in another shape.
        raise Unavailable(f"{type(model).__name__} is laid out in another way: {error}") from error
    raise Unavailable(f"it computes another function than {type(model).__name__}")
