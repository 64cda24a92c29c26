"""Attention over packed rows of different length.

Registered with transformers under the name ``agentrl``: a model loaded with that implementation takes one keyword,
``agentrl_plan``, which splits the T packed tokens of its input into rows.

Legend: T packed tokens, R rows, H query heads, K key heads, G = H/K, D head size; N rows of a bucket, which attend from
m tokens over n.
"""

from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from agentrl.errors import ConfigError
from agentrl.models.native import NativeRows, computes

try:
    from torch.nn.attention.varlen import varlen_attn

    # PyTorch 2.10 has it without scales and windows; 2.11 shares keys among heads without being asked.
    if "window_size" not in (_options := signature(varlen_attn).parameters):
        varlen_attn = None
    _GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _options else {}
except ImportError:
    varlen_attn = None

NAME = "agentrl"
_SIMILAR, _SLACK = 0.75, 16
"""A row joins a bucket if it has at least this share of the tokens of the bucket's longest row, less that many."""
_LONG = 1024
"""Tokens from which a row attends by itself."""
_AT_ONCE = 2048
"""Most tokens of a row that attends beside others by FlashAttention."""
_QUERIES = 256
"""Queries that attend at a time where a mask is needed."""
_HEAD = 16
"""Head sizes are padded to a multiple of this: for other sizes a CPU's kernels sum in a different order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How a layer turns products of query and key into scores."""

    scale: float
    """Factor of each product of query and key."""
    window: int | None = None
    """Number of keys, its own included, that a query sees; None is all."""
    softcap: float | None = None
    """The c of scores that are c·tanh(s/c), as Gemma 2's are."""


class PackedRows:
    """Rows laid end to end, each attending causally to itself only.

    A CPU computes them in C where it can, and a GPU by FlashAttention where it can; elsewhere they attend in buckets.

    Args:
        row_starts: int64 [R+1], offsets of the rows in the pack.
        source: index of the input token at each place of the rows, int64 [places], counted in the order in which they
            first appear: rows that share a prefix may name the same tokens, which are then computed once. Without it
            every place has a token of its own.
    """

    def __init__(self, row_starts: Tensor, source: Tensor | None = None) -> None:
        if source is None:
            source = torch.arange(int(row_starts[-1]), device=row_starts.device)
        self._rows = row_starts, source
        self._native: NativeRows | None = None
        self._varlen: VarlenRows | None = None
        self._bucketed: BucketedRows | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Attend by the fastest way that there is; results of different ways differ by rounding.

        One layer: ``query`` [T, H, D], ``key`` and ``value`` [T, K, D] to [T, H, D].
        """
        if computes(query.device, query.dtype):
            self._native = self._native or NativeRows(*self._rows)
            return self._native.attend(query, key, value, scale=how.scale, window=how.window, softcap=how.softcap)
        if attends_at_once(query, how) and self._short:
            self._varlen = self._varlen or VarlenRows(*self._rows)
            return self._varlen.attend(query, key, value, how)
        self._bucketed = self._bucketed or BucketedRows(*self._rows)
        return self._bucketed.attend(layer, query, key, value, how)

    @cached_property
    def _short(self) -> bool:
        """True where rows do better side by side: for a single long one a Hopper card has a faster kernel."""
        lengths = self._rows[0].diff()
        return len(lengths) > 1 and int(lengths.max()) <= _AT_ONCE


def attends_at_once(query: Tensor, how: How) -> bool:
    """Return True if PyTorch's FlashAttention takes rows of different length: on a GPU since Ampere, in 16 bits.

    Its gradients differ from run to run, so a run that is to be repeatable does without.
    """
    if varlen_attn is None or torch.are_deterministic_algorithms_enabled():
        return False
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    return how.softcap is None and query.shape[-1] <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)


class VarlenRows:
    """:class:`PackedRows` by FlashAttention: all rows at once, without padding.

    Each token is a query once, in the row that computes it. A row's own tokens are its last ones, so the rows' queries,
    one row after the other, are the pack as it is. Only keys that rows share are copied.

    Args:
        row_starts: as of ``PackedRows``.
        source: as of ``PackedRows``.
    """

    def __init__(self, row_starts: Tensor, source: Tensor) -> None:
        lengths = row_starts.diff()
        # Tokens are numbered in the order in which they first appear: a new token exceeds all before it.
        own = source > pad(source.cummax(0).values[:-1], (1, 0), value=-1)
        counts = pad(own.cumsum(0), (1, 0))[row_starts].diff()
        # A row that begins another one has no token of its own, and asks nothing.
        asks = counts > 0
        counts, kept_lengths = counts[asks], lengths[asks]
        self._query_starts, self._key_starts = (pad(n.cumsum(0), (1, 0)).int() for n in (counts, kept_lengths))
        self._most_queries, self._most_keys = int(counts.max()), int(kept_lengths.max())
        keys = source[asks.repeat_interleave(lengths)]
        self._keys = None if _consecutive(keys) else keys

    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Attend as ``PackedRows`` does; queries and keys of a row end at the same token."""
        assert varlen_attn is not None
        if self._keys is not None:
            key, value = key.index_select(0, self._keys), value.index_select(0, self._keys)
        out: Any = varlen_attn(
            query,
            key,
            value,
            self._query_starts,
            self._key_starts,
            self._most_queries,
            self._most_keys,
            scale=how.scale,
            window_size=(-1 if how.window is None else how.window - 1, 0),
            **_GROUPED,
        )
        return out


