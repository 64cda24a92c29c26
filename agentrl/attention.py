"""Attention over rows of different length, without pads: for training packs and for the engine's cached slots.

Registered with transformers under the name ``agentrl``: a model loaded with that implementation takes one keyword,
``agentrl_plan``, which says how the T packed tokens of its input fall into rows.

Legend: T packed tokens, R rows, L longest row, B cached rows in use, H query heads, K key heads, G = H/K, D head size.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from agentrl.errors import ConfigError

NAME = "agentrl"
_SIMILAR, _SLACK = 0.75, 16
"""A row joins a bucket when it is at least this share of its longest row, give or take that many tokens."""


class Plan(Protocol):
    """How the packed tokens of one forward pass attend to each other."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Attention of one layer: ``query`` [T, H, D], ``key`` and ``value`` [T, K, D] to [T, H, D]."""
        ...


class PackedRows:
    """Rows laid end to end, each attending causally to itself only.

    Args:
        row_starts: int64 [R+1], offsets of the rows in the pack.
        source: which token of the model's input stands at each place of the rows, int64 [T]: rows that begin alike may
            name the same tokens, which are then computed once. Without it every place has a token of its own.
    """

    def __init__(self, row_starts: Tensor, source: Tensor | None = None) -> None:
        device = row_starts.device
        if source is None:
            source = torch.arange(int(row_starts[-1]), device=device)
        lengths = row_starts.diff()
        self._buckets: list[Tensor] = []
        for bucket in _buckets(lengths.tolist()):
            rows = torch.tensor(bucket, device=device)
            within = torch.arange(int(lengths[bucket[0]]), device=device)
            # Pads, all on the right, repeat the row's first token.
            within = torch.where(within < lengths[rows][:, None], within, 0)
            self._buckets.append(source[row_starts[rows][:, None] + within])
        cells = torch.cat([bucket.flatten() for bucket in self._buckets])
        # Of the cells that hold a token the first is no pad: its row holds the token further left.
        first = torch.full((int(source.max()) + 1,), len(cells), device=device)
        self._cell = first.scatter_reduce_(0, cells, torch.arange(len(cells), device=device), "amin")

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Pads on the right for the kernel only: a causal row never sees what follows it."""
        shares = query.shape[1] // key.shape[1]
        # enable_gqa has no fast kernel on a CPU.
        repeats, grouped = (shares, False) if query.device.type == "cpu" else (1, shares > 1)
        outs: list[Tensor] = []
        for bucket in self._buckets:
            q, k, v = (_cells(tensor, bucket) for tensor in (query, key, value))
            mask = None if window is None or window >= bucket.shape[1] else _band(bucket.shape[1], window, query)
            if repeats > 1:
                k, v = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v))
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs).index_select(0, self._cell)


def _buckets(lengths: list[int]) -> list[list[int]]:
    """Rows of similar length together, the longest first: pads cost as much as tokens."""
    buckets: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if not buckets or lengths[row] < _SIMILAR * lengths[buckets[-1][0]] - _SLACK:
            buckets.append([])
        buckets[-1].append(row)
    return buckets


def _cells(tensor: Tensor, bucket: Tensor) -> Tensor:
    """The tokens [C, H, D] that a bucket of rows [R, L] holds, as [R, H, L, D]."""
    return tensor.index_select(0, bucket.flatten()).unflatten(0, bucket.shape).transpose(1, 2)


def _band(length: int, window: int, like: Tensor) -> Tensor:
    distance = torch.arange(length, device=like.device)[:, None] - torch.arange(length, device=like.device)
    return (distance >= 0) & (distance < window)


class SlotCache:
    """Keys and values of many rows, all layers in one tensor ``store`` [slots, layers, 2, K, capacity, D]."""

    def __init__(self, slots: int, layers: int, heads: int, head_dim: int, like: Tensor) -> None:
        self._shape = (slots, layers, 2, heads)
        self._head_dim = head_dim
        self.store = like.new_zeros(*self._shape, 0, head_dim)

    def reserve(self, length: int) -> None:
        """Make room for rows of ``length`` tokens, keeping what is cached."""
        have = self.store.shape[4]
        if length > have:
            grown = self.store.new_zeros(*self._shape, max(length, have + have // 2, 128), self._head_dim)
            grown[:, :, :, :, :have] = self.store
            self.store = grown

    def move(self, source: list[int], target: list[int]) -> None:
        """Put row ``source[i]`` where ``target[i]`` is, all at once; both lists name the same rows in other orders."""
        self.store[target] = self.store[source]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` cached tokens of one row to another."""
        self.store[target, :, :, :, :length] = self.store[source, :, :, :, :length]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """New tokens of cached rows: mostly one each, more where a prompt or a tool's answer comes in.

    The last new token of each row attends in one batch with a single query; the ``extra`` ones before it, of the few
    rows that have any, in a padded batch of their own.
    """

    cache: SlotCache
    """Where keys and values are kept."""
    rows: Tensor
    """Cache row of each new token [T]."""
    positions: Tensor
    """Position of each new token within its row [T]."""
    last: Tensor
    """Index in T of the last new token of each active row [B]."""
    active: Tensor
    """Cache row of each active row [B]."""
    used: int
    """Rows 0 … used-1 of the cache take part; those not active compute what nobody reads."""
    length: int
    """Keys to look at: the longest active row."""
    mask: Tensor
    """Additive mask of the last tokens [used, 1, 1, length]."""
    extra: Tensor | None = None
    """Index in T of the tokens before the last ones [P, n], padded by repeating each row's first."""
    extra_rows: Tensor | None = None
    """Cache row of each row of ``extra`` [P]."""
    extra_mask: Tensor | None = None
    """Additive mask of the extra tokens [P, 1, n, length]."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Write the new keys and values, then attend over all cached ones."""
        store = self.cache.store
        store[self.rows, layer, 0, :, self.positions] = key
        store[self.rows, layer, 1, :, self.positions] = value
        keys, values = store[: self.used, layer, 0, :, : self.length], store[: self.used, layer, 1, :, : self.length]
        queries = query if len(self.last) == len(query) else query[self.last]
        if len(self.active) != self.used:
            queries = query.new_zeros(self.used, *query.shape[1:]).index_copy(0, self.active, queries)
        mask = self._windowed(self.mask, self.positions[self.last], window)
        out = _grouped(queries[:, :, None], keys, values, mask, scale)[:, :, 0]
        if len(self.active) != self.used:
            out = out[self.active]
        if self.extra is None or self.extra_rows is None or self.extra_mask is None:
            return out
        result = torch.empty_like(query)
        result[self.last] = out
        mask = self.extra_mask
        if window is not None:
            mask = mask + _too_far(self.positions[self.extra], self.length, window, mask)[:, None]
        more = _grouped(query[self.extra].transpose(1, 2), keys[self.extra_rows], values[self.extra_rows], mask, scale)
        result[self.extra.flatten()] = more.transpose(1, 2).flatten(0, 1)
        return result

    def _windowed(self, mask: Tensor, positions: Tensor, window: int | None) -> Tensor:
        if window is None or window >= self.length:
            return mask
        far = _too_far(positions[:, None], self.length, window, mask)
        return mask.index_add(0, self.active, far[:, None])


