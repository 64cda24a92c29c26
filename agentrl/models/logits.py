"""From a model's last hidden states to its logits: the head's product, and how some models scale or cap it."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def softcap_of(model: PreTrainedModel) -> float | None:
    """Return the c of a model whose logits are c·tanh(z/c) of its head's product z, as Gemma's are; None for most."""
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None)


def logit_divisor(model: PreTrainedModel) -> float:
    """Return the number that a model divides its head's product by, as Granite and Cohere do; 1 for most models."""
    config = model.config.get_text_config()
    # Granite divides by logits_scaling, Cohere multiplies by logit_scale.
    return getattr(config, "logits_scaling", 1.0) / getattr(config, "logit_scale", 1.0)


def logits_of(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Compute the float32 logits [..., V] of hidden states [..., d], before any temperature."""
    head: Any = model.get_output_embeddings()
    product: Tensor = head(hidden).float() / logit_divisor(model)
    cap = softcap_of(model)
    return product if cap is None else cap * torch.tanh(product / cap)
