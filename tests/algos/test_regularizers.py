import math

import pytest
import torch

from agentrl.algos.aggregate import AGGREGATES
from agentrl.algos.regularizers import k3, regularizer

from . import reference

ROWS = [[0.5, 2.0, -1.0], [], [-0.25, 12.0]]
"""Log ratios reference/θ."""
STARTS = torch.tensor([0, 3, 3, 5])


def inputs():
    logp = torch.tensor([-2.0, -3.0, -1.5, -2.5, -14.0], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([0.1, 0.7, 1.3, 0.4, 0.9], dtype=torch.float64, requires_grad=True)
    return logp, entropy, logp.detach() + torch.tensor(reference.flat(ROWS), dtype=torch.float64)


def slow(x):
    return math.exp(min(x, 10.0)) * (1 + max(x - 10.0, 0.0)) - 1 - x


def test_k3_by_hand_and_its_gradient():
    logp, _, other = inputs()
    got = k3(logp, other)
    assert got.tolist() == pytest.approx([slow(x) for x in reference.flat(ROWS)])
    (slope,) = torch.autograd.grad(got.sum(), logp)
    # 1 − e^x, where e^x is held at e^10.
    assert slope.tolist() == pytest.approx([1 - math.exp(min(x, 10.0)) for x in reference.flat(ROWS)])


def test_k3_widens_narrow_log_probs():
    narrow = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16)
    assert k3(narrow, narrow - 2.0**-6).dtype == torch.float32


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("with_reference", [True, False])
def test_regularizer_is_the_slow_loop(aggregate, with_reference):
    logp, entropy, other = inputs()
    options = {"kl_coef": 0.3, "entropy_coef": 0.05, "aggregate": aggregate, "max_tokens": 9}
    kl = [[0.3 * slow(x) for x in row] if with_reference else [0.0] * len(row) for row in ROWS]
    bonus = reference.cut((0.05 * entropy).tolist(), [3, 0, 2])
    terms = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(kl, bonus, strict=True)]
    got = regularizer(logp, entropy, STARTS, reference_logp=other if with_reference else None, **options)
    assert got.item() == pytest.approx(reference.aggregate(terms, aggregate, 9))
    got.backward()
    assert entropy.grad is not None and bool((entropy.grad < 0).all())
    assert (logp.grad is not None) == with_reference


def test_numbers_that_are_not_finite_are_refused():
    logp, entropy, other = inputs()
    with pytest.raises(ValueError, match="reference_logp must be finite"):
        k3(logp, other * math.nan)
    with pytest.raises(ValueError, match="entropy must be one number per sampled token"):
        regularizer(
            logp, entropy[:1], STARTS, reference_logp=None, kl_coef=0.0, entropy_coef=0.1, aggregate="token_mean"
        )
