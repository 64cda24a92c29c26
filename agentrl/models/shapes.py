"""The shapes of published models, so that a run with one of them can be planned without a network."""

import re

from transformers import Qwen3Config

_QWEN3 = {
    "0.6B": (1024, 28, 16, 3072),
    "1.7B": (2048, 28, 16, 6144),
    "4B": (2560, 36, 32, 9728),
    "8B": (4096, 36, 32, 12288),
    "14B": (5120, 40, 40, 17408),
    "32B": (5120, 64, 64, 25600),
}
"""Width, layers, query heads and width of the feed-forward layers, from each model's ``config.json`` on the hub."""
_TIED = ("0.6B", "1.7B", "4B")
"""Sizes whose head is their embedding."""


def published_shape(name: str) -> Qwen3Config | None:
    """Return what memory and time of a model on the Hugging Face hub depend on; None for a model of no known shape.

    Args:
        name: its name there, such as ``Qwen/Qwen3-4B-Base``.
    """
    size = re.fullmatch(r"Qwen/Qwen3-([\d.]+B)(?:-Base)?", name)
    if size is None or size[1] not in _QWEN3:
        return None
    width, layers, heads, inner = _QWEN3[size[1]]
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=size[1] in _TIED,
    )
