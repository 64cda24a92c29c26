import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import agentrl.algos
from agentrl.algos import blocks
from agentrl.algos.head import token_energy, token_stats
from agentrl.errors import UsageError

from . import scoring
from .scoring import SETTINGS, assert_same, assert_stats_close, inputs, low_inputs, of_logits


@pytest.fixture
def small_blocks(monkeypatch):
    """Tiles of 5 vocabulary entries and 2 tokens a block: every loop runs several times."""
    monkeypatch.setitem(blocks._TILE, "cpu", 5)
    monkeypatch.setitem(blocks._BLOCK_ELEMENTS, "cpu", 10)


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("vocabulary", [1, 4, 5, 13])
@pytest.mark.parametrize("tiled", [True, False])
def test_every_setting_is_the_whole_softmax(request, options, vocabulary, tiled):
    if tiled:
        request.getfixturevalue("small_blocks")
    hidden, weight, targets = inputs(7, vocabulary, 3, dtype=torch.float64, scale=3.0)
    assert_same([hidden, weight], targets, options, within=1e-12, rounded=1e-12)


@pytest.mark.parametrize("vocabulary", [512, 20_000])
@pytest.mark.parametrize("scale", [0.05, 0.5, 2.0])
def test_float32_is_within_1e_5_of_float64(vocabulary, scale):
    hidden, weight, targets = inputs(64, vocabulary, 16, scale=scale)
    stats = token_stats(hidden, weight, targets)
    assert all(part.dtype == torch.float32 for part in stats)
    # The logits themselves are rounded to float32; the head must add nothing to that.
    assert_stats_close(stats, of_logits(hidden @ weight.T, targets), 1e-5)


@pytest.mark.parametrize(("dtype", "within", "rounded"), [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 1e-4, 0.01)])
def test_values_and_gradients_are_those_of_the_whole_softmax(small_blocks, dtype, within, rounded):
    hidden, weight, targets = inputs(9, 60, 24, dtype=dtype)
    assert_same([hidden, weight], targets, within=within, rounded=rounded)


def test_gradients_where_all_logits_are_very_low(small_blocks):
    *tensors, targets, bias = low_inputs(6, 13, 4)
    assert_same([*tensors, bias], targets, within=1e-5, rounded=1e-5)


def test_log_probs_are_never_above_zero_and_entropies_never_below():
    hidden = torch.randn(400, 8) * torch.logspace(-2, 3, 400)[:, None]
    weight = torch.randn(300, 8)
    targets = (hidden @ weight.T).argmax(1)
    stats = token_stats(hidden, weight, targets, temperature=0.6)
    assert float(stats.logp.max()) <= 0.0
    assert float(stats.entropy.min()) >= 0.0
    assert float(stats.sum_sq.min()) > 0.0 and float(stats.sum_sq.max()) <= 1.0
    assert all(bool(part.isfinite().all()) for part in stats)


def test_huge_logits_do_not_overflow(small_blocks):
    scoring.check_huge_logits("auto")


def test_mixed_types_give_each_input_a_gradient_of_its_own_type():
    hidden, weight, targets = inputs(4, 9, 3)
    hidden = hidden.bfloat16().requires_grad_()
    bias = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    token_stats(hidden, weight.requires_grad_(), targets, bias=bias).logp.sum().backward()
    assert (hidden.grad.dtype, weight.grad.dtype, bias.grad.dtype) == (torch.bfloat16, torch.float32, torch.float64)


def test_autocast_does_not_narrow_the_logits():
    hidden, weight, targets = inputs(16, 100, 8)
    plain = token_stats(hidden, weight, targets)
    hidden.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = token_stats(hidden, weight, targets)
        cast.logp.sum().backward()
    torch.testing.assert_close(cast.logp, plain.logp)
    mine, hidden.grad = hidden.grad, None
    token_stats(hidden, weight, targets).logp.sum().backward()
    torch.testing.assert_close(mine, hidden.grad)


def test_only_what_is_wanted_gets_a_gradient():
    hidden, weight, targets = inputs(4, 9, 3)
    hidden.requires_grad_()
    stats = token_stats(hidden, weight, targets)
    assert stats.logp.requires_grad and stats.entropy.requires_grad and not stats.sum_sq.requires_grad
    stats.logp.sum().backward()
    assert hidden.grad is not None and weight.grad is None
    assert not token_stats(hidden.detach(), weight, targets).logp.requires_grad
    frozen = token_stats(hidden.detach(), weight.requires_grad_(), targets)
    frozen.entropy.sum().backward()
    assert weight.grad is not None


