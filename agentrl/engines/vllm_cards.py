"""Which GPUs vLLM's workers take, how weights get there from the trainer's, and which copy plays an episode."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from agentrl.errors import ConfigError

Backend = Literal["ipc", "nccl", "file"]
_SIZES = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")


def engine_cards(options: Mapping[str, Any], available: int) -> Sequence[int]:
    """Return the indices of the GPUs that vLLM's workers take; none on a CPU.

    Args:
        options: fields of ``vllm.AsyncEngineArgs``.
        available: number of GPUs; 0 where vLLM computes on a CPU.

    Raises:
        ConfigError: there are not so many.
    """
    workers = prod(options.get(name, 1) for name in _SIZES)
    # A CPU computes several copies of a model, each with a share of the cores, but no parts of one.
    if not available and workers == options.get("data_parallel_size", 1):
        return ()
    cards = options.get("device_ids") or range(workers)
    if len({*cards}) != workers or not {*cards} <= {*range(available)}:
        raise ConfigError(
            f"engine.options asks vLLM for {workers} GPUs ({' x '.join(_SIZES)}), and {available} are here: set "
            f"smaller ones, or device_ids to {workers} of {[*range(available)]}"
        )
    return cards


def choose_backend(weights: torch.device, cards: Sequence[int]) -> Backend:
    """Choose how weights get from a trainer's device to vLLM's workers.

    Args:
        weights: the trainer's device.
        cards: the workers' GPUs.

    Returns:
        "ipc" where the only worker shares the trainer's GPU, "nccl" where the workers have others, "file" elsewhere.
    """
    if weights.type != "cuda" or not cards:
        return "file"
    if weights.index not in cards:
        return "nccl"
    # NCCL takes one process for each GPU, and a handle of IPC serves one GPU.
    return "ipc" if len(cards) == 1 else "file"


class Copies:
    """The copies of a model that a data-parallel vLLM computes with, each with a cache of its own.

    vLLM would send each turn to the copy with the fewest requests, which then computes the turns before it again.

    Args:
        count: number of copies.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._of = WeakKeyDictionary[asyncio.Task[Any], int]()
        """The copy of each episode, which is a task of the event loop."""

    def own(self) -> int | None:
        """Return the copy of the episode that asks, at first one with the fewest episodes; None where one is all."""
        task = asyncio.current_task()
        if self.count == 1 or task is None:
            return None
        if task not in self._of:
            episodes = Counter(self._of.values())
            self._of[task] = min(range(self.count), key=episodes.__getitem__)
        return self._of[task]
