"""Estimate the memory and tokens of a run before its model is loaded.

Counted are weights, gradients, the optimizer's two moments, the engine's copy and its cache; beside adapters all else
is frozen. Of several ranks it is rank 0's memory, or on a CPU that of all ranks together. A pack's activations are
measured on small models (``costs.py``). The most that is needed at once is the sum of all parts, in the backward pass
of a later pack of an update.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.config import Config
from agentrl.engines.native.step import FEWEST
from agentrl.errors import ConfigError
from agentrl.models.cache import padded_keys
from agentrl.models.lora import target_names
from agentrl.models.native import computes
from agentrl.runs.assemble import check_device
from agentrl.train.costs import Costs, measure, trains_adapters

_CONTEXT = 512 << 20
"""Bytes that a process needs on a GPU before it has a tensor there, about."""
_LATER = 110 << 20
"""Bytes that a run's process takes beside all parts after the plan's imports, such as further imports and kernels."""
_HEAP = 0.25
"""Memory that a CPU's heap holds beside the live activations, as a share of them. It differs from shape to shape: with
this one, the sum of all parts was off by 9% at most in six shapes."""
_RANKS = (2, 4, 8)
"""Ranks that a remedy may propose."""
_CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run needs."""

    memory: Mapping[str, int]
    """Bytes by part, in the order in which a run first asks for them."""
    tokens: int
    """Most tokens of a step, prompts and tool output included."""
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
    try:
        here = bool(check_device(config.model.device))
    except ConfigError:
        here = False
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    # Activations are nearly the same on any device.
    costs = measure(config, shape, config.model.device if here else "cpu")
    model = Counts(shape, config)
    limit = limit or (_limit(config.model.device) if here else None)

    return Needs(
        memory=model.memory(config, costs, process, limit),
        tokens=config.rollout.tasks * config.rollout.group_size * config.rollout.episode_tokens,
        limit=limit,
        remedy=_remedy(Fit(model, costs, process, limit), config) if limit else "",
    )


