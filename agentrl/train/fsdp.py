"""Shard a model over ranks with PyTorch's FSDP2."""

import os
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.algos.head import TokenStats
from agentrl.batch import Batch
from agentrl.train.score import score


def shard(model: Any, device: str, dtype: torch.dtype) -> None:
    """Shard a model over all ranks, and add a method ``score_pack`` that scores a pack with the shards."""
    backend = "gloo"
    if device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    mesh = DeviceMesh.from_group(_group_of_all(dist.group.WORLD, backend), device)
    # Weights, gradients and optimizer are float32; only weights that are gathered for a computation have ``dtype``.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in [*(layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)), model]:
        _materialize(module, device, made)
        # Resharded after the last layer too: weights that stay gathered after scoring would be old once weights are
        # exchanged or loaded.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)

    def score_pack(self: PreTrainedModel, pack: Batch, temperature: float) -> TokenStats:
        return score(self, pack, temperature=temperature, dtype=dtype)

    # Weights are gathered for a forward pass only, and scoring reads the head's weight itself: so FSDP2 must take it
    # for a forward pass.
    model.score_pack = MethodType(score_pack, model)
    register_fsdp_forward_method(model, "score_pack")


@lru_cache(maxsize=1)
def _group_of_all(_world: Any, backend: str) -> Any:
    """Make the group of all ranks for weights and gradients, once in a world.

    It is not the group of the calls, which may wait for hours while rank 0 plays. All models share it: PyTorch caches
    computations by mesh together with the group, and two ranks with different groups in the cache would wait for each
    other for ever.
    """
    return dist.new_group(backend=backend)


def _materialize(module: nn.Module, device: str, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Allocate the weights of a skeleton's module; tied weights stay tied."""
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            if weight.is_meta:
                part.register_parameter(name, made.setdefault(weight, _empty(weight, device)))


def _empty(weight: Tensor, device: str) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(weight, device=device), requires_grad=weight.requires_grad)


def full(tensor: Any) -> Tensor:
    """Gather a sharded tensor; all ranks call this."""
    return tensor.full_tensor()
