"""The engine's keys and values, and attention over them.

Rows that generate, one new token each, attend in one batch while they are short; on a GPU all rows are short. Longer
ones, and rows with more new tokens, such as a prompt or a tool's answer, attend one by one. On a CPU a token's result
has the same bits either way.

Legend: T new tokens of a step, B rows in the batch, H query heads, K key heads, G = H/K, D head size, n new tokens of
one row, L keys.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from agentrl.models.attention import How, additive_mask, masked, same_heads

SHORT = 512
"""Most tokens of a short row, and the block of keys that a CPU's kernel attends to at a time."""


@cache
def key_sizes() -> tuple[int, ...]:
    """Numbers of keys up to ``SHORT`` that this processor sums in the same order as that many; a last block has one.

    Which ones do is up to its kernels, which split sums at other places on each generation of processors: it is tried.
    """
    for sizes in ((192, 384), (256,)):
        if all(_alike(SHORT, size, 64) for size in sizes):
            return (*sizes, SHORT)
    return (SHORT,)


@cache
def query_multiple(size: int) -> int:
    """Return a multiple to which queries are padded, so that on this processor a query sums the same in any batch."""
    return next((count for count in (4, 8, 16) if _alike(count, SHORT, size)), 32)


def _alike(queries: int, keys: int, size: int) -> bool:
    """Return True if so many queries attend to so many keys to the same bits as ``SHORT`` queries to ``SHORT`` keys."""
    random = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, SHORT, size, generator=random, dtype=torch.float32, device="cpu")
    mask = torch.zeros(1, SHORT).masked_fill_(torch.arange(SHORT) >= keys, float("-inf"))
    few = scaled_dot_product_attention(query[:, :, :queries], key[:, :, :keys], value[:, :, :keys], mask[:, :keys])
    return torch.equal(few, scaled_dot_product_attention(query, key, value, mask)[:, :, :queries])


def padded_keys(length: int) -> int:
    """Round the length of a row up to a number of keys that sums in the same order (:func:`key_sizes`)."""
    blocks, rest = divmod(length - 1, SHORT)
    return blocks * SHORT + next(size for size in key_sizes() if rest < size)


def longest_short(device: torch.device) -> int:
    """Return the most tokens of a row that attends beside others: a GPU trades memory for larger steps."""
    return SHORT if device.type == "cpu" else 1 << 30


