"""Measure what a model costs on small models of its own widths, with one or two layers and random weights.

What autograd keeps grows with layers and tokens. Seconds of scores and updates grow with floating-point operations,
and those of the engine's steps with the weights that a token meets.
"""

import asyncio
import copy
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from agentrl.batch import Batch, as_batch
from agentrl.config import Config
from agentrl.engines import make_engine
from agentrl.engines.base import Sampling
from agentrl.models.attention import NAME
from agentrl.models.linear import use_fast_linear
from agentrl.models.load import cast_copy
from agentrl.models.lora import merge
from agentrl.models.norm import use_fast_norms
from agentrl.runs.assemble import adapt
from agentrl.train.metrics import pass_flops
from agentrl.train.sharded import make_learner
from agentrl.types import Group, Segment, Stop, Trajectory

_VOCABULARY = 1024
"""Entries of the small models, at most: the head's cost per entry is known."""
_TOKENS = 61
"""Tokens at which bytes are measured; a prime, so that no activation has a weight's shape."""
_WORK = 1e10
"""Multiplications of a timed forward pass, about: a second's tenth or so, where there are that many tokens."""
_ROWS, _STEPS = 64, 8
"""Most rows that generate at a time, and steps for which they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What small models cost."""

    layer: float
    """Bytes that autograd keeps in a layer for each token of a pack."""
    rest: float
    """The same for the rest of the model."""
    recomputes: bool
    """True if the model can compute activations again."""
    score: float = 0.0
    """Seconds of scoring per operation that ``work`` counts; 0 where no times were taken."""
    update: float = 0.0
    """Seconds of an update per such operation."""
    step: float = 0.0
    """Seconds of a step in which ``rows`` rows generate a token each, per operation of one token."""
    rows: int = 1
    """Rows that generate at a time."""


def measure(config: Config, shape: PreTrainedConfig, device: str, lengths: tuple[int, int] | None) -> Costs:
    """Train, score and sample with small models for some seconds.

    Args:
        config: the run's settings.
        shape: the configuration of its model.
        device: where to do it.
        lengths: all tokens of an episode, and the sampled ones; None to take no times, which are the longest work.
    """
    plain = config.updated(optim={"gradient_checkpointing": False})

    def saved(layers: int) -> tuple[float, bool]:
        model = _small(config, shape, layers, device)
        return saved_bytes(plain, model) / _TOKENS, model.supports_gradient_checkpointing

    (single, recomputes), (double, _) = saved(1), saved(2)
    layer, rest = double - single, max(0.0, 2 * single - double)
    if lengths is None:
        return Costs(layer=layer, rest=rest, recomputes=recomputes)
    model = _small(config, shape, 2, device)
    learner = make_learner(config, model)
    # The wider the model, the fewer tokens.
    weights = sum(weight.numel() for weight in model.parameters())
    room = int(min(config.optim.max_tokens, max(16, _WORK / weights)))
    pack = batch_of(room // lengths[0], *lengths) if lengths[0] <= room else batch_of(1, room, room - 1)
    operations = work(model, pack)
    rows = min(_ROWS, config.rollout.concurrency, config.rollout.tasks * config.rollout.group_size)
    return Costs(
        layer=layer,
        rest=rest,
        recomputes=recomputes,
        score=_seconds(lambda: learner.score(pack)) / operations,
        update=_seconds(lambda: learner.update([pack], lambda _, stats: stats.logp.sum(), 0.0)) / operations,
        step=_seconds(_generation(config, model, rows)) / (_STEPS * work(model, batch_of(1, 2, 1))),
        rows=rows,
    )


def trains_adapters(config: Config) -> bool:
    """Return True if no more than adapters are ever trained: a warm start trains all weights."""
    return config.lora.rank > 0 and config.sft.steps == 0


def saved_bytes(config: Config, model: PreTrainedModel, tokens: int = _TOKENS) -> int:
    """Count the bytes of activations that autograd keeps of a pack's forward pass for its backward pass."""
    matrices = [tuple(weight.shape) for weight in model.parameters() if weight.ndim > 1]
    # Weights and their casts do not grow with a pack's tokens, and are counted elsewhere.
    weights = {*matrices, *(shape[::-1] for shape in matrices)}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        # Keyed by storage: several operations may keep the same tensor, or views of it.
        if tuple(tensor.shape) not in weights:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        make_learner(config, model).update([batch_of(1, tokens, tokens - 1)], lambda _, stats: stats.logp.sum(), 0.0)
    return sum(sizes.values())


def work(model: PreTrainedModel, pack: Batch) -> float:
    """Count the operations of an update by a pack; of a mixture of experts as if tokens met all weights."""
    return pass_flops(model, pack) or 6.0 * len(pack.tokens) * sum(weight.numel() for weight in model.parameters())


def batch_of(members: int, tokens: int, sampled: int) -> Batch:
    """Make a batch of a group of episodes of so many tokens, which share all but the last ``sampled`` tokens."""

    def episode(number: int) -> Trajectory:
        policy = Segment("policy", (1 + number,) * sampled, (0.0,) * sampled, 0)
        segments = Segment("prompt", (0,) * (tokens - sampled)), policy
        return Trajectory(task_id="plan", seed=number, segments=segments, rewards=(0.0,), stop=Stop.TERMINATED)

    return as_batch([Group(tuple(map(episode, range(members))))])


def _generation(config: Config, model: PreTrainedModel, rows: int) -> Callable[[], None]:
    sampled = cast_copy(model, getattr(torch, config.model.dtype))
    if trains_adapters(config):
        merge(sampled)
    engine = make_engine("transformers", sampled, {"slots": rows, "max_length": 2 * _STEPS})
    sampling = Sampling(temperature=config.rollout.temperature, max_tokens=_STEPS)

    async def generate() -> None:
        await asyncio.gather(*(engine.generate((1, 2, 3), sampling, seed=row) for row in range(rows)))

    return lambda: asyncio.run(generate())


def _seconds(run: Callable[[], object]) -> float:
    """Return the shorter of two times, since the first may wait for things that are made once."""
    return min(timeit.repeat(run, repeat=2, number=1))


def _small(config: Config, shape: PreTrainedConfig, layers: int, device: str) -> PreTrainedModel:
    """Make a small model, with adapters where a run trains nothing else."""
    cut: Any = copy.deepcopy(shape)
    text = cut.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = layers, min(_VOCABULARY, text.vocab_size), None
    if getattr(text, "layer_types", None):
        text.layer_types = (text.layer_types * layers)[:layers]  # of a model of one layer too
    model: Any = AutoModelForCausalLM.from_config(cut, dtype=torch.float32, attn_implementation=NAME)
    use_fast_linear(model)
    use_fast_norms(model)
    if trains_adapters(config):
        adapt(config, model, base="", saved=None)
    return model.to(device)
