"""RMSNorm on a CPU in C, forward and backward (``agentrl/native/norm.c``): one pass instead of one for each operation.

Legend: d numbers that are normed together.
"""

import copy
import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from agentrl.models.native import compiled, computes

_LANES = 16
"""Numbers that are normed are a multiple of this: no vector is left half full."""
_ROWS = 256
"""Rows of a block of norm.c."""


class RMSNorm(nn.Module):
    """The RMSNorm of Llama and of most models after it; only :func:`use_fast_norms` makes one."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Norm [..., d]; in inference mode by PyTorch, to the same bits as the class that this one replaces."""
        x, weight = hidden_states, self.weight
        fast = weight.dtype == x.dtype and computes(x.device, x.dtype) and x.shape[-1] % _LANES == 0
        if fast and not torch.is_inference_mode_enabled():
            return _Norm.apply(x, weight, self.variance_epsilon)
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return weight * normed.to(x.dtype)


def use_fast_norms(model: nn.Module) -> None:
    """Make each norm of a model that computes what :class:`RMSNorm` does one of that class."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and _is_plain(module):
            # As in use_fast_linear: a module that changes its class keeps its hooks, ties and parameters.
            module.__class__ = RMSNorm


@torch.inference_mode()
def _is_plain(module: Any) -> bool:
    """Return whether a norm is ours to the last bit: others add 1 to the weight, or round before they multiply."""
    # Not the module's own weight, which may have no values yet.
    weight = torch.linspace(0.5, 1.5, len(module.weight), dtype=module.weight.dtype)
    module = copy.copy(module)
    module._parameters = {**module._parameters, "weight": nn.Parameter(weight)}
    numbers = torch.linspace(-2e-3, 3e-3, 2 * len(weight)).unflatten(0, (2, -1))
    inputs = numbers, numbers.to(torch.bfloat16)
    pairs = ((module(x), RMSNorm.forward(module, x)) for x in inputs)
    return all(theirs.dtype == ours.dtype and torch.equal(theirs, ours) for theirs, ours in pairs)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        factors, out = x.new_empty(x.shape[:-1]), torch.empty_like(x)
        _call("norm_forward", x, (ctypes.c_float(epsilon),), x, weight, factors, out)
        ctx.save_for_backward(x, weight, factors)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's decorator has no types
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        x, weight, factors = ctx.saved_tensors
        by_x, by_weight = torch.empty_like(x), x.new_zeros(-(-factors.numel() // _ROWS), x.shape[-1])
        _call("norm_backward", x, (), x, weight, factors, grad.contiguous(), by_x, by_weight)
        return by_x, by_weight[0], None


def _call(name: str, x: Tensor, how: tuple[ctypes.c_float, ...], *tensors: Tensor) -> None:
    code = compiled()
    assert code is not None
    sizes = x.numel() // x.shape[-1], x.shape[-1], torch.get_num_threads()
    addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
    getattr(code.calls, name)(*map(ctypes.c_int64, sizes), *how, *addresses)