class Counts:
    """The counts of a run's model, from its configuration.

    Args:
        shape: the configuration of the model.
        config: the run's settings; of these only ``lora.targets`` matters.
    """

    def __init__(self, shape: PreTrainedConfig, config: Config) -> None:
        text = shape.get_text_config()
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(shape)
            """The model without memory for its weights."""
        self.weights = sum(weight.numel() for weight in self.model.parameters())
        """Numbers of all weights."""
        names = target_names(self.model, config.lora.targets)
        wrapped = [module for name, module in self.model.named_modules() if name.rpartition(".")[2] in names]
        # Inputs and outputs of all layers that adapters go to.
        self._adapted = sum(part.in_features + part.out_features for part in wrapped if isinstance(part, nn.Linear))
        self._layers, self._width = text.num_hidden_layers, text.hidden_size
        self._head = text.vocab_size * text.hidden_size
        layered = [part for part in self.model.modules() if isinstance(part, GradientCheckpointingLayer)]
        self._layer = max((sum(weight.numel() for weight in part.parameters()) for part in layered), default=0)
        # What ranks gather for as long as they compute: embedding and head.
        self._ends = self.weights - self._layer * len(layered)
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        self.cached = self._layers * 2 * heads * size
        """Numbers that the engine's cache holds for a token."""

    def memory(self, config: Config, costs: Costs, process: int, limit: int | None) -> dict[str, int]:
        """Count the bytes of each part; ``process`` is what a process of a CPU holds before it has any."""
        size = torch.finfo(getattr(torch, config.model.dtype)).bits // 8
        optim, frozen, adapters = config.optim, trains_adapters(config), config.lora.rank * self._adapted
        trained, ranks, on_cpu = adapters if frozen else self.weights, config.run.ranks, config.model.device == "cpu"
        # The head's gradient before it joins the others, and while its tiles are summed.
        head = 0 if frozen else 2 * 4 * self._head
        if size < 4 and ranks == 1:
            # The weights' casts, and the gradient by one of them.
            head += size * (self.weights + adapters + (1 if frozen else 2) * self._head)
        # With checkpointing a layer keeps its input only, and one layer at a time computes the rest again. Beside what
        # is kept, the backward pass holds the gradients of about a layer.
        saved = self._layers * costs.layer
        if optim.gradient_checkpointing and costs.recomputes:
            saved = self._layers * self._width * size + costs.layer
        activations = optim.max_tokens * (saved + costs.layer + costs.rest)
        # Ends and a layer that computes, and the next one. When the gradient of the ends is summed over the ranks, in
        # float32, no activations are left.
        ends = 0 if frozen else (size + 4) * self._ends
        gathered = size * (self._ends + 2 * self._layer) + max(0, ends - head - round(activations))
        reference = 0 if not config.algo.kl_coef or config.lora.rank else self.weights
        parts = {
            "process": process + _LATER if on_cpu else _CONTEXT,
            "weights": -(-4 * (self.weights + adapters) // ranks),
            "engine's weights": size * self.weights,
            "engine's cache": self._cache(config, size, limit),
            "reference": size * reference if ranks == 1 else -(-4 * reference // ranks),
            "gradients": -(-4 * trained // ranks),
            "head": head,
            "activations": round(activations),
            "allocator": round(_HEAP * activations) if on_cpu else 0,
            "optimizer": -(-8 * trained // ranks),
        }
        if config.fleet.name != "local":  # its actors have the engines
            parts |= {"engine's weights": 0, "engine's cache": 0}
        if ranks > 1:
            parts["gathered weights"] = gathered
        if ranks > 1 and on_cpu:
            # They share the machine's memory, and only rank 0 has an engine.
            alike = sum(parts.values()) - parts["engine's weights"] - parts["engine's cache"]
            parts["other ranks"] = (ranks - 1) * alike
        return parts

    def share(self, config: Config, limit: int) -> float:
        """Compute the least share of the memory with which vLLM starts: for its weights and one episode."""
        size = torch.finfo(getattr(torch, config.model.dtype)).bits // 8
        needed = size * (self.weights + self.cached * config.rollout.episode_tokens)
        return math.ceil(100 * needed / limit) / 100

    def _cache(self, config: Config, size: int, limit: int | None) -> int:
        if config.engine.name == "vllm" and limit:
            # It takes its share whatever it needs, and lets requests wait for room in it.
            share = max(_option(config, "memory", 0.3), self.share(config, limit))
            return max(0, int(share * limit) - size * self.weights)
        return size * self.cached * _cached_tokens(config)


def _option(config: Config, name: str, default: float) -> float:
    value = config.engine.options.get(name, default)
    if not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"engine.options.{name} is {value!r}: give a number above 0")
    return value


def _cached_tokens(config: Config) -> int:
    """Return the tokens that the engine's cache has room for when every row is as long as an episode can be."""
    rows = int(_option(config, "slots", config.rollout.concurrency))
    device, dtype = torch.device(config.model.device), getattr(torch, config.model.dtype)
    embedded = config.engine.name == "transformers" and device.type == "cpu"
    if embedded and config.engine.options.get("native", True) and computes(device, dtype):
        return rows * max(FEWEST, config.rollout.episode_tokens)
    return rows * padded_keys(config.rollout.episode_tokens)


class Fit:
    """Searches for settings with which a run fits into a memory.

    Args:
        model: the counts of its model.
        costs: what small models cost.
        process: bytes that a process of a CPU holds before it has anything of the run.
        limit: bytes that there are.
    """

    def __init__(self, model: Counts, costs: Costs, process: int, limit: int) -> None:
        self._model, self._costs, self._process, self.limit = model, costs, process, limit

    def parts(self, config: Config) -> dict[str, int]:
        """Count the bytes of each part."""
        return self._model.memory(config, self._costs, self._process, self.limit)

    def fits(self, config: Config) -> bool:
        """Return True if a run with these settings fits."""
        return sum(self.parts(config).values()) <= self.limit and not self.share(config)

    def share(self, config: Config) -> float:
        """Return the least share that vLLM starts with, where ``engine.options.memory`` is less; else 0."""
        engine_here = config.engine.name == "vllm" and config.fleet.name == "local"
        least = self._model.share(config, self.limit) if engine_here else 0.0
        return least if least > _option(config, "memory", 0.3) else 0.0

    def settings(self, config: Config, ranks: Sequence[int] = _RANKS) -> tuple[dict[str, Any], bool]:
        """Choose settings with which a run fits, those that cost the least first.

        None changes what is learned.

        Args:
            config: the run's settings.
            ranks: numbers of ranks, each with a GPU of its own, that may be chosen.

        Returns:
            The settings, and whether all fits with them.
        """
        parts, optim, rollout = self.parts(config), config.optim, config.rollout
        knobs: dict[str, Sequence[Any]] = {"optim.max_tokens": _halved(optim.max_tokens, rollout.episode_tokens)}
        if self._costs.recomputes and not optim.gradient_checkpointing:
            knobs = {"optim.gradient_checkpointing": [True], **knobs}
        if config.engine.name != "vllm":
            rows = {"rollout.concurrency": _halved(rollout.concurrency, 1)}
            # The part that does not fit is made smaller first, and other parts only where that is not enough.
            early = _beyond(parts, self.limit) == "engine's cache"
            knobs = {**rows, **knobs} if early else {**knobs, **rows}
        elif config.fleet.name == "local":
            least = self._model.share(config, self.limit)
            knobs |= {"engine.options.memory": [least] if least < _option(config, "memory", 0.3) else []}
        if config.model.device != "cpu":
            knobs["run.ranks"] = [count for count in ranks if count > config.run.ranks]
        chosen: dict[str, Any] = {"engine.options.memory": share} if (share := self.share(config)) else {}
        for setting, values in knobs.items():
            for value in values if not self.fits(changed(config, chosen)) else ():
                chosen[setting] = value
                if self.fits(changed(config, chosen)):
                    break
        if not self.fits(changed(config, chosen)):
            return chosen, False
        # A later setting may have made an earlier one unnecessary.
        for setting in list(chosen):
            fewer = {name: value for name, value in chosen.items() if name != setting}
            if self.fits(changed(config, fewer)):
                chosen = fewer
        return chosen, True


def _remedy(fit: Fit, config: Config) -> str:
    part = "vLLM's share" if fit.share(config) else _beyond(fit.parts(config), fit.limit)
    if not part:
        return ""
    chosen, fits = fit.settings(config)
    words = " and ".join(f"{setting}={str(value).lower()}" for setting, value in chosen.items())
    if fits:
        return f"{part} is the first that does not fit; all fits with {words}"
    even = f", and all does not even with {words}" if chosen else ""
    adapters = not config.lora.rank and fit.fits(changed(config, chosen).updated(lora={"rank": 16}, sft={"steps": 0}))
    lora = "train adapters beside frozen weights, which fit with lora.rank=16, or " if adapters else ""
    return f"{part} is the first that does not fit{even}: {lora}take a smaller model or a device with more memory"


def _beyond(parts: Mapping[str, int], limit: int) -> str:
    """Return the first part that does not fit; empty where all do."""
    sums = zip(parts, accumulate(parts.values()), strict=True)
    return next((name for name, so_far in sums if so_far > limit), "")


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the settings with some replaced, by ``section.key``."""
    for setting, value in settings.items():
        section, name, *option = setting.split(".")
        if option:
            value = {**config.engine.options, option[0]: value}
        config = config.updated(**{section: {name: value}})
    return config


def _halved(value: int, least: int) -> list[int]:
    """Return the halves of a setting, the halves of these and so on, down to the least that there may be."""
    values: list[int] = []
    while value > least:
        values.append(value := max(least, value // 2))
    return values


def _limit(device: str) -> int:
    """Return the bytes that a device has, or this process may use of them."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(_CGROUP.read_text()))
    except (OSError, ValueError):  # there is no such file, or it says max
        return machine


def _resident() -> int:
    """Return the bytes that this process holds now, with all that it has imported."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
