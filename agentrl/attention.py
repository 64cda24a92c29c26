"""Attention over rows of different length, without pads: for training packs and for the engine's cached slots.

Registered with transformers under the name ``agentrl``: a model loaded with that implementation takes one keyword,
``agentrl_plan``, which says how the T packed tokens of its input fall into rows.

Legend: T packed tokens, R rows, L longest row, B cached rows in use, H query heads, K key heads, G = H/K, D head size.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from agentrl.errors import ConfigError

NAME = "agentrl"
_SIMILAR, _SLACK = 0.75, 16
"""A row joins a bucket when it is at least this share of its longest row, give or take that many tokens."""
_QUERIES, _HEAD, _KEYS = 4, 16, (192, 384, 512)
"""Queries and head sizes of cached slots are padded to a multiple of these, keys to one of these above a multiple of
the last. With others a CPU's kernels add up in another order, so that a token's last bits tell what ran beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """What a layer does to its scores."""

    scale: float
    """Factor of each product of query and key."""
    window: int | None = None
    """How many keys, its own included, a query sees; None is all."""
    softcap: float | None = None
    """The c of scores that are c·tanh(s/c), as Gemma 2's are."""


class Plan(Protocol):
    """How the packed tokens of one forward pass attend to each other."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Attention of one layer: ``query`` [T, H, D], ``key`` and ``value`` [T, K, D] to [T, H, D]."""
        ...


def padded_keys(length: int) -> int:
    """How many keys to look at where the longest row has ``length``."""
    whole, rest = divmod(length - 1, _KEYS[-1])
    return whole * _KEYS[-1] + next(size for size in _KEYS if rest < size)


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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Pads on the right for the kernel only: a causal row never sees what follows it."""
        shares = query.shape[1] // key.shape[1]
        # enable_gqa has no fast kernel on a CPU.
        grouped = query.device.type != "cpu" and how.softcap is None
        outs: list[Tensor] = []
        for bucket in self._buckets:
            q, k, v = (_cells(tensor, bucket) for tensor in (query, key, value))
            length = bucket.shape[1]
            if shares > 1 and not grouped:
                k, v = (tensor.repeat_interleave(shares, dim=1) for tensor in (k, v))
            if how.softcap is not None or (how.window is not None and how.window < length):
                out = _masked(q, k, v, _band(length, how.window or length, query), how)
            else:
                out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=how.scale, enable_gqa=grouped)
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
    return like.new_zeros(length, length).masked_fill((distance < 0) | (distance >= window), float("-inf"))


def _masked(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, how: How) -> Tensor:
    """Attention of [N, H, n, D] over [N, K, L, D] with an additive mask that fits [N, H, n, L]; a cap wants K = H."""
    if how.softcap is None:
        grouped = query.shape[1] > keys.shape[1]
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=how.scale, enable_gqa=grouped)
    scores = how.softcap * torch.tanh(query @ keys.transpose(-1, -2) * (how.scale / how.softcap))
    return torch.softmax(scores + mask, dim=-1) @ values


class SlotCache:
    """Keys and values of many rows.

    Each layer has a tensor [slots, 2, K, capacity, D], made when the layer first attends: K and D may differ by layer.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._capacity = 0
        self._layers: dict[int, Tensor] = {}

    def layer(self, number: int, key: Tensor) -> Tensor:
        """The store of a layer whose keys are like ``key`` [T, K, D]."""
        if number not in self._layers:
            _, heads, size = key.shape
            self._layers[number] = key.new_zeros(self._slots, 2, heads, self._capacity, size)
        return self._layers[number]

    def reserve(self, length: int) -> None:
        """Make room for rows of ``length`` tokens, keeping what is cached."""
        have = self._capacity
        if length > have:
            self._capacity = max(length, have + have // 2)
            for number, store in self._layers.items():
                grown = store.new_zeros(*store.shape[:3], self._capacity, store.shape[4])
                grown[:, :, :, :have] = store
                self._layers[number] = grown

    def move(self, source: list[int], target: list[int]) -> None:
        """Put row ``source[i]`` where ``target[i]`` is, all at once; both lists name the same rows in other orders."""
        for store in self._layers.values():
            store[target] = store[source]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` cached tokens of one row to another."""
        for store in self._layers.values():
            store[target, :, :, :length] = store[source, :, :, :length]


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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Write the new keys and values, then attend over all cached ones.

        Tokens behind the planned ones are padding: they are not cached, and their rows of the result are 0.
        """
        store, real = self.cache.layer(layer, key), len(self.rows)
        store[self.rows, 0, :, self.positions] = key[:real]
        store[self.rows, 1, :, self.positions] = value[:real]
        keys, values = store[: self.used, 0, :, : self.length], store[: self.used, 1, :, : self.length]
        single = len(self.active) == real
        queries = query[:real] if single else query[self.last]
        if len(self.active) != self.used:
            queries = query.new_zeros(self.used, *query.shape[1:]).index_copy(0, self.active, queries)
        mask = self._windowed(self.mask, self.positions[self.last], how.window)
        out = _grouped(queries[:, :, None], keys, values, mask, how)[:, :, 0]
        if real == self.used == len(self.active) == len(query):
            return out
        result = torch.zeros_like(query)
        result[self.last] = out[self.active]
        if self.extra is None or self.extra_rows is None or self.extra_mask is None:
            return result
        mask = self.extra_mask
        if how.window is not None:
            mask = mask + _too_far(self.positions[self.extra], self.length, how.window, mask)[:, None]
        more = _grouped(query[self.extra].transpose(1, 2), keys[self.extra_rows], values[self.extra_rows], mask, how)
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


def _grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, how: How) -> Tensor:
    """Attention of [N, H, n, D] over [N, K, L, D]: the G heads that share keys stand side by side as queries."""
    rows, heads, count, size = query.shape
    queries = heads // keys.shape[1] * count
    folded = query.reshape(rows, keys.shape[1], queries, size)
    if count > 1:
        mask = mask.repeat(1, 1, queries // count, 1)
    if missing := -queries % _QUERIES:
        folded = pad(folded, (0, 0, 0, missing))
        # A single mask row is broadcast to all queries, padding too.
        mask = mask if count == 1 else pad(mask, (0, 0, 0, missing))
    out = _masked(folded, keys, values, mask, how)[:, :, :queries]
    return out.reshape(rows, heads, count, size)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The form that transformers calls: [1, H, T, D] in, [1, T, H, D] out."""
    plan: Any = options["agentrl_plan"]
    if options.get("s_aux") is not None:
        raise ConfigError(f"the model's attention has sinks, which attention {NAME!r} does not have")
    how = How(scale=options["scaling"], window=options.get("sliding_window"), softcap=options.get("softcap"))
    # DeepSeek's values are shorter than its keys: zeros behind them change no product.
    wanted = value.shape[-1]
    size = -(-max(key.shape[-1], wanted) // _HEAD) * _HEAD
    q, k, v = (_widened(tensor[0].transpose(0, 1), size) for tensor in (query, key, value))
    return plan.attend(module.layer_idx, q, k, v, how)[None, ..., :wanted], None


def _widened(tensor: Tensor, size: int) -> Tensor:
    return tensor if tensor.shape[-1] == size else pad(tensor, (0, size - tensor.shape[-1]))


def _no_mask(*_: object, **__: object) -> None:
    """The plan knows who may see whom: transformers builds no mask."""


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)
