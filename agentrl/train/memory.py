"""Estimate the memory, tokens and seconds of a run before its model is loaded.

What is counted: weights, gradients, the optimizer's two moments, the engine's copy and its cache, and the average;
where adapters are trained all else is frozen. Measured on small models of the same widths (``probe.py``) are a pack's
activations, and all times. The most that is needed at once is the sum of all parts, in the
backward pass of a later pack of an update.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from agentrl.config import Config, with_overrides
from agentrl.engines.native.step import FEWEST
from agentrl.errors import ConfigError
from agentrl.models.cache import SHORT, padded_keys
from agentrl.models.lora import target_names
from agentrl.models.native import computes
from agentrl.train.probe import Costs, measure, trains_adapters, vocabulary

_CONTEXT = 512 << 20
"""Bytes that a process needs on a GPU before it has a tensor there, about."""
_LATER = 40 << 20
"""Bytes that a run's process takes after its imports for what has no other name, such as a CPU's compiled kernels."""
_HOLES = 12
"""Layers, at most, whose activations a CPU's heap has room for beside the live ones, be these kept or computed again.
PyTorch asks for aligned blocks, and glibc does not give a freed one to the next request of the same size (its bug
14581). Only what it maps by itself, from 32 MiB on (its DEFAULT_MMAP_THRESHOLD_MAX), is given back at once."""
_MAPPED = 32 << 20
_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run needs."""

    memory: Mapping[str, int]
    """Bytes by part, in the order in which a run first asks for them."""
    tokens: int
    """Most tokens of a step, prompts and tool output included."""
    seconds: Mapping[str, float]
    """Seconds of such a step by phase; empty where the run's device is not here."""
    limit: int | None
    """Bytes that there are; None where nobody knows."""
    remedy: str
    """What does not fit first, and the settings that make everything fit; empty where it does."""

    @property
    def total(self) -> int:
        """Bytes needed at once."""
        return sum(self.memory.values())


def needs(config: Config, shape: PreTrainedConfig, limit: int | None = None) -> Needs:
    """Estimate what a run needs, from some seconds of measuring.

    Args:
        config: the run's settings.
        shape: the configuration of its model.
        limit: bytes that the run may use; by default what its device has.

    Raises:
        ConfigError: an option of the engine is no number.
    """
    process = _resident()
    here = _is_here(config.model.device)
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    # Activations are nearly the same on any device, but times are not.
    costs = measure(config, shape, config.model.device if here else "cpu")
    model = _Model.of(shape, config)
    limit = limit or (_limit(config.model.device) if here else None)
    memory = model.memory(config, costs, process, limit)
    return Needs(
        memory=memory,
        tokens=_episodes(config) * config.rollout.episode_tokens,
        seconds=model.seconds(config, costs) if here else {},
        limit=limit,
        remedy=_remedy(config, limit, costs, lambda changed: model.memory(changed, costs, process, limit))
        if limit
        else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """The counts of a whole model."""

    weights: int
    layers: int
    width: int
    head: int
    """Numbers of the output embedding."""
    cut: float
    """The part of the head that small models lack, as a number of layers."""
    cached: int
    """Numbers that the engine's cache holds for a token."""
    adapted: int
    """Inputs and outputs of all layers that adapters go to."""

    @classmethod
    def of(cls, shape: PreTrainedConfig, config: Config) -> "_Model":
        text = shape.get_text_config()
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(shape)
        weights = sum(part.numel() for part in model.parameters())
        names = target_names(model, config.lora.targets)
        wrapped = [part for name, part in model.named_modules() if name.rpartition(".")[2] in names]
        adapted = sum(part.in_features + part.out_features for part in wrapped if isinstance(part, nn.Linear))
        layers, entries, width = text.num_hidden_layers, text.vocab_size, text.hidden_size
        tables = 1 if text.tie_word_embeddings else 2
        one = (weights - tables * entries * width) / layers
        size = getattr(text, "head_dim", None) or width // text.num_attention_heads
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        return cls(
            weights=weights,
            layers=layers,
            width=width,
            head=entries * width,
            cut=(entries - vocabulary(shape)) * width / one,
            cached=layers * 2 * heads * size,
            adapted=adapted,
        )

    def memory(self, config: Config, costs: Costs, process: int, limit: int | None) -> dict[str, int]:
        size = torch.finfo(getattr(torch, config.model.dtype)).bits // 8
        optim, frozen, adapters = config.optim, trains_adapters(config), config.lora.rank * self.adapted
        trained = adapters if frozen else self.weights
        # The head's gradient before it joins the others, and while its tiles are summed.
        head = 0 if frozen else 2 * 4 * self.head
        if size < 4:
            # The weights' casts, and the gradient by one of them.
            head += size * (self.weights + adapters + (1 if frozen else 2) * self.head)
        plane = costs.recomputed if optim.gradient_checkpointing and costs.recomputed else costs.activations
        activations = plane.at(self.layers, optim.max_tokens)
        holes = 0.0
        if config.model.device == "cpu" and optim.max_tokens * self.width * size < _MAPPED:
            holes = costs.activations.at(min(self.layers, _HOLES), optim.max_tokens)
        return {
            "process": process + _LATER if config.model.device == "cpu" else _CONTEXT,
            "weights": 4 * (self.weights + adapters),
            "engine's weights": size * self.weights,
            "engine's cache": self._cache(config, size, limit),
            "reference": size * self.weights if config.algo.kl_coef and not config.lora.rank else 0,
            "gradients": 4 * trained,
            "head": head,
            "activations": round(activations),
            "allocator": round(holes),
            "average": 4 * (adapters or self.weights) if optim.average else 0,
            "optimizer": 8 * trained,
        }

    def _cache(self, config: Config, size: int, limit: int | None) -> int:
        if config.engine.name == "vllm" and limit:
            # It takes its share whatever it needs, and lets requests wait for room in it.
            return max(0, int(_option(config, "memory", 0.3) * limit) - size * self.weights)
        return size * self.cached * _cached_tokens(config)

    def seconds(self, config: Config, costs: Costs) -> dict[str, float]:
        depth, optim = self.layers + self.cut, config.optim
        tokens = _episodes(config) * config.rollout.episode_tokens
        return {
            "generate": costs.generate.at(depth, tokens / costs.rows),
            "score": costs.score.at(depth, tokens),
            "update": optim.epochs * optim.minibatches * costs.update.at(depth, tokens / optim.minibatches),
        }


def _episodes(config: Config) -> int:
    return config.rollout.tasks * config.rollout.group_size


def _option(config: Config, name: str, default: float) -> float:
    value = config.engine.options.get(name, default)
    if not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"engine.options.{name} is {value!r}: give a number above 0")
    return value


