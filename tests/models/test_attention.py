"""Attention without pads: packs and cached slots give what transformers' own attention gives each row by itself."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from agentrl.errors import ConfigError
from agentrl.models import attention
from agentrl.models.attention import NAME, BucketedRows, How, PackedRows, _attention

pytestmark = pytest.mark.usefixtures("one_thread")
RAGGED = [(5, 3, 1, 7), (4, 4, 4), (1,), (1, 1, 1), (2, 9), (9,), (4, 9, 3, 8, 8)]
SHARING = [(7, 6, 3), (9, 9), (2, 9, 5, 9)]
HEADS = [(4, 4), (6, 2), (2, 1)]
CPU_EXACT = {"rtol": 1e-10, "atol": 1e-10}


def hows(*windows: int | None) -> list[How]:
    return [How(scale=0.3, window=window, softcap=softcap) for window in windows for softcap in (None, 0.7)]


def starts_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def attend_densely(starts: Tensor, source: Tensor, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
    """Each row by a mask and a softmax over all of its scores."""
    out = torch.zeros_like(query)
    for row in source.tensor_split(starts[1:-1]):
        position = torch.arange(len(row))
        hidden = position > position[:, None]
        if how.window is not None:
            hidden |= position <= position[:, None] - how.window
        keys, values = (part[row].repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value))
        scores = how.scale * torch.einsum("qhd,khd->hqk", query[row], keys)
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        out = out.index_copy(0, row, torch.einsum("hqk,khd->qhd", weights, values))
    return out


def random_heads(count: int, heads: tuple[int, int], size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(count, heads[0], size), (count, heads[1], size), (count, heads[1], size)]
    query, key, value = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query, key, value


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


def test_attention_with_sinks_is_refused() -> None:
    with pytest.raises(ConfigError, match="has sinks"):
        _attention(torch.nn.Identity(), *torch.zeros(3, 1, 1, 2, 4), None, agentrl_plan=None, s_aux=torch.zeros(1))


def forked(lengths: tuple[int, ...], shares: bool) -> Tensor:
    """The tokens of rows; where they share, each begins with up to five that the row before it has computed."""
    rows: list[list[int]] = []
    seen = 0
    for length in lengths:
        old = rows[-1][: min(5, length)] if rows and shares else []
        rows.append([*old, *range(seen, seen + length - len(old))])
        seen += length - len(old)
    return torch.tensor([token for row in rows for token in row])


def varlen_by_softmax(
    query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor, *most: int, **options: Any
) -> Tensor:
    """FlashAttention's contract for rows of different length: a row's last query sees its last key."""
    counts, (left, right) = (query_starts.diff(), key_starts.diff()), options["window_size"]
    assert most == tuple(int(count.max()) for count in counts)
    assert query_starts.dtype == key_starts.dtype == torch.int32
    assert (right, options["enable_gqa"]) == (0, True)
    outs: list[Tensor] = []
    for q, k, v in zip(
        *(tensor.split(count.tolist()) for tensor, count in ((query, counts[0]), (key, counts[1]), (value, counts[1]))),
        strict=True,
    ):
        how = How(scale=options["scale"], window=None if left < 0 else left + 1)
        padded = torch.cat((q.new_zeros(len(k) - len(q), *q.shape[1:]), q))
        outs.append(attend_densely(starts_of((len(k),)), torch.arange(len(k)), padded, k, v, how)[len(k) - len(q) :])
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("how", "at_once"),
    [(how, once) for how in hows(None, 1, 4, 100) for once in (False, True) if not (once and how.softcap)],
)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("lengths", "shares"), [*itertools.product(RAGGED, [False]), *itertools.product(SHARING, [True])]
)
def test_a_pack_and_its_gradients_are_those_of_its_rows(
    monkeypatch: pytest.MonkeyPatch,
    lengths: tuple[int, ...],
    shares: bool,
    heads: tuple[int, int],
    how: How,
    at_once: bool,
) -> None:
    """Rows of eight tokens are long here, and attend by themselves, three queries at a time; or all at once."""
    monkeypatch.setattr(attention, "_LONG", 8)
    monkeypatch.setattr(attention, "_QUERIES", 3)
    if at_once:
        monkeypatch.setattr(attention, "attends_at_once", lambda _, how: how.softcap is None)
        monkeypatch.setattr(attention, "varlen_attn", varlen_by_softmax)
    source = forked(lengths, shares)
    inputs = [tensor.requires_grad_() for tensor in random_heads(int(source.max()) + 1, heads)]
    weight = torch.randn(len(inputs[0]), heads[0], 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    packed = PackedRows(starts_of(lengths), source if shares else None).attend(0, *inputs, how)
    slow = attend_densely(starts_of(lengths), source, *inputs, how)
    torch.testing.assert_close(packed, slow, **CPU_EXACT)
    got, wanted = (torch.autograd.grad((out * weight).sum(), inputs) for out in (packed, slow))
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, **CPU_EXACT)


def test_tokens_that_a_long_row_shares_do_not_attend_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_LONG", 8)
    plan = BucketedRows(starts_of((9, 12)), forked((9, 12), True))
    assert [(queries.shape, keys.shape) for queries, keys in plan._buckets] == [((1, 9), (1, 9)), ((1, 7), (1, 12))]


@pytest.mark.parametrize("lengths", [(7,), (3, 3), (8, 9)])
def test_rows_without_pads_are_views(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]) -> None:
    monkeypatch.setattr(attention, "_LONG", 8)
    seen: list[Tensor] = []
    monkeypatch.setattr(attention, "scaled_dot_product_attention", lambda *parts, **_: seen.extend(parts) or parts[0])
    inputs = random_heads(sum(lengths), (4, 4))
    PackedRows(starts_of(lengths)).attend(0, *inputs, How(scale=0.3))
    assert {part.untyped_storage().data_ptr() for part in seen} == {part.data_ptr() for part in inputs}
