"""Ragged inputs for the losses, from rows of log ratios and advantages."""

import pytest
import torch
from hypothesis import strategies as st

from agentrl.algos.losses import cispo, cppo, ctpo, gspo, ppo_clip, reinforce

from . import reference

LOSSES = (ctpo, cppo, ppo_clip, gspo, cispo, reinforce)


def case(steps, advantages, *, dtype=torch.float64):
    """The arguments of a loss from rows of d = logp − old: a leaf logp, old, advantages, starts."""
    lengths = torch.tensor([0] + [len(row) for row in steps])
    flat = torch.tensor([d for row in steps for d in row], dtype=dtype)
    old = -1.0 - torch.arange(flat.numel(), dtype=dtype) % 3
    credit = torch.tensor([a for row in advantages for a in row], dtype=dtype)
    return (old + flat).requires_grad_(), old, credit, lengths.cumsum(0)


def gradient(out, logp):
    return torch.autograd.grad(out.loss, logp)[0]


def assert_slow(out, logp, advantages, losses, slopes):
    """Loss, gradient and share of clipped tokens are a slow loop's, averaged over tokens and then over rows."""
    near, rows = {"rel": 1e-5, "abs": 1e-9}, sum(map(bool, slopes))
    assert out.loss.item() == pytest.approx(reference.aggregate(losses, "seq_mean_token_mean"), **near)
    expected = [slope / (len(row) * rows) for row in slopes for slope in row]
    assert gradient(out, logp).tolist() == pytest.approx(expected, **near)
    cut = [slope == 0 for slope, a in zip(reference.flat(slopes), advantages.tolist(), strict=True) if a]
    assert float(out.metrics.get("clip_fraction", 0.0)) == pytest.approx(sum(cut) / max(len(cut), 1))


def random_case(lengths, *, spread=0.05):
    steps = [(spread * torch.randn(length, dtype=torch.float64)).tolist() for length in lengths]
    credit = [torch.randn(length, dtype=torch.float64).tolist() for length in lengths]
    return steps, credit


@st.composite
def ragged(draw):
    """Rows of log ratios and advantages, some empty, some advantages 0, some ratios far out of any window.

    No sum of these ratios is a limit of a window: rounding alone would decide whether such a token is clipped.
    """
    token = st.tuples(
        st.sampled_from([0.0, 0.0211, -0.0307, 0.3013, -0.4019, 9.07, -25.0]), st.sampled_from([0.0, 1.0, -1.0, 0.3])
    )
    rows = draw(st.lists(st.lists(token, max_size=6), min_size=1, max_size=5))
    return [[d for d, _ in row] for row in rows], [[a for _, a in row] for row in rows]
