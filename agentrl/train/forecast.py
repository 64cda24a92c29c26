"""Estimate the seconds of a run's step on a GPU that need not be here, from its data sheet.

Scores and updates are floating-point operations at a share of the card's rate. Sampling reads the weights and the
running rows' keys and values for each token, at a share of the rate of its memory. Left out are tools, transfers of
weights, and what ranks wait for each other.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from agentrl.config import Config
from agentrl.errors import ConfigError, UnknownNameError
from agentrl.train.costs import batch_of, trains_adapters, work
from agentrl.train.memory import Counts
from agentrl.train.metrics import PEAKS, peak_flops

_GIB = 1 << 30
_MFU, _DOUBLING, _MOST_MFU = 0.19, 0.0325, 0.32
"""Measured with Qwen3-4B on an H200 (docs/gpu.md): 19% of the card's rate for rows of 4,096 tokens, 26% for 16,384 and
32% for 65,536; so each doubling adds 3.25 points."""
_LEAST_MFU = 0.14
"""The same page's least for full packs."""
_VLLM, _EMBEDDED = 0.5, 0.01
"""Shares of the memory's rate that sampling reaches. vLLM's is assumed, since none was run on a GPU; the embedded
engine reached about so much on an H200 (docs/gpu.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What NVIDIA's data sheet says of a GPU."""

    name: str
    """A name in ``metrics.PEAKS``, which has its FLOP/s."""
    bandwidth: float
    """Bytes per second of its memory."""
    memory: int
    """Bytes that its driver shows."""


CARDS = {
    card.name.lower(): card
    for card in (
        Card(name="A100", bandwidth=2.04e12, memory=int(79.2 * _GIB)),
        Card(name="H100", bandwidth=3.35e12, memory=int(79.2 * _GIB)),
        Card(name="H200", bandwidth=4.8e12, memory=int(139.8 * _GIB)),
    )
}


def card_of(config: Config, name: str) -> Card | None:
    """Return the card to plan for: the named one, that of the run's device, or an H100 for a GPU that is not here.

    Args:
        config: the run's settings.
        name: a name in ``CARDS``; empty to choose by the run's device.

    Returns:
        The card; None for a CPU, and for a GPU that is here and not in ``CARDS``: these can be measured.

    Raises:
        UnknownNameError: there is no such card.
    """
    if name:
        if name.lower() not in CARDS:
            raise UnknownNameError("card", name, CARDS)
        return CARDS[name.lower()]
    device = torch.device(config.model.device)
    if device.type != "cuda":
        return None
    if not torch.cuda.is_available():
        return CARDS["h100"]
    peak, here = peak_flops(device, "bfloat16"), torch.cuda.get_device_name(device)
    return next((card for card in CARDS.values() if card.name in here and PEAKS[card.name] == peak), None)


def forecast(config: Config, shape: PreTrainedConfig, card: Card, tokens: int) -> dict[str, float]:
    """Estimate the seconds of a step by phase.

    Args:
        config: the run's settings.
        shape: the configuration of its model.
        card: each of its GPUs.
        tokens: of each episode, prompt included; all but the first count as sampled.

    Raises:
        ConfigError: the fleet has no number of actors.
    """
    counts = Counts(shape, config)
    tasks, group = config.rollout.tasks, batch_of(config.rollout.group_size, tokens, tokens - 1)
    # A forward pass is a third of an update in which all weights are trained.
    score = tasks * work(counts.model, group) / 3
    counts.model.requires_grad_(not trains_adapters(config))
    update = config.optim.epochs * tasks * work(counts.model, group)
    rate = _mfu(tokens) * PEAKS[card.name] * config.run.ranks
    return {"generate": _sampling(config, counts, card, tokens), "score": score / rate, "update": update / rate}


def basis(config: Config, card: Card, tokens: int) -> str:
    """Return in words what a forecast rests on."""
    flops, bandwidth = PEAKS[card.name] / 1e12, card.bandwidth / 1e12
    shares = (
        f"{_mfu(tokens):.0%} of {flops:.0f} TFLOP/s to learn, {_read(config):.0%} of {bandwidth:.2f} TB/s to sample"
    )
    return f"{card.name}: {shares}; tools, transfers and waits left out"


def run_seconds(config: Config, seconds: Mapping[str, float]) -> float:
    """Sum up the seconds of a run's steps and evaluations from those of a step by phase."""
    play, learn = seconds["generate"], seconds["score"] + seconds["update"]
    steps, rollout, held_out = config.optim.steps, config.rollout, config.eval
    step = play + learn if rollout.overlap.mode == "off" else max(play, learn)
    times = 1 + (-(-steps // held_out.every) if held_out.every else 1)
    episodes = times * held_out.tasks * held_out.attempts * len(config.env.played)
    return steps * step + play * episodes / (rollout.tasks * rollout.group_size)


def _mfu(tokens: int) -> float:
    return min(_MOST_MFU, max(_LEAST_MFU, _MFU + _DOUBLING * math.log2(tokens / 4096)))


def _read(config: Config) -> float:
    return _VLLM if config.engine.name == "vllm" else _EMBEDDED


def _sampling(config: Config, counts: Counts, card: Card, tokens: int) -> float:
    """Compute the seconds in which all engines sample a step's episodes, in waves of as many rows as run at a time."""
    rollout, options = config.rollout, config.engine.options
    size = torch.finfo(getattr(torch, config.model.dtype)).bits // 8
    weights = size * counts.weights
    # On average a row is half as long as it becomes.
    row = size * counts.cached * tokens / 2
    engines = config.fleet.options.get("actors", 1) if config.fleet.name == "ray" else 1
    if not isinstance(engines, int) or engines < 1:
        raise ConfigError(f"fleet.options.actors is {engines!r}: give their number, from 1")
    rows = min(rollout.concurrency, -(-rollout.tasks * rollout.group_size // engines))
    if config.engine.name == "vllm":
        room = float(str(options.get("memory", 0.3))) * card.memory - weights
        rows = max(1, min(rows, int(room // row)))
    waves = math.ceil(rollout.tasks * rollout.group_size / (engines * rows))
    return waves * tokens * (weights + rows * row) / (_read(config) * card.bandwidth)
