"""Matrix products on a CPU: by oneDNN where they are large, which uses the full width of its vectors.

PyTorch gives float32 products to MKL, which on an AMD processor leaves half of its vector width unused; oneDNN comes
with PyTorch, computes the same sums and takes half the time there. On an Intel processor the two are alike.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

_LARGE = 2**22
"""Multiplications from which oneDNN's start-up, some 10 µs, is negligible."""
_WIDE = 2**21
"""Weights from which it is negligible for any number of rows."""
LANES = 16
"""Rows are padded to a multiple of this: rows that don't fill a vector of the processor sum in another order."""
_THERE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``x`` [..., i] by the transpose of ``weight`` [o, i] and add ``bias`` [o], as ``torch.nn.Linear`` does.

    In inference mode a row's product is the same to the last bit however many rows there are.
    """
    if not _plain(x, weight):
        return functional.linear(x, weight, bias)
    if torch.is_inference_mode_enabled():
        return _same_bits(x, weight, bias)
    if x.numel() * weight.shape[0] < _LARGE:
        return functional.linear(x, weight, bias)
    # oneDNN's operator has no gradient of its own.
    product: Tensor = _Product.apply(x, weight) if torch.is_grad_enabled() else _onednn(x, weight)
    return product if bias is None else product + bias


class Linear(nn.Linear):
    """A linear layer that computes with :func:`linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """``input`` [..., i] to [..., o]."""
        return linear(input, self.weight, self.bias)


def use_fast_linear(model: nn.Module) -> None:
    """Make each plain ``torch.nn.Linear`` of a model a :class:`Linear`; weights, names and files stay as they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            # A module that changes its class keeps its hooks, ties and parameters; a new module would need copies.
            module.__class__ = Linear


def _plain(x: Tensor, weight: Tensor) -> bool:
    kind = x.device.type == weight.device.type == "cpu" and x.dtype == weight.dtype == torch.float32
    return _THERE and kind and x.numel() > 0


def _same_bits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply each row to the same bits, however many there are.

    Both libraries sum each row alike where rows fill vectors. The weight's size chooses the library, since the number
    of rows must not change a row's bits.
    """
    rows = x.flatten(0, -2)
    missing = -len(rows) % LANES
    padded = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
    product = _onednn(padded, weight) if weight.numel() >= _WIDE else functional.linear(padded, weight)
    product = product[: len(rows)].unflatten(0, x.shape[:-1])
    return product if bias is None else product + bias


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


class _Product(torch.autograd.Function):
    """x·weightᵀ with its two gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's decorator has no types
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        by_x = _onednn(grad, weight.T) if ctx.needs_input_grad[0] else None
        by_weight = _onednn(grad.flatten(0, -2).T, x.flatten(0, -2).T) if ctx.needs_input_grad[1] else None
        return by_x, by_weight
