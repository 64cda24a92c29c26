"""A transformers decoder's weights and settings, in the form that the step in C reads.

Where possible, the model itself is asked what it computes: its call of the attention for how layers attend, its norms
for their factors, its rotary module for the angles of positions. The rest follows from the names of a layer's parts. A
model with a weight that is unknown here is refused; the check in ``step`` finds weights that were misread.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.models.attention import BucketedRows, How
from agentrl.models.logits import logit_divisor, softcap_of
from agentrl.native import Unavailable
from agentrl.native.build import Library

LANES = 16
"""Floats of the widest processor's vectors: a multiple of every processor's."""
_INTS = ("layers", "d", "heads", "kheads", "D", "ff", "vocab", "gelu", "rotated")
_FLOATS = ("eps", "scale", "softcap", "final_cap", "embed_scale", "logit_scale")
_NORMS = ("before_attn", "after_attn", "before_mlp", "after_mlp")
_LAYER = (*_NORMS, "qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias", "gate_up", "down", "turns")
_LAYOUTS: tuple[tuple[str | None, ...], ...] = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)
"""Names of a layer's norms before and after attention, before and after the feed-forward part."""
_ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1}
_Change = Callable[[Tensor], Tensor]
_Part = tuple[Tensor, int, _Change]
"""A weight of the model, the first output that it gives, and what it is made into."""


class CLayer(ctypes.Structure):
    """``Layer`` of step.c."""

    _fields_ = (*((name, ctypes.c_void_p) for name in _LAYER), ("window", ctypes.c_int64))


class CModel(ctypes.Structure):
    """``Model`` of step.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _INTS),
        *((name, ctypes.c_float) for name in _FLOATS),
        *((name, ctypes.c_void_p) for name in ("embed", "norm", "head", "layer")),
    )


class Asking(BucketedRows):
    """A plan that notes how each layer attends, by PyTorch: what the step in C is compared with is not in C itself."""

    def __init__(self, row_starts: Tensor) -> None:
        super().__init__(row_starts, torch.arange(int(row_starts[-1])))
        self.seen: dict[int, tuple[int, int, How]] = {}
        """Query heads, key heads and the rest, by layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Note the layer's settings, and attend as ever."""
        self.seen[layer] = query.shape[1], key.shape[1], how
        return super().attend(layer, query, key, value, how)


