"""Measure what a model costs on models of its own widths that have only one and two layers, and random weights.

Activations and seconds are linear in the layers, and in the tokens of a pack as long as attention is the smaller part.
So four small measurements, at one and two layers and n and 2n tokens, give those of any depth and pack.

Legend: V vocabulary, d hidden size.
"""

import asyncio
import copy
import timeit
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from agentrl.batch import Batch, whole
from agentrl.config import Config, with_overrides
from agentrl.engines import make_engine
from agentrl.engines.base import Sampling
from agentrl.errors import ConfigError
from agentrl.models.attention import NAME
from agentrl.models.linear import use_fast_linear
from agentrl.models.load import cast_copy
from agentrl.models.lora import add_adapters, merge
from agentrl.models.norm import use_fast_norms
from agentrl.train.step import make_learner
from agentrl.types import Group, Segment, Stop, Trajectory

_VOCABULARY = 1024
"""Entries of the small models, at most: the head's cost per entry is known."""
_TOKENS = 61
"""Tokens at which bytes are measured; a prime, so that no activation has a weight's shape."""
_WORK = 1e10
"""Multiplications of a timed forward pass, about: a second's tenth or so, where there are that many tokens."""
_ROWS, _STEPS = 64, 3
"""Most rows that generate at a time, and steps for which they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """A quantity that is linear in layers and in tokens."""

    corners: tuple[float, float, float, float]
    """Its values at 1 layer and n tokens, 1 and 2n, 2 and n, 2 and 2n."""
    tokens: int
    """The n."""

    def at(self, layers: float, tokens: float) -> float:
        """The value at so many layers and tokens."""
        a, b, c, d = self.corners
        count = tokens / self.tokens
        return _line(_line(a, b, count), _line(c, d, count), layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What small models tell about a run's whole model."""

    activations: Plane
    """Most bytes that are live in an update beside weights, gradients and optimizer."""
    recomputed: Plane | None
    """The same with ``optim.gradient_checkpointing``; None where the model can't do that."""
    score: Plane
    """Seconds to score a pack."""
    update: Plane
    """Seconds of an update by one pack, the optimizer's step included."""
    generate: Plane
    """Seconds in which ``rows`` rows generate so many tokens each."""
    rows: int
    """Rows that generate at a time."""


def measure(config: Config, shape: PreTrainedConfig, device: str) -> Costs:
    """Train, score and sample with small models for some seconds.

    Args:
        config: the run's settings.
        shape: the configuration of its model.
        device: where to do it.
    """
    kept, again = (with_overrides(config, [f"optim.gradient_checkpointing={on}"]) for on in ("false", "true"))
    plain = _probes(kept, shape, device)
    try:
        recomputing = _probes(again, shape, device)
    except ConfigError:
        if config.optim.gradient_checkpointing:
            raise
        recomputing = None
    probes = recomputing if recomputing and config.optim.gradient_checkpointing else plain
    # The wider the model, the fewer tokens.
    weights = sum(weight.numel() for weight in probes[0].model.parameters())
    tokens = int(min(config.optim.max_tokens / 2, 256, max(16, _WORK / weights)))
    rows = min(_ROWS, config.rollout.concurrency, config.rollout.tasks * config.rollout.group_size)

    def plane(probes: Sequence[_Probe], what: Callable[[_Probe, int], float], n: int) -> Plane:
        a, b, c, d = (what(probe, count) for probe in probes for count in (n, 2 * n))
        return Plane(corners=(a, b, c, d), tokens=n)

    return Costs(
        activations=plane(plain, _Probe.activations, _TOKENS),
        recomputed=plane(recomputing, _Probe.activations, _TOKENS) if recomputing else None,
        score=plane(probes, lambda probe, count: _seconds(lambda: probe.learner.score(_pack(config, count))), tokens),
        update=plane(probes, lambda probe, count: _seconds(lambda: probe.update(count)), tokens),
        generate=plane(probes, lambda probe, count: _seconds(lambda: probe.generate(rows, count)), _STEPS),
        rows=rows,
    )


def _line(once: float, twice: float, count: float) -> float:
    """Return the value for ``count`` units of work; ``once`` and ``twice`` are measured with one and two."""
    # More work takes more: where noise says otherwise, it is taken to grow with the count alone.
    if twice <= once:
        return twice * count / 2
    return max(once + (twice - once) * (count - 1), once * min(count, 1.0))


