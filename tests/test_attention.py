"""Attention without pads: packs and cached slots give what transformers' own attention gives each row by itself."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from agentrl.attention import NAME, How, PackedRows, SlotCache, SlotPlan, _attention, _band, _masked, padded_keys
from agentrl.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")
RAGGED = [(5, 3, 1, 7), (4, 4, 4), (1,), (1, 1, 1), (2, 9)]
HEADS = [(4, 4), (4, 2), (6, 2), (2, 1)]
CPU_EXACT = {"rtol": 1e-10, "atol": 1e-10}


def starts_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def attend_slowly(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """One row [n, H, D], token by token and head by head."""
    out = torch.zeros_like(query)
    shared = query.shape[1] // key.shape[1]
    for i in range(query.shape[0]):
        first = 0 if window is None else max(0, i - window + 1)
        for head in range(query.shape[1]):
            keys, values = key[first : i + 1, head // shared], value[first : i + 1, head // shared]
            out[i, head] = torch.softmax(scale * (keys @ query[i, head]), 0) @ values
    return out


def random_heads(count: int, heads: tuple[int, int], size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(count, heads[0], size), (count, heads[1], size), (count, heads[1], size)]
    query, key, value = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query, key, value


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", RAGGED)
def test_a_pack_is_its_rows(lengths: tuple[int, ...], heads: tuple[int, int], window: int | None) -> None:
    query, key, value = random_heads(sum(lengths), heads)
    plan = PackedRows(starts_of(lengths))
    packed = plan.attend(0, query, key, value, How(scale=0.3, window=window))
    rows = [
        attend_slowly(*parts, 0.3, window)
        for parts in zip(*(tensor.split(list(lengths)) for tensor in (query, key, value)), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(rows), **CPU_EXACT)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", RAGGED)
def test_gradients_are_those_of_the_rows(lengths: tuple[int, ...], window: int | None) -> None:
    inputs = [tensor.requires_grad_() for tensor in random_heads(sum(lengths), (4, 2))]
    weight = torch.randn(sum(lengths), 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    packed = PackedRows(starts_of(lengths)).attend(0, *inputs, How(scale=0.3, window=window))
    got = torch.autograd.grad((packed * weight).sum(), inputs)
    parts = zip(*(tensor.split(list(lengths)) for tensor in (*inputs, weight)), strict=True)
    slow = torch.stack([(attend_slowly(q, k, v, 0.3, window) * w).sum() for q, k, v, w in parts]).sum()
    for ours, theirs in zip(got, torch.autograd.grad(slow, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, **CPU_EXACT)


def windowed(kind: str) -> Any:
    config: dict[str, Any] = {
        **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "sliding_window": 3},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "sliding window":
            return MistralForCausalLM(MistralConfig(**config)).double().eval()
        capped = Gemma2Config(**config, attn_logit_softcapping=0.3, initializer_range=0.5, query_pre_attn_scalar=4)
        return Gemma2ForCausalLM(capped).double().eval()


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [*itertools.product(["full", "sliding window"], ["eager", "sdpa"]), ("sliding window and cap", "eager")],
)
def test_whole_models_agree_with_transformers(model: Any, kind: str, theirs: str) -> None:
    """Hidden states and the gradients of every weight, a pack against its rows one by one."""
    ours = copy.deepcopy(model).double() if kind == "full" else windowed(kind)
    other = copy.deepcopy(ours)
    ours.set_attn_implementation(NAME)
    other.set_attn_implementation(theirs)
    lengths = (9, 1, 6, 6)
    tokens = torch.arange(sum(lengths)) * 7 % 50
    positions = torch.cat([torch.arange(length) for length in lengths])
    plan = PackedRows(starts_of(lengths))
    packed = ours.base_model(tokens[None], position_ids=positions[None], use_cache=False, agentrl_plan=plan)
    rows = [other.base_model(row[None], use_cache=False).last_hidden_state[0] for row in tokens.split(list(lengths))]
    near = {"rtol": 1e-4, "atol": 1e-4}  # eager takes its softmax in float32
    torch.testing.assert_close(packed.last_hidden_state[0], torch.cat(rows), **near)
    weight = torch.randn(rows[0].shape[1], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (packed.last_hidden_state[0] @ weight).sin().sum().backward()
    (torch.cat(rows) @ weight).sin().sum().backward()
    yours = {name: weights.grad for name, weights in other.base_model.named_parameters()}
    for name, weights in ours.base_model.named_parameters():
        torch.testing.assert_close(weights.grad, yours[name], **near, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("window", [None, 3])
def test_rows_that_begin_alike_may_share_their_tokens(window: int | None) -> None:
    """Three rows of 40, 9 and 7 tokens: the second begins with five of the first's tokens, the third is its own."""
    source = torch.cat([torch.arange(40), torch.arange(5), torch.arange(40, 51)])
    inputs = [tensor.requires_grad_() for tensor in random_heads(51, (4, 2))]
    starts, weight = starts_of((40, 9, 7)), torch.linspace(-1, 1, 51, dtype=torch.float64)[:, None, None]
    shared = PackedRows(starts, source).attend(0, *inputs, How(scale=0.3, window=window))
    copied = PackedRows(starts).attend(0, *(tensor[source] for tensor in inputs), How(scale=0.3, window=window))
    torch.testing.assert_close(shared[source], copied, **CPU_EXACT)
    apart = [i for i in range(56) if not 40 <= i < 45]
    got = torch.autograd.grad((shared * weight).sum(), inputs)
    wanted = torch.autograd.grad((copied[apart] * weight).sum(), inputs)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, **CPU_EXACT)