class RowCache:
    """Keys and values of many rows; memory follows the tokens that they hold.

    Short rows share a tensor [rows, 2, K, capacity, D] per layer, so that many of them can attend at once. A row that
    outgrows it has a tensor [2, K, capacity, D] of its own. Both are made when the layer first attends, since K and D
    may differ by layer.

    Args:
        rows: that it has room for.
        short: most tokens of a short row.
    """

    def __init__(self, rows: int, short: int = SHORT) -> None:
        self._rows, self.short_tokens = rows, short
        self._capacity = 0
        self._short: dict[int, Tensor] = {}
        self._long: dict[tuple[int, int], Tensor] = {}

    def reserve(self, length: int) -> None:
        """Make room for short rows of ``length`` tokens, keeping what is cached; longer ones get theirs in ``row``."""
        if min(length, self.short_tokens) > self._capacity:
            self._capacity = min(length, self.short_tokens)
            self._short = {layer: _grown(store, self._capacity) for layer, store in self._short.items()}

    def short(self, layer: int, key: Tensor) -> Tensor:
        """Return the store of the short rows of a layer whose keys are like ``key`` [T, K, D]."""
        if layer not in self._short:
            _, heads, size = key.shape
            self._short[layer] = key.new_zeros(self._rows, 2, heads, self._capacity, size)
        return self._short[layer]

    def row(self, layer: int, row: int, length: int, key: Tensor) -> Tensor:
        """Return the store of one row of a layer, with room for ``length`` tokens."""
        store = self._long.get((layer, row), self.short(layer, key)[row])
        if length > (have := store.shape[-2]):
            # A store grows by half at least, so that the sum of all copies is proportional to its final size.
            store = self._long[layer, row] = _grown(store, max(length, have + have // 2))
        return store

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Replace all of one row by the first ``length`` cached tokens of another, or of its own."""
        for layer, short in self._short.items():
            held = self._long.get((layer, source), short[source])[:, :, :length]
            self._long.pop((layer, target), None)
            if length > self.short_tokens:
                self._long[layer, target] = held.clone()
            else:
                short[target, :, :, :length] = held


def _grown(store: Tensor, length: int) -> Tensor:
    grown = store.new_zeros(*store.shape[:-2], length, store.shape[-1])
    grown[..., : store.shape[-2], :] = store
    return grown


class CachedRows:
    """The attention plan of a step: new tokens of cached rows, laid end to end.

    Args:
        cache: where keys and values are kept.
        rows: cache row of each row that takes part.
        cached: tokens that each of them holds.
        counts: new tokens of each, at least one.
        like: has the model's dtype and device.
    """

    def __init__(
        self, cache: RowCache, rows: Sequence[int], cached: Sequence[int], counts: Sequence[int], like: Tensor
    ) -> None:
        self._cache, self._like = cache, like
        ends = [have + count for have, count in zip(cached, counts, strict=True)]
        begins = [0, *accumulate(counts)]
        cache.reserve(padded_keys(max(ends)))
        self.positions = self._indices(p for have, end in zip(cached, ends, strict=True) for p in range(have, end))
        """Position of each new token within its row [T]."""
        self.last = self._indices(begins[1:]) - 1
        """Index in T of the last new token of each row."""
        all_rows = list(zip(rows, begins, counts, ends, strict=False))
        # Cache row, index in T of the first new token, number of new tokens, and length of the row with them.
        self._alone = [row for row in all_rows if row[2] > 1 or row[3] > cache.short_tokens]
        batch = [row for row in all_rows if row[2] == 1 and row[3] <= cache.short_tokens]
        self._rows = self._indices(row for row, *_ in batch)
        self._last = self._indices(end - 1 for *_, end in batch)
        # Where all tokens are the batch's own, a slice takes them without a copy.
        self._at = self._indices(begin for _, begin, *_ in batch) if self._alone else slice(len(batch))
        # A slice of the first rows is a view; selecting those of the batch would copy their keys and values each step.
        self._used = max((row + 1 for row, *_ in batch), default=0)
        self._length = padded_keys(max((end for *_, end in batch), default=1))
        self._masks: dict[object, Tensor] = {}

    def _indices(self, numbers: Iterable[int]) -> Tensor:
        return torch.tensor([*numbers], dtype=torch.int64, device=self._like.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Write the new keys and values, then attend over all cached ones.

        Tokens after the planned ones are padding: they are not cached, and their rows of the result are 0.
        """
        out = self._together(layer, query, key, value, how) if self._used else query[:0]
        # The common step, one new token for every row in order, needs no scatter.
        if len(out) == len(self._rows) == len(query):
            return out
        result = torch.zeros_like(query)
        result[self._at] = out[self._rows]
        for row, begin, count, end in self._alone:
            new = slice(begin, begin + count)
            store = self._cache.row(layer, row, padded_keys(end), key)
            for part, tensor in enumerate((key, value)):
                store[part, :, end - count : end] = tensor[new].transpose(0, 1)
            result[new] = self._alone_over(store, query[new], end, how)
        return result

    def _together(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Attend from the batch's tokens; the results of all rows in use [used, H, D], those of others without use."""
        store = self._cache.short(layer, key)
        for part, tensor in enumerate((key, value)):
            store[self._rows, part, :, self._last] = tensor[self._at]
        keys, values = (store[: self._used, part, :, : self._length] for part in (0, 1))
        queries = query[self._at]
        if len(queries) != self._used:
            queries = queries.new_zeros(self._used, *queries.shape[1:]).index_copy(0, self._rows, queries)
        if how.window not in self._masks:
            seen = additive_mask(self._last, 0, self._length, how.window, self._like)
            # Idle rows see all keys: with none, softmax would give NaN.
            mask = self._like.new_zeros(self._used, self._length).index_copy_(0, self._rows, seen)
            self._masks[how.window] = mask[:, None, None]
        return _one_each(queries, keys, values, self._masks[how.window], how)

    def _alone_over(self, store: Tensor, query: Tensor, end: int, how: How) -> Tensor:
        """Attend from the new tokens [n, H, D] of a row of ``end`` tokens."""
        count, first_key = len(query), 0
        if how.window is not None and how.softcap is None:
            # Keys that no token sees are skipped in units of the kernel's blocks; a softcap does not use that kernel.
            first_key = max(0, end - count + 1 - how.window) // SHORT * SHORT
        keys, values = store[:, None, :, first_key : padded_keys(end)]
        missing = -count % query_multiple(query.shape[-1])
        if (kind := (count, end, first_key, how.window)) not in self._masks:
            at = torch.arange(end - count, end + missing, device=query.device).clamp_(max=end - 1)
            self._masks[kind] = additive_mask(at, first_key, first_key + keys.shape[2], how.window, self._like)
        mask = self._masks[kind]
        if count == 1:
            return _one_each(query, keys, values, mask[:1], how)
        queries = pad(query.transpose(0, 1)[None], (0, 0, 0, missing))
        out = masked(*same_heads(queries, keys, values), mask, how)
        return out.reshape(queries.shape)[0, :, :count].transpose(0, 1)


def _one_each(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, how: How) -> Tensor:
    """Attend from one token of each row [N, H, D] over [N, K, L, D]; the G heads that share keys are G queries."""
    heads = keys.shape[1]
    folded = query.unflatten(1, (heads, -1))
    # Keys are read once for all heads that share them, and a single row of the mask serves all queries, padding too.
    shares = folded.shape[2]
    folded = pad(folded, (0, 0, 0, -shares % query_multiple(query.shape[-1])))
    return masked(folded, keys, values, mask, how)[:, :, :shares].flatten(1, 2)
