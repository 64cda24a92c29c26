"""Measure the activations of a model on small models of its own widths, with one or two layers and random weights.

What autograd keeps grows with layers and tokens.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from agentrl.batch import Batch, as_batch
from agentrl.config import Config
from agentrl.models.attention import NAME
from agentrl.models.linear import use_fast_linear
from agentrl.models.norm import use_fast_norms
from agentrl.runs.assemble import adapt
from agentrl.train.metrics import pass_flops
from agentrl.train.sharded import make_learner
from agentrl.types import Group, Segment, Stop, Trajectory

_VOCABULARY = 1024
"""Entries of the small models, at most: the head's cost per entry is known."""
_TOKENS = 61
"""Tokens at which bytes are measured; a prime, so that no activation has a weight's shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What small models cost."""

    layer: float
    """Bytes that autograd keeps in a layer for each token of a pack."""
    rest: float
    """The same for the rest of the model."""
    recomputes: bool
    """True if the model can compute activations again."""


def measure(config: Config, shape: PreTrainedConfig, device: str) -> Costs:
    """Measure small models, which takes some seconds.

    Args:
        config: the run's settings.
        shape: the configuration of its model.
        device: where to do it.
    """
    plain = config.updated(optim={"gradient_checkpointing": False})

    def saved(layers: int) -> tuple[float, bool]:
        model = _small(config, shape, layers, device)
        return saved_bytes(plain, model) / _TOKENS, model.supports_gradient_checkpointing

    (single, recomputes), (double, _) = saved(1), saved(2)
    layer, rest = double - single, max(0.0, 2 * single - double)
    return Costs(layer=layer, rest=rest, recomputes=recomputes)


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
        # Detached: an output that is kept with its own graph would be a cycle, and never freed.
        return tensor.detach()

    # A loss that depends on nothing: the backward pass, which keeps nothing, would take nearly all of the time.
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        constant = torch.zeros((), requires_grad=True)
        make_learner(config, model).update([batch_of(1, tokens, tokens - 1)], lambda _, stats: constant, 0.0)
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