def test_heads_that_share_keys_need_no_copies_under_a_mask() -> None:
    """As on a GPU, where a windowed layer hands its keys over as they are."""
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in random_heads(9, (4, 2)))
    mask, how = _band(9, 3, query), How(scale=0.3, window=3)
    copied = _masked(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), mask, how)
    torch.testing.assert_close(_masked(query, key, value, mask, how), copied, **CPU_EXACT)


def test_rows_do_not_see_each_other() -> None:
    query, key, value = random_heads(12, (4, 2))
    plan = PackedRows(starts_of((5, 4, 3)))
    before = plan.attend(0, query, key, value, How(scale=0.3, window=None))
    for tensor in (query, key, value):
        tensor[5:9] = 7.0
    after = plan.attend(0, query, key, value, How(scale=0.3, window=None))
    assert torch.equal(before[:5], after[:5]) and torch.equal(before[9:], after[9:])
    assert not torch.equal(before[5:9], after[5:9])


def test_attention_with_sinks_is_refused() -> None:
    with pytest.raises(ConfigError, match="has sinks"):
        _attention(torch.nn.Identity(), *torch.zeros(3, 1, 1, 2, 4), None, agentrl_plan=None, s_aux=torch.zeros(1))


def slot_plan(cache: SlotCache, new: dict[int, tuple[int, int]]) -> SlotPlan:
    """The plan for ``{cache row: (tokens it holds, new tokens)}``, written out the long way."""
    place = [(row, have + i) for row, (have, count) in new.items() for i in range(count)]
    counts = torch.tensor([count for _, count in new.values()])
    ends = {row: have + count for row, (have, count) in new.items()}
    used, length = max(new) + 1, max(ends.values())
    cache.reserve(length)

    def hidden_after(position: int) -> list[float]:
        return [0.0 if key <= position else float("-inf") for key in range(length)]

    nothing = [0.0] * length
    last = counts.cumsum(0) - 1
    long = [number for number, (_, count) in enumerate(new.values()) if count > 1]
    most = int(counts.max()) - 1
    extra = [[int(last[n] - counts[n] + 1) + (i if i < counts[n] - 1 else 0) for i in range(most)] for n in long]
    masks = [hidden_after(ends[row] - 1) if row in new else nothing for row in range(used)]
    double = {"dtype": torch.float64}
    return SlotPlan(
        cache=cache,
        rows=torch.tensor([row for row, _ in place]),
        positions=torch.tensor([position for _, position in place]),
        last=last,
        active=torch.tensor(list(new)),
        used=used,
        length=length,
        mask=torch.tensor(masks, **double)[:, None, None],
        extra=torch.tensor(extra) if long else None,
        extra_rows=torch.tensor([list(new)[n] for n in long]) if long else None,
        extra_mask=torch.tensor([[hidden_after(place[i][1]) for i in row] for row in extra], **double)[:, None]
        if long
        else None,
    )


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("heads", HEADS)
def test_cached_slots_give_what_a_whole_forward_gives(heads: tuple[int, int], window: int | None) -> None:
    """Prompts come in, tokens are generated and a tool answers, in slots with gaps between them."""
    lengths = {0: 9, 2: 6, 5: 8}
    steps = [{2: 4, 5: 1}, {0: 5, 2: 1, 5: 1}, {0: 1, 5: 4}, {0: 1, 5: 1}, {0: 2, 2: 1}, {5: 1}]
    query, key, value = random_heads(sum(lengths.values()), heads)
    offset = dict(zip(lengths, starts_of(tuple(lengths.values())).tolist(), strict=False))
    cache = SlotCache(6)
    have, got = dict.fromkeys(lengths, 0), torch.zeros_like(query)
    for step in steps:
        plan = slot_plan(cache, {row: (have[row], count) for row, count in step.items()})
        picked = torch.tensor([offset[r] + have[r] + i for r, count in step.items() for i in range(count)])
        # Padding behind the tokens, up to as many as there are rows: such as the engine puts there.
        padded = torch.cat([picked, picked.new_zeros(max(0, plan.used - len(picked)))])
        out = plan.attend(1, query[padded], key[padded], value[padded], How(scale=0.3, window=window))
        got[picked] = out[: len(picked)]
        for row, count in step.items():
            have[row] += count
    assert have == {0: 9, 2: 6, 5: 8}
    whole = PackedRows(starts_of(tuple(lengths.values())))
    expected = whole.attend(1, query, key, value, How(scale=0.3, window=window))
    torch.testing.assert_close(got, expected, **CPU_EXACT)


def test_a_cache_keeps_what_it_holds_while_it_grows_and_moves() -> None:
    cache = SlotCache(3)
    cache.reserve(5)
    sizes, generator = {0: (1, 4), 3: (2, 6)}, torch.Generator().manual_seed(0)
    for layer, (heads, size) in sizes.items():
        store = cache.layer(layer, torch.zeros(1, heads, size))
        store.copy_(torch.randn(3, 2, heads, 5, size, generator=generator))
    before = {layer: cache.layer(layer, torch.zeros(1)).clone() for layer in sizes}
    cache.reserve(5)
    cache.reserve(6)
    cache.move([2, 0, 1], [0, 1, 2])
    cache.copy_prefix(0, 1, 3)
    for layer, old in before.items():
        now = cache.layer(layer, torch.zeros(1))
        assert now.shape[3] > 5
        assert torch.equal(now[[0, 2], :, :, :5], old[[2, 1]])
        assert torch.equal(now[1, :, :, :3], old[2, :, :, :3]) and torch.equal(now[1, :, :, 3:5], old[0, :, :, 3:])


def test_keys_are_padded_to_sizes_that_add_up_alike() -> None:
    lengths = {1: 192, 192: 192, 193: 384, 385: 512, 512: 512, 513: 704, 1025: 1216, 1500: 1536}
    assert {length: padded_keys(length) for length in lengths} == lengths