class BucketedRows:
    """:class:`PackedRows` by PyTorch's ordinary attention.

    Short rows attend in padded batches of similar length. A long row attends by itself, without padding or copies, and
    tokens that an earlier row has computed are only keys in it.

    Args:
        row_starts: as of ``PackedRows``.
        source: as of ``PackedRows``.
    """

    def __init__(self, row_starts: Tensor, source: Tensor) -> None:
        device = row_starts.device
        starts = row_starts.tolist()
        lengths = [end - begin for begin, end in pairwise(starts)]
        # For each bucket the queries [N, m], which are the last tokens of the keys [N, n].
        self._buckets: list[tuple[_Cells, _Cells]] = []
        cells: list[Tensor] = []
        for row in (row for row, length in enumerate(lengths) if length >= _LONG):
            tokens = source[starts[row] : starts[row + 1]]
            # Tokens are numbered in the order of their rows, so a row's own tokens have numbers above all before it.
            own = tokens[tokens > source[: starts[row]].max()] if row else tokens
            if len(own):
                self._add(cells, own[None], tokens[None])
        for bucket in _buckets([row for row, length in enumerate(lengths) if length < _LONG], lengths):
            rows = torch.tensor(bucket, device=device)
            within = torch.arange(lengths[bucket[0]], device=device)
            # Padding on the right repeats the row's first token: any valid index will do.
            within = torch.where(within < row_starts.diff()[rows][:, None], within, 0)
            tokens = source[row_starts[rows][:, None] + within]
            self._add(cells, tokens, tokens)
        held = torch.cat(cells)
        # Each token's result is read from the first cell that holds the token, which is no padding: padding follows the
        # token that it repeats. With "amin" the choice does not depend on the order in which the device scatters.
        cell = torch.full((int(source.max()) + 1,), len(held), device=device)
        cell.scatter_reduce_(0, held, torch.arange(len(held), device=device), "amin")
        self._cell = None if _consecutive(cell) and len(cell) == len(held) else cell
        self._bands: dict[int | None, Tensor] = {}
        self._longest = max(lengths)

    def _add(self, cells: list[Tensor], queries: Tensor, keys: Tensor) -> None:
        self._buckets.append((_Cells.of(queries), _Cells.of(keys)))
        cells.append(queries.flatten())

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Attend bucket by bucket. Padding on the right changes no result: a causal row never sees what follows it."""
        outs: list[Tensor] = []
        for queries, keys in self._buckets:
            out = self._causal(queries.pick(query), keys.pick(key), keys.pick(value), how)
            outs.append(out.transpose(1, 2).flatten(0, 1))
        packed = outs[0] if len(outs) == 1 else torch.cat(outs)
        return packed if self._cell is None else packed.index_select(0, self._cell)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Attend from the last m tokens of each row [N, H, m, D] over all n, [N, K, n, D]."""
        count, length, window = query.shape[2], key.shape[2], how.window
        if window is not None and window >= length:
            window = None
        plain = count == length and window is None and how.softcap is None
        # enable_gqa has no fast kernel on a CPU, nor with a mask, nor in float32.
        grouped = plain and query.device.type != "cpu" and query.dtype != torch.float32
        q, k, v = (query, key, value) if grouped else same_heads(query, key, value)
        if plain:
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=how.scale, enable_gqa=grouped)
        else:
            out = self._in_chunks(q, k, v, window, how)
        return out.reshape(query.shape)

    def _in_chunks(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, how: How) -> Tensor:
        """Attend from a few queries at a time, so that mask and scores grow with a row and not with its square."""
        count, length = query.shape[2], key.shape[2]
        # One mask serves all chunks: the mask of fewer queries or keys is its lower right corner, which needs no copy.
        if window not in self._bands:
            # It is the mask of the last queries of the longest row, over all keys that they see.
            seen = self._longest if window is None else min(self._longest, _QUERIES - 1 + window)
            last = torch.arange(max(0, seen - _QUERIES), seen, device=query.device)
            self._bands[window] = additive_mask(last, 0, seen, window, query)
        outs: list[Tensor] = []
        for begin in range(0, count, _QUERIES):
            part = query[:, :, begin : begin + _QUERIES]
            end = length - count + begin + part.shape[2]
            first_key = 0 if window is None else max(0, end - part.shape[2] - window + 1)
            band = self._bands[window][-part.shape[2] :, first_key - end :]
            attended = part, key[:, :, first_key:end], value[:, :, first_key:end], band, how
            # A softcap's scores and copies of the mask are large: the backward pass computes them again.
            again = how.softcap is not None or query.device.type != "cpu"
            outs.append(checkpoint(masked, *attended, use_reentrant=False) if again else masked(*attended))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """Which tokens the rows of a bucket hold."""

    shape: torch.Size
    """Rows and tokens of each, (N, n)."""
    begin: int
    """The first token, where they follow each other."""
    index: Tensor | None
    """Index of each token [N·n], where they don't."""

    @classmethod
    def of(cls, tokens: Tensor) -> "_Cells":
        flat = tokens.flatten()
        return cls(shape=tokens.shape, begin=int(flat[0]), index=None if _consecutive(flat) else flat)

    def pick(self, tensor: Tensor) -> Tensor:
        """Select the rows' tokens of [C, H, D] as [N, H, n, D], by a view where they follow each other."""
        if self.index is None:
            cells = tensor[self.begin : self.begin + self.shape.numel()]
        else:
            cells = tensor.index_select(0, self.index)
        return cells.unflatten(0, self.shape).transpose(1, 2)