def _too_far(positions: Tensor, length: int, window: int, like: Tensor) -> Tensor:
    distance = positions[..., None] - torch.arange(length, device=positions.device)
    return like.new_zeros(distance.shape).masked_fill(distance >= window, float("-inf"))


def _grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of [N, H, n, D] over [N, K, L, D]: the G heads that share keys stand side by side as queries."""
    rows, heads, count, size = query.shape
    shared = heads // keys.shape[1]
    folded = query.reshape(rows, keys.shape[1], shared * count, size)
    if count > 1:
        mask = mask.repeat(1, 1, shared, 1)
    out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(rows, heads, count, size)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: object,
) -> tuple[Tensor, None]:
    """The form that transformers calls: [1, H, T, D] in, [1, T, H, D] out."""
    plan, scale, window = options["agentrl_plan"], options["scaling"], options.get("sliding_window")
    if odd := sorted(name for name in ("softcap", "s_aux") if options.get(name) is not None):
        raise ConfigError(f"the model's attention needs {' and '.join(odd)}, which attention {NAME!r} does not have")
    layer = module.layer_idx
    assert isinstance(plan, PackedRows | SlotPlan) and isinstance(scale, float) and isinstance(layer, int)
    assert window is None or isinstance(window, int)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return plan.attend(layer, q, k, v, scale=scale, window=window)[None], None


def _no_mask(*_: object, **__: object) -> None:
    """The plan knows who may see whom: transformers builds no mask."""


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)
