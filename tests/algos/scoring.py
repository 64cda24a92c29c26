"""What the tests of both forms of the scoring head share: inputs, settings, whole float64 logits to compare with."""

import math

import pytest
import torch

from agentrl.algos.head import TokenStats, token_stats

SETTINGS = [
    {},
    {"temperature": 0.7},
    {"bias": True},
    {"softcap": 2.0},
    {"temperature": 1.3, "bias": True, "softcap": 3.0},
]


def reference(hidden, weight, targets, *, temperature=1.0, bias=None, softcap=None):
    """The same three vectors from whole float64 logits."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return of_logits(logits / temperature, targets)


def of_logits(logits, targets):
    log_probs = logits.double().log_softmax(1)
    probs = log_probs.exp()
    return TokenStats(
        log_probs.gather(1, targets[:, None])[:, 0], -(probs * log_probs).sum(1), probs.square().sum(1)
    )  # fmt: skip


def inputs(tokens, vocabulary, width, *, dtype=torch.float32, scale=1.0):
    hidden = torch.randn(tokens, width, dtype=torch.float64).to(dtype)
    weight = (scale * torch.randn(vocabulary, width, dtype=torch.float64)).to(dtype)
    return hidden, weight, torch.randint(0, vocabulary, (tokens,))


def low_inputs(tokens, vocabulary, width, *, dtype=torch.float32):
    """Hidden states, weights, targets and a bias with all logits near -30000, where none of them is rounded."""
    hidden = torch.randint(-2, 3, (tokens, width)).to(dtype) / 2
    weight = torch.randint(-2, 3, (vocabulary, width)).to(dtype) / 4
    bias = torch.full((vocabulary,), -30_000.0)
    return hidden, weight, torch.randint(0, vocabulary, (tokens,)), bias


def assert_stats_close(got, expected, atol):
    for mine, true in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.double(), true.double(), atol=atol, rtol=0)


def check_huge_logits(form, device="cpu"):
    """A softmax of logits of 1e4 does not overflow."""
    weight = torch.tensor([[-1e4], [1e4], [0.0], [9990.0], [0.0], [0.0], [1e4 - 1.0]], device=device)
    stats = token_stats(torch.ones(2, 1, device=device), weight, torch.tensor([1, 6], device=device), form=form)
    p = 1 / (1 + math.exp(-1.0) + math.exp(-10.0))
    assert stats.logp.tolist() == pytest.approx([math.log(p), math.log(p) - 1.0], abs=1e-5)
    assert stats.sum_sq.tolist() == pytest.approx([p * p * (1 + math.exp(-2.0))] * 2, abs=1e-5)
    sure = token_stats(torch.ones(1, 1, device=device), weight[:2], torch.tensor([1], device=device), form=form)
    assert [part.item() for part in sure] == [0.0, 0.0, 1.0]


def check_no_tokens(form, device="cpu"):
    """Without a token there are no statistics and a gradient of zeros."""
    hidden, weight, targets = (tensor.to(device) for tensor in inputs(0, 9, 3))
    stats = token_stats(hidden.requires_grad_(), weight.requires_grad_(), targets, form=form)
    assert all(part.shape == (0,) for part in stats)
    stats.logp.sum().backward()
    assert weight.grad.abs().sum() == 0


def sizes_of(monkeypatch, owner, name):
    """How many numbers each tensor has that a function returns from now on."""
    sizes, original = [], getattr(owner, name)

    def watch(*arguments):
        sizes.append((block := original(*arguments)).numel())
        return block

    monkeypatch.setattr(owner, name, watch)
    return sizes


def leaves_of(*tensors, device="cpu"):
    """The same numbers on the device, and in float64 on the CPU, as leaves."""
    mine = [tensor.to(device, copy=True).requires_grad_() for tensor in tensors]
    return mine, [tensor.double().requires_grad_() for tensor in tensors]


def assert_same(tensors, targets, options=None, *, within, rounded, form="auto", device="cpu"):
    """Values are those of whole float64 logits ``within`` so much, gradients but for a ``rounded`` share.

    ``tensors`` are hidden states, weights and perhaps a bias, or ``options`` ask for any; the gradients are of a mean
    over tokens that weighs each token's log-prob and entropy by factors of its own.
    """
    options = dict(options or {})
    if options.pop("bias", False):
        tensors = [*tensors, torch.randn(len(tensors[1]), dtype=tensors[1].dtype)]
    mine, exact = leaves_of(*tensors, device=device)
    factors = torch.randn(2, len(targets), dtype=torch.float64)

    def scored(score, leaves, targets, **more):
        stats = score(**dict(zip(("hidden", "weight", "bias"), leaves, strict=False)), targets=targets, **more)
        logp, entropy = factors.to(stats.logp)
        return stats, torch.autograd.grad((logp * stats.logp + entropy * stats.entropy).mean(), leaves)

    stats, gradients = scored(token_stats, mine, targets.to(device), form=form, **options)
    true, wanted = scored(reference, exact, targets, **options)
    assert_stats_close([part.cpu() for part in stats], true, within)
    assert stats.logp.max().item() <= 0.0 <= stats.entropy.min().item()
    for gradient, other, leaf in zip(gradients, wanted, mine, strict=True):
        assert gradient.dtype == leaf.dtype
        assert (gradient.double().cpu() - other).norm().item() <= rounded * other.norm().item() + 1e-9
