"""The Triton form against whole float64 logits: test_kernels.py runs this, on Triton's interpreter or on a GPU."""

import math
import os

import pytest
import torch

from agentrl.algos import launch
from agentrl.algos.head import token_stats

from . import scoring
from .scoring import SETTINGS, assert_same, assert_stats_close, inputs, leaves_of, low_inputs, reference

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
WITHIN = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
"""How far values may be off."""
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 2**-7 if DEVICE == "cpu" else 2**-8}
"""How far gradients may be off as a share of themselves: the interpreter rounds to bfloat16 by cutting digits off."""
SHAPES = [(37, 203, 24), (1, 203, 24), (70, 33, 5), (16, 32, 16), (3, 1, 1)]
"""Tokens, vocabulary, width: for tiles of 16 x 32 x 16, with and without a rest."""
USUAL = (20, 150, 24)
"""The smallest with several tiles in a span, a shorter last span, and several blocks, the last with a rest."""
LARGE = [] if DEVICE == "cpu" else [(1000, 32_001, 520), (5000, 9_999, 1024)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """On the interpreter, tiles and blocks so small that every loop runs several times."""
    if DEVICE == "cpu":
        tile = launch._Tile(rows=16, columns=32, depth=16, warps=4, stages=2)
        for dtype in launch._TILES:
            monkeypatch.setitem(launch._TILES, dtype, (tile,))
        monkeypatch.setattr(launch, "_LEAST_WIDTH", 64)
        monkeypatch.setattr(launch, "_BLOCK_ELEMENTS", 64)


def check(tensors, targets, options, dtype):
    assert_same(tensors, targets, options, within=WITHIN[dtype], rounded=ROUNDED[dtype], form="triton", device=DEVICE)


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("options", SETTINGS)
def test_every_setting(options, dtype):
    hidden, weight, targets = inputs(*USUAL, dtype=dtype, scale=0.5)
    check([hidden, weight], targets, options, dtype)


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("shape", SHAPES + LARGE)
def test_every_shape(shape, dtype):
    hidden, weight, targets = inputs(*shape, dtype=dtype, scale=1 / math.sqrt(shape[2]))
    check([hidden, weight], targets, {}, dtype)


@pytest.mark.parametrize("dtype", WITHIN)
def test_very_low_logits(dtype):
    hidden, weight, targets, bias = low_inputs(*USUAL, dtype=dtype)
    check([hidden, weight, bias], targets, {}, dtype)


def test_large_logits_and_a_sure_token():
    scoring.check_huge_logits("triton", DEVICE)


@pytest.mark.parametrize("use", ["logp", "entropy"])
@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_one_output_and_one_gradient(use, wanted):
    hidden, weight, targets = inputs(20, 70, 8)
    leaves, exact = leaves_of(hidden, weight, device=DEVICE)
    position = ("hidden", "weight").index(wanted)
    leaves[1 - position].requires_grad_(False)
    getattr(token_stats(*leaves, targets.to(DEVICE), form="triton"), use).mean().backward()
    getattr(reference(*exact, targets), use).mean().backward()
    assert leaves[1 - position].grad is None
    torch.testing.assert_close(leaves[position].grad.double().cpu(), exact[position].grad, atol=1e-5, rtol=0)


def test_types_are_mixed_in_the_wider_one():
    hidden, weight, targets = inputs(20, 70, 8)
    leaves, exact = leaves_of(hidden.bfloat16(), weight, device=DEVICE)
    stats = token_stats(*leaves, targets.to(DEVICE), form="triton")
    assert_stats_close([part.cpu() for part in stats], reference(*exact, targets), 1e-5)
    stats.logp.mean().backward()
    assert [leaf.grad.dtype for leaf in leaves] == [torch.bfloat16, torch.float32]


def test_any_layout_is_read():
    hidden, weight, targets = (tensor.to(DEVICE) for tensor in inputs(20, 70, 8))
    plain = token_stats(hidden, weight, targets, form="triton")
    twice = targets.int().repeat_interleave(2)[::2]
    across = token_stats(hidden.T.contiguous().T, weight.T.contiguous().T, twice, form="triton")
    assert_stats_close(across, plain, 1e-6)
    leaf = weight.T.contiguous().requires_grad_()
    token_stats(hidden, leaf.T, targets, form="triton").logp.sum().backward()
    same = weight.clone().requires_grad_()
    token_stats(hidden, same, targets, form="torch").logp.sum().backward()
    torch.testing.assert_close(leaf.grad.T, same.grad, atol=1e-4, rtol=0)


def test_no_tokens():
    scoring.check_no_tokens("triton", DEVICE)


def test_the_same_inputs_give_the_same_bits():
    hidden, weight, targets = (tensor.to(DEVICE) for tensor in inputs(*USUAL, dtype=torch.bfloat16))
    results = []
    for _ in range(2):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        stats = token_stats(*leaves, targets, form="triton")
        (stats.logp + stats.entropy).sum().backward()
        results.append([*stats, *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


def test_products_of_bfloat16_are_added_in_float32():
    left, right = torch.randn(37, 203, device=DEVICE).bfloat16(), torch.randn(203, 40, device=DEVICE).bfloat16()
    total = torch.full((37, 40), 0.125, device=DEVICE)
    launch._add_product(total, left, right)
    torch.testing.assert_close(total.double(), 0.125 + left.double() @ right.double(), atol=1e-4, rtol=0)


def test_blocks_never_reach_tokens_times_vocabulary(monkeypatch):
    sizes = scoring.sizes_of(monkeypatch, launch, "_gradient_block")
    monkeypatch.setattr(launch, "_LEAST_WIDTH", 64)
    monkeypatch.setattr(launch, "_BLOCK_ELEMENTS", 64)
    hidden, weight, targets = (tensor.to(DEVICE) for tensor in inputs(20, 203, 8))
    token_stats(hidden.requires_grad_(), weight, targets, form="triton").logp.sum().backward()
    assert len(sizes) == 4 and max(sizes) == 20 * 64 and sum(sizes) == 20 * 203
