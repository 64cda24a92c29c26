"""The engine's cache: whatever comes in which order, a row gets what a whole forward gives it."""

import itertools

import pytest
import torch
from torch import Tensor

from agentrl.models import cache as cache_module
from agentrl.models.attention import How, PackedRows
from agentrl.models.cache import CachedRows, RowCache, padded_keys

from .test_attention import CPU_EXACT, HEADS, hows, random_heads, starts_of

pytestmark = pytest.mark.usefixtures("one_thread")
Talk = tuple[dict[int, int], list[dict[int, int]]]
SHORT: Talk = ({0: 9, 2: 6, 5: 8}, [{2: 4, 5: 1}, {0: 5, 2: 1, 5: 1}, {0: 1, 5: 4}, {0: 1, 5: 1}, {0: 2, 2: 1}, {5: 1}])
LONG: Talk = (
    {0: 5, 1: 1100, 3: 520},
    [{1: 500, 3: 511}, {0: 1, 3: 1}, {0: 1, 1: 300, 3: 1}, {0: 3, 1: 1, 3: 1}, {1: 298, 3: 6}, {1: 1}],
)
"""Tokens of each row, and for each step the new tokens of rows."""


@pytest.mark.parametrize(
    ("heads", "how", "talk", "short"),
    [
        *itertools.product(HEADS, hows(None, 1, 3, 100), [SHORT], [512]),
        *itertools.product([(4, 2)], hows(None, 3, 600), [LONG], [512, 1 << 30]),
    ],
)
def test_cached_rows_get_what_a_whole_forward_gives(heads: tuple[int, int], how: How, talk: Talk, short: int) -> None:
    """Prompts come in, tokens are generated and a tool answers, in rows with gaps; on a GPU all rows are short."""
    lengths, steps = talk
    query, key, value = random_heads(sum(lengths.values()), heads)
    offset = dict(zip(lengths, starts_of(tuple(lengths.values())).tolist(), strict=False))
    cache, have, got = RowCache(6, short), dict.fromkeys(lengths, 0), torch.zeros_like(query)
    for step in steps:
        plan = CachedRows(cache, [*step], [have[row] for row in step], [*step.values()], query)
        picked = torch.tensor([offset[r] + have[r] + i for r, count in step.items() for i in range(count)])
        assert plan.positions.tolist() == [have[r] + i for r, count in step.items() for i in range(count)]
        assert (plan.last + 1).tolist() == list(itertools.accumulate(step.values()))
        # Padding behind the tokens, such as the engine puts there.
        padded = torch.cat([picked, picked.new_zeros(-len(picked) % 4)])
        out = plan.attend(1, query[padded], key[padded], value[padded], how)
        got[picked] = out[: len(picked)]
        for row, count in step.items():
            have[row] += count
    assert have == lengths
    whole = PackedRows(starts_of(tuple(lengths.values())))
    torch.testing.assert_close(got, whole.attend(1, query, key, value, how), **CPU_EXACT)


def filled(lengths: list[int]) -> tuple[RowCache, list[Tensor]]:
    """A cache of rows of these lengths in two layers, and of each row its keys in the second."""
    cache, held = RowCache(len(lengths)), []
    for row, length in enumerate(lengths):
        for layer, heads in ((0, 1), (3, 2)):
            keys = torch.randn(length, heads, 8, generator=torch.Generator().manual_seed(10 * row + layer))
            CachedRows(cache, [row], [0], [length], keys).attend(layer, keys, keys, keys, How(scale=1.0))
        held.append(keys)
    return cache, held


def keys_of(cache: RowCache, row: int, length: int) -> Tensor:
    """What the second layer holds of a row."""
    return cache.row(3, row, length, torch.zeros(1, 2, 8))[0, :, :length].transpose(0, 1)


@pytest.mark.parametrize(
    ("source", "target", "length"), [(0, 1, 4), (1, 0, 600), (1, 0, 70), (1, 1, 600), (1, 1, 300), (1, 3, 513)]
)
def test_a_row_takes_over_the_beginning_of_another_and_goes_on(source: int, target: int, length: int) -> None:
    cache, held = filled([5, 900, 100, 700])
    cache.copy_prefix(source, target, length)
    assert torch.equal(keys_of(cache, target, length), held[source][:length])
    if source != target:
        assert torch.equal(keys_of(cache, source, len(held[source])), held[source])
    # One more token attends over what was copied and nothing else.
    new = torch.ones(1, 2, 8)
    out = CachedRows(cache, [target], [length], [1], new).attend(3, new, new, new, How(scale=0.5))
    row = torch.cat([held[source][:length], new])
    expected = PackedRows(torch.tensor([0, length + 1])).attend(3, row, row, row, How(scale=0.5))[-1:]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_memory_follows_the_tokens_and_not_the_longest_row() -> None:
    cache, _ = filled([4000, *[10] * 63])
    stores = [*cache._short.values(), *cache._long.values()]
    held = sum(store.untyped_storage().nbytes() for store in stores)
    assert held < (4000 * 1.5 + 64 * 512) * 3 * 2 * 8 * 4 < 64 * 4000 * 3 * 2 * 8 * 4 / 6
    cache.copy_prefix(1, 0, 0)
    assert not cache._long


@pytest.mark.parametrize("sizes", [(192, 384, 512), (256, 512), (512,)])
def test_keys_are_padded_to_sizes_that_add_up_alike(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "key_sizes", lambda: sizes)
    for length in (1, 192, 193, 385, 512, 513, 1025, 1500):
        padded = padded_keys(length)
        assert length <= padded and padded % 512 in {0, *sizes} and padded - length < 512
        assert not any(length <= padded - padded % 512 + size < padded for size in sizes if padded % 512)
