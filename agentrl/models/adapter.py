"""Layers with LoRA adapters that make one result beside the layer's own, where peft makes three.

On a CPU each result that is freed leaves a hole in the heap: with three, an update of 24 narrow layers took 175 MiB
more. This module is imported for models with adapters only, as peft is.
"""

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn


class LeanAdapter(Linear):
    """Computes W·x + (alpha/rank)·B·A·x as peft's does, product and sum at once."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        """``x`` [..., i] to [..., o]."""
        out: Tensor = self.base_layer(x, *args, **options)
        if self.disable_adapters:
            return out
        (name,) = self.active_adapters
        up: Any = self.lora_B[name]
        low: Tensor = self.lora_A[name](x)
        summed = torch.addmm(out.flatten(0, -2), low.flatten(0, -2), up.weight.T, alpha=self.scaling[name])
        return summed.view_as(out)


def use_lean_adapters(model: nn.Module) -> None:
    """Make each plain adapter of a model, that is one without dropout, bias or a variant's own terms, a lean one."""
    for layer in model.modules():
        if type(layer) is Linear and not layer.lora_variant:
            (name,) = layer.active_adapters
            up: Any = layer.lora_B[name]
            if isinstance(layer.lora_dropout[name], nn.Identity) and up.bias is None:
                layer.__class__ = LeanAdapter