def _consecutive(index: Tensor) -> bool:
    return bool((index.diff() == 1).all())


def _buckets(rows: list[int], lengths: list[int]) -> list[list[int]]:
    """Group rows of similar length into buckets, the longest first: padding costs as much as tokens."""
    buckets: list[list[int]] = []
    for row in sorted(rows, key=lengths.__getitem__, reverse=True):
        if not buckets or lengths[row] < _SIMILAR * lengths[buckets[-1][0]] - _SLACK:
            buckets.append([])
        buckets[-1].append(row)
    return buckets


def same_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat keys and values for the query heads that share them: [N, H, m, D], [N, K, n, D]; no copy for one row."""
    rows, heads = key.shape[:2]
    shares = query.shape[1] // heads
    if shares == 1:
        return query, key, value
    if rows > 1:
        return query, key.repeat_interleave(shares, dim=1), value.repeat_interleave(shares, dim=1)
    # Heads that share keys as [K, G, m, D]: the kernel reads the same memory for each of them.
    k, v = (tensor[0, :, None].expand(-1, shares, -1, -1) for tensor in (key, value))
    return query[0].unflatten(0, (heads, shares)), k, v


def additive_mask(positions: Tensor, begin: int, end: int, window: int | None, like: Tensor) -> Tensor:
    """Make the additive mask of tokens at ``positions`` [m] over the keys from ``begin`` to ``end`` [m, end-begin]."""
    keys = torch.arange(begin, end, device=positions.device)
    hidden = keys > positions[:, None]
    if window is not None:
        hidden |= keys <= positions[:, None] - window
    return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def masked(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, how: How) -> Tensor:
    """Attend from [N, H, m, D] over [N, H, n, D], adding a mask that fits [N, H, m, n]."""
    if query.device.type != "cpu":
        # A GPU's kernels need an aligned mask, which a part of a larger mask may not be.
        mask = mask.contiguous()
    if how.softcap is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=how.scale)
    scores = how.softcap * torch.tanh(query @ keys.transpose(-1, -2) * (how.scale / how.softcap))
    return torch.softmax(scores + mask, dim=-1) @ values


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend with the signature that transformers calls: [1, H, T, D] in, [1, T, H, D] out."""
    plan: Any = options["agentrl_plan"]
    # transformers passes sinks as an option. To ignore it would compute another function than the model's.
    if options.get("s_aux") is not None:
        raise ConfigError(f"the model's attention has sinks, which attention {NAME!r} does not have")
    how = How(scale=options["scaling"], window=options.get("sliding_window"), softcap=options.get("softcap"))
    # DeepSeek's values are shorter than its keys: zeros behind them change no product.
    wanted = value.shape[-1]
    size = -(-max(key.shape[-1], wanted) // _HEAD) * _HEAD
    # squeeze and not tensor[0], whose gradient is copied into a tensor of zeros.
    q, k, v = (_widened(tensor.squeeze(0).transpose(0, 1), size) for tensor in (query, key, value))
    return plan.attend(module.layer_idx, q, k, v, how)[None, ..., :wanted], None


def _widened(tensor: Tensor, size: int) -> Tensor:
    return tensor if tensor.shape[-1] == size else pad(tensor, (0, size - tensor.shape[-1]))


def _no_mask(*_: object, **__: object) -> None:
    """Build no mask: the plan says which tokens attend to which."""


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)