def _cached_tokens(config: Config) -> int:
    """Tokens that the engine's cache has room for when every row is as long as an episode can be."""
    rows = int(_option(config, "slots", config.rollout.concurrency))
    longest = padded_keys(config.rollout.episode_tokens)
    if config.engine.name != "transformers":
        return rows * longest
    device, dtype = torch.device(config.model.device), getattr(torch, config.model.dtype)
    if config.engine.options.get("native", True) and computes(device, dtype):
        return rows * max(FEWEST, config.rollout.episode_tokens)
    # A row that outgrows those that lie together has a store of its own, which grows by half at least.
    room = SHORT
    while room < longest:
        room = max(padded_keys(room + 1), room + room // 2)
    return rows * (longest if longest <= SHORT else SHORT + room)


def _remedy(config: Config, limit: int, costs: Costs, memory: Callable[[Config], Mapping[str, int]]) -> str:
    parts = memory(config)
    asked = zip(parts, accumulate(parts.values()), strict=True)
    first = next((name for name, so_far in asked if so_far > limit), "")
    if not first:
        return ""
    optim, rollout = config.optim, config.rollout
    # None of them changes what is learned.
    knobs = {"optim.max_tokens": _halved(optim.max_tokens, rollout.episode_tokens)}
    if costs.recomputed and not optim.gradient_checkpointing:
        knobs = {"optim.gradient_checkpointing": ["true"], **knobs}
    rows = {"rollout.concurrency": _halved(rollout.concurrency, 1)} if config.engine.name != "vllm" else {}
    chosen: list[str] = []

    def fits(*overrides: str) -> bool:
        return sum(memory(with_overrides(config, [*chosen, *overrides])).values()) <= limit

    # What does not fit is made smaller first, and what is beside it only where that is not enough.
    for setting, values in ({**rows, **knobs} if first == "engine's cache" else {**knobs, **rows}).items():
        for value in values:
            if fits(f"{setting}={value}"):
                attempt = " and ".join([*chosen, f"{setting}={value}"])
                return f"{first} is the first that does not fit; all fits with {attempt}"
        chosen += [f"{setting}={value}" for value in values[-1:]]
    even = f", and all does not even with {' and '.join(chosen)}" if chosen else ""
    adapters = not config.lora.rank and fits("lora.rank=16", "sft.steps=0")
    lora = "train adapters beside frozen weights, which fit with lora.rank=16, or " if adapters else ""
    return f"{first} is the first that does not fit{even}: {lora}take a smaller model or a device with more memory"


def _halved(value: int, least: int) -> list[str]:
    """Give the halves of a setting, the halves of these and so on, down to the least that there may be."""
    values: list[str] = []
    while value > least:
        values.append(str(value := max(least, value // 2)))
    return values


def _is_here(device: str) -> bool:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        return False
    return True


def _limit(device: str) -> int:
    """Bytes that a device has, or this process may use of them."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        allowed = int(_CGROUP.read_text())
    except (OSError, ValueError):  # there is no such file, or it says max
        allowed = there
    return min(there, allowed)


def _resident() -> int:
    """Bytes that this process holds now, with all that it has imported."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