def vocabulary(shape: PreTrainedConfig) -> int:
    """Entries of the vocabulary of the small models."""
    return min(_VOCABULARY, shape.get_text_config().vocab_size)


def trains_adapters(config: Config) -> bool:
    """Return True if no more than adapters are ever trained: a warm start trains all weights."""
    return config.lora.rank > 0 and config.sft.steps == 0


def _probes(config: Config, shape: PreTrainedConfig, device: str) -> list["_Probe"]:
    return [_Probe(config, _small(shape, layers, device)) for layers in (1, 2)]


class _Probe:
    """A small model in the hands of the run's own learner and engine."""

    def __init__(self, config: Config, model: PreTrainedModel) -> None:
        self._config, self.model = config, model
        if trains_adapters(config):
            lora = config.lora
            add_adapters(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, base="", seed=0)
        self.learner = make_learner(config, model)

    def update(self, tokens: int) -> float:
        return self.learner.update([_pack(self._config, tokens)], lambda _, stats: stats.logp.sum(), 0.0)

    def activations(self, tokens: int) -> float:
        self.update(tokens)  # the optimizer makes its state
        with _Live(self.model) as live:
            self.update(tokens)
        return live.peak

    def generate(self, rows: int, tokens: int) -> None:
        sampled = cast_copy(self.model, getattr(torch, self._config.model.dtype))
        if trains_adapters(self._config):
            merge(sampled)
        engine = make_engine("transformers", sampled, {"slots": rows, "max_length": 2 * _TOKENS})
        sampling = Sampling(temperature=self._config.rollout.temperature, max_tokens=tokens)

        async def ask() -> None:
            await asyncio.gather(*(engine.generate((1, 2, 3), sampling, seed=row) for row in range(rows)))

        asyncio.run(ask())


class _Live(TorchDispatchMode):
    """Counts the bytes of live tensors that were made within, but for those that have the shape of a weight.

    Weights' gradients and casts do not grow with a pack's tokens, and are few enough to be known by name.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        matrices = [tuple(weight.shape) for weight in model.parameters() if weight.ndim > 1]
        self._weights = {*matrices, *(shape[::-1] for shape in matrices)}
        self._known: set[int] = set()
        self._bytes = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # A view, or a result in place, has the storage of an argument.
        old = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if (
                isinstance(leaf, Tensor)
                and tuple(leaf.shape) not in self._weights
                and _storage(leaf) not in self._known | old
            ):
                self._add(leaf)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._known.add(key := _storage(tensor))
        self._bytes += storage.nbytes()
        self.peak = max(self.peak, self._bytes)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._bytes -= size


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  # the same for every view


def _seconds(work: Callable[[], object]) -> float:
    """The shorter of two times, since the first may wait for what is only made once."""
    return min(timeit.repeat(work, repeat=2, number=1))


def _small(shape: PreTrainedConfig, layers: int, device: str) -> PreTrainedModel:
    cut: Any = copy.deepcopy(shape)
    text = cut.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = layers, vocabulary(shape), None
    if getattr(text, "layer_types", None):
        text.layer_types = (text.layer_types * layers)[:layers]  # of a model of one layer too
    model: Any = AutoModelForCausalLM.from_config(cut, dtype=torch.float32, attn_implementation=NAME)
    use_fast_linear(model)
    use_fast_norms(model)
    return model.to(device)


def _pack(config: Config, tokens: int) -> Batch:
    """A pack of so many tokens: one row where an episode fills a pack, else two, which are not equally long."""
    short = 0 if 2 * config.rollout.episode_tokens > config.optim.max_tokens else tokens // 2 - 2
    # Rows that begin alike would be computed once.
    return whole([_sampled((row,) * length) for row, length in enumerate((short, tokens - short)) if length])


def _sampled(tokens: tuple[int, ...]) -> Group:
    """An episode whose tokens but the first are sampled."""
    segments = Segment("prompt", tokens[:1]), Segment("policy", tokens[1:], (0.0,) * (len(tokens) - 1), 0)
    return Group((Trajectory(task_id="probe", seed=0, segments=segments, rewards=(0.0,), stop=Stop.TERMINATED),))