def test_a_second_derivative_is_refused():
    hidden, weight, targets = inputs(2, 5, 3)
    loss = token_stats(hidden.requires_grad_(), weight, targets).logp.square().sum()
    (by_hidden,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        by_hidden.sum().backward()


def test_no_tokens():
    scoring.check_no_tokens("auto")


def test_blocks_never_reach_tokens_times_vocabulary(monkeypatch):
    sizes = scoring.sizes_of(monkeypatch, blocks._Walk, "logits")
    hidden, weight, targets = inputs(1500, 20_000, 4)
    token_stats(hidden.requires_grad_(), weight, targets).logp.sum().backward()
    assert max(sizes) <= blocks._BLOCK_ELEMENTS["cpu"] < 1500 * 20_000
    assert sum(sizes) == 2 * 1500 * 20_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"hidden": torch.zeros(3, 5)}, "do not fit"), ({"hidden": torch.zeros(3)}, "do not fit")),
        ({"weight": torch.zeros(0, 4)}, "do not fit"),
        ({"weight": torch.zeros(6, 4, dtype=torch.int64)}, "floating point"),
        ({"targets": torch.tensor([0, 1])}, "one token id per hidden state"),
        ({"targets": torch.zeros(3)}, "one token id per hidden state"),
        ({"targets": torch.tensor([0, 1, 6])}, "outside the vocabulary"),
        *(({"targets": torch.tensor([0, -1, 5])}, "outside the vocabulary"), ({"bias": torch.zeros(5)}, "bias")),
        *(({"temperature": 0.0}, "temperature"), ({"temperature": math.inf}, "temperature")),
        ({"softcap": -1.0}, "softcap"),
        ({"weight": torch.zeros(6, 4, device="meta")}, "on one device, not on cpu, meta"),
        ({"form": "cuda"}, "form must be one of auto, torch, triton, not 'cuda'"),
        ({"form": "triton", "hidden": torch.zeros(3, 4).double()}, "float32 and bfloat16, not torch.float64"),
        ({"form": "triton", "hidden": torch.zeros(3, 4).half()}, "pass form='torch'"),
    ],
)
def test_wrong_inputs_are_refused(change, message):
    good = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(6, 4), "targets": torch.tensor([0, 1, 5])}
    token_stats(**good)
    with pytest.raises(ValueError, match=message):
        token_stats(**good | change)


def test_without_triton_its_form_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("launch", "kernels"):
        monkeypatch.delitem(sys.modules, f"agentrl.algos.{name}", raising=False)
        monkeypatch.delattr(agentrl.algos, name, raising=False)
    with pytest.raises(UsageError, match=r"pip install triton, or pass form='torch'"):
        token_stats(*inputs(2, 5, 3), form="triton")


# Energy


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=8), st.integers(0, 7))
def test_energy_is_the_squared_distance(scores, pick):
    logits = torch.tensor(scores, dtype=torch.float64)
    probs, y = logits.softmax(0), pick % len(scores)
    onehot = torch.zeros_like(probs).index_fill(0, torch.tensor([y]), 1.0)
    exact = float((onehot - probs).square().sum())
    log_probs = logits.log_softmax(0)
    got = float(token_energy(log_probs[y : y + 1].float(), probs.square().sum()[None].float()))
    assert got == pytest.approx(exact, abs=1e-6)
    assert 0.0 <= got < 2.0 + 1e-6


@pytest.mark.parametrize("missed", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("wrong", [-2e-7, 0.0, 2e-7])
def test_energy_of_a_nearly_certain_token_survives_rounding(missed, wrong):
    exact = missed**2 + missed**2 / 2
    logp = torch.tensor([math.log1p(-missed)])
    sum_sq = torch.tensor([(1 - missed) ** 2 + missed**2 / 2 + wrong])
    got = token_energy(logp, sum_sq).item()
    assert missed**2 * (1 - 1e-5) <= got <= 2 * missed**2 * (1 + 1e-5)
    if missed == 1e-2:
        assert got == pytest.approx(exact, rel=1e-2)


def test_energy_of_a_certain_and_of_an_impossible_token():
    got = token_energy(torch.tensor([0.0, -80.0]), torch.tensor([1.0, 1.0]))
    assert got.tolist() == pytest.approx([0.0, 2.0])


def test_energy_is_detached_and_checked():
    logp = torch.tensor([-0.5, -0.1], requires_grad=True)
    assert not token_energy(logp, torch.tensor([0.5, 0.9])).requires_grad
    assert token_energy(torch.tensor([], dtype=torch.bfloat16), torch.tensor([])).dtype == torch.float32
    with pytest.raises(ValueError, match="one shape"):
        token_energy(logp, torch.tensor([0.5]))
    with pytest.raises(ValueError, match="at most 0"):
        token_energy(torch.tensor([0.1]), torch.tensor([0.5]))