class Weights:
    """A copy of the weights of ``model``, in the order of ``library``, and its settings.

    Args:
        library: the compiled step.
        model: a causal language model in float32 on a CPU; it is not needed afterwards.
        seen: how each of its layers attends.
        positions: positions that a row may have.
        interleaved: pairs that turn together lie side by side, as GLM's do, and not half a head apart.

    Raises:
        Unavailable: the model is laid out in a way that the step does not know.
    """

    def __init__(
        self, library: Library, model: Any, seen: dict[int, tuple[int, int, How]], *, positions: int, interleaved: bool
    ) -> None:
        self._calls, self._interleaved = library.calls, interleaved
        self._panel: int = library.calls.panel()
        self._names = {id(weight): name for name, weight in model.named_parameters()}
        # A weight has several stores where it is both embedding and head.
        self._stores: dict[str, list[Callable[[Tensor], object]]] = {name: [] for name in self._names.values()}
        self._kept: list[Tensor] = []
        base = model.base_model
        self._layers = (CLayer * len(base.layers))()
        self.c = _model_settings(model, seen)
        """What step.c's functions get."""
        self.c.layer = ctypes.addressof(self._layers)
        self._place_ends(model)
        norms, share = _norms_of(base.layers[0]), getattr(model.config, "residual_multiplier", 1.0)
        for layer, module in zip(self._layers, base.layers, strict=True):
            self._place_attention(layer, module.self_attn, share)
            self._place_rest(layer, module.mlp, model.config.intermediate_size, share)
            for field, name in zip(_NORMS, norms, strict=True):
                setattr(layer, field, self._norm(getattr(module, name) if name else None))
        self._read_angles(base, [seen[number][2].window or 0 for number in range(len(self._layers))], positions)
        if unknown := [name for name, stores in self._stores.items() if not stores]:
            raise Unavailable(f"it does not know the weights {unknown[0]}")
        for name, weight in model.named_parameters():
            self.take(name, weight)

    def take(self, name: str, weight: Tensor) -> None:
        """Copy a weight in, by the name that the model has for it."""
        for store in self._stores[name]:
            store(weight.detach().to(device="cpu", dtype=torch.float32))

    def room(self, tokens: int) -> Tensor:
        """Make memory for the keys and values of a row of so many tokens, a multiple of ``LANES``."""
        c = self.c
        return torch.empty(2 * c.layers * c.kheads * c.D * tokens + LANES)

    def _place_ends(self, model: Any) -> None:
        base, head, c = model.base_model, model.get_output_embeddings().weight, self.c
        c.embed_scale = _embedding_scale(model)
        c.norm = self._norm(base.norm)
        c.head = self._panels(c.vocab, c.d, [(head, 0, _same)])
        # Where the two are one, the step reads a token's embedding from the head's panels.
        embed = base.embed_tokens.weight
        c.embed = None if embed is head else self._keep(torch.empty(embed.shape), [(embed, 0, _same)])

    def _place_attention(self, layer: CLayer, module: Any, share: float) -> None:
        c, halves = self.c, self._halves
        queries, keys = c.heads * c.D, c.kheads * c.D
        if hasattr(module, "qkv_proj"):
            joined, bias = module.qkv_proj.weight, module.qkv_proj.bias
            weights: list[_Part] = [
                (joined, 0, lambda w: halves(w[:queries])),
                (joined, queries, lambda w: halves(w[queries : queries + keys])),
                (joined, queries + keys, lambda w: w[queries + keys :]),
            ]
            biases: list[_Part] = [] if bias is None else [(bias, 0, _same)]
        else:
            parts = (module.q_proj, 0, halves), (module.k_proj, queries, halves), (module.v_proj, queries + keys, _same)
            weights = [(part.weight, offset, change) for part, offset, change in parts]
            biases = [(part.bias, offset, change) for part, offset, change in parts if part.bias is not None]
        layer.qkv = self._panels(queries + 2 * keys, c.d, weights)
        layer.qkv_bias = self._bias(queries + 2 * keys, biases)
        # Granite's: what a layer adds to the stream is scaled.
        layer.out = self._panels(c.d, queries, [(module.o_proj.weight, 0, lambda w: w * share)])
        bias = module.o_proj.bias
        layer.out_bias = self._bias(c.d, [] if bias is None else [(bias, 0, lambda w: w * share)])
        layer.q_norm = self._norm(getattr(module, "q_norm", None))
        layer.k_norm = self._norm(getattr(module, "k_norm", None))

    def _place_rest(self, layer: CLayer, module: Any, width: int, share: float) -> None:
        c = self.c
        if hasattr(module, "gate_up_proj"):
            joined = module.gate_up_proj.weight
            parts: list[_Part] = [(joined, 0, lambda w: w[:width]), (joined, c.ff, lambda w: w[width:])]
        else:
            parts = [(module.gate_proj.weight, 0, _same), (module.up_proj.weight, c.ff, _same)]
        layer.gate_up = self._panels(2 * c.ff, c.d, parts)
        # The entries that fill the last vector are 0, and so is what they are multiplied by.
        layer.down = self._panels(c.d, c.ff, [(module.down_proj.weight, 0, lambda w: w * share)])

    def _panels(self, outputs: int, inputs: int, parts: Sequence[_Part]) -> int:
        """Make panels for weights [outputs, inputs], and have each part kept there, from an output on."""
        panels = torch.zeros(-(-outputs // self._panel) * self._panel * inputs)

        def keep(weight: Tensor, offset: int, change: _Change) -> None:
            part = change(weight).contiguous()
            sizes = map(ctypes.c_int64, (*part.shape, inputs, offset))
            self._calls.pack(ctypes.c_void_p(part.data_ptr()), *sizes, ctypes.c_void_p(panels.data_ptr()))

        for weight, offset, change in parts:
            self._add(weight, lambda new, offset=offset, change=change: keep(new, offset, change))
        self._kept.append(panels)
        return panels.data_ptr()

    def _keep(self, store: Tensor, parts: Sequence[_Part]) -> int:
        """Have each part kept in ``store``, from an entry on."""
        for weight, offset, change in parts:
            part = store[offset : offset + len(weight)]
            self._add(weight, lambda new, part=part, change=change: part.copy_(change(new)))
        self._kept.append(store)
        return store.data_ptr()

    def _bias(self, outputs: int, parts: Sequence[_Part]) -> int | None:
        return self._keep(torch.zeros(-(-outputs // self._panel) * self._panel), parts) if parts else None

    def _norm(self, module: Any) -> int | None:
        if module is None:
            return None
        # Gemma's norms multiply by 1 + weight: the norm of ones shows the factor.
        plain = torch.allclose(module(torch.ones_like(module.weight)), module.weight, atol=1e-4, rtol=1e-4)
        return self._keep(torch.empty(module.weight.shape), [(module.weight, 0, _same if plain else _one_more)])

    def _add(self, weight: Tensor, store: Callable[[Tensor], object]) -> None:
        self._stores[self._names[id(weight)]].append(store)

    def _read_angles(self, base: Any, windows: list[int], positions: int) -> None:
        """Read the cosines and sines of every position from the model's rotary module, by kind of layer."""
        at, addresses = torch.arange(positions)[None], dict[str | None, int]()
        for layer, window, module in zip(self._layers, windows, base.layers, strict=True):
            kind = getattr(module.self_attn, "layer_type", None) or getattr(module, "attention_type", None)
            try:
                cos, sin = base.rotary_emb(torch.empty(1, 1), at, kind)
            except TypeError:  # most models have one kind, and their module takes two arguments
                kind, (cos, sin) = None, base.rotary_emb(torch.empty(1, 1), at)
            self.c.rotated, half = cos.shape[-1], cos.shape[-1] // 2
            if cos.shape[-1] % 2 or cos.shape[-1] > self.c.D:
                raise Unavailable("its positions turn an odd number of a head's entries")
            apart = torch.equal(cos[..., :half], cos[..., half:])
            pick = slice(0, None, 2) if self._interleaved and not apart else slice(half)
            if kind not in addresses:
                self._kept.append(torch.stack((cos[0, :, pick], sin[0, :, pick]), 1).contiguous())
                addresses[kind] = self._kept[-1].data_ptr()
            layer.turns, layer.window = addresses[kind], window

    def _halves(self, weight: Tensor) -> Tensor:
        """Put pairs that turn together half a head apart: queries and keys alike, so their products stay the same."""
        if not self._interleaved:
            return weight
        heads, turned = weight.unflatten(0, (-1, self.c.D)), self.c.rotated
        return torch.cat((heads[:, 0:turned:2], heads[:, 1:turned:2], heads[:, turned:]), 1).flatten(0, 1)


def _same(weight: Tensor) -> Tensor:
    return weight


def _one_more(weight: Tensor) -> Tensor:
    return 1 + weight


def _norms_of(layer: nn.Module) -> tuple[str | None, ...]:
    names = {name for name, module in layer.named_children() if not isinstance(module, nn.Dropout)}
    for layout in _LAYOUTS:
        if names == {"self_attn", "mlp", *(name for name in layout if name)}:
            return layout
    raise Unavailable(f"its layers consist of {', '.join(sorted(names))}")


def _model_settings(model: Any, seen: dict[int, tuple[int, int, How]]) -> CModel:
    config, head = model.config, model.get_output_embeddings()
    shapes = {(heads, keys, how.scale, how.softcap) for heads, keys, how in seen.values()}
    if len(shapes) != 1 or len(seen) != len(model.base_model.layers):
        raise Unavailable("its layers attend in different ways")
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in _ACTIVATIONS:
        raise Unavailable(f"its activation is {activation}")
    if head.bias is not None:
        raise Unavailable("its head has a bias")
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") in ("dynamic", "longrope"):
        raise Unavailable("the angles of its positions depend on the longest row")
    ((heads, keys, scale, softcap),) = shapes
    return CModel(
        layers=len(model.base_model.layers),
        d=config.hidden_size,
        heads=heads,
        kheads=keys,
        # Not that of the tensors that attention gets: they may have been widened.
        D=model.base_model.layers[0].self_attn.head_dim,
        ff=-(-config.intermediate_size // LANES) * LANES,
        vocab=config.vocab_size,
        gelu=_ACTIVATIONS[activation],
        eps=config.rms_norm_eps,
        scale=scale,
        softcap=softcap or 0.0,
        final_cap=softcap_of(model) or 0.0,
        logit_scale=1 / logit_divisor(model),
    )


def _embedding_scale(model: Any) -> float:
    """Return the factor of a token's embedding: of the module itself, as Gemma's, times the model's, as Granite's."""
    embed, token = model.base_model.embed_tokens, torch.tensor([5 % model.config.vocab_size])
    weight = embed.weight[token]
    ratio = (embed(token) / weight)[weight != 0]
    return float(ratio.median()) * getattr(model.config, "embedding_multiplier", 1.0)
