import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algos.losses import ctpo

from . import reference
from .cases import assert_slow, case, gradient, ragged


def test_ctpo_hand_worked():
    logp, old, credit, starts = case([[0.02, 0.045, -0.01, 0.06, -0.20]], [[-1.0] * 5], dtype=torch.float32)
    out = ctpo(logp, old, credit, starts)
    assert out.loss.item() == pytest.approx(1.038941, abs=2e-6)
    assert gradient(out, logp).tolist() == pytest.approx([0.20404, 0.21343, 0.21131, 0, 0], abs=1e-5)
    assert float(out.metrics["clip_fraction"]) == pytest.approx(0.4)


@settings(max_examples=150, deadline=None)
@given(ragged(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([None, 0.05, 0.2, math.inf]))
def test_ctpo_is_the_slow_loop(rows, power, dual):
    steps, credit = rows
    logp, old, advantages, starts = case(steps, credit)
    out = ctpo(logp, old, advantages, starts, power=power, clip_dual=dual)
    assert_slow(out, logp, advantages, *reference.ctpo(steps, credit, power=power, dual=dual))


def test_ctpo_metrics_are_detached_facts():
    logp, old, credit, starts = case([[0.1, -0.3], [0.2]], [[1.0, 1.0], [1.0]])
    metrics = ctpo(logp, old, credit, starts).metrics
    totals = [0.1, -0.2, 0.2]
    assert float(metrics["ratio_mean"]) == pytest.approx(sum(math.exp(s) for s in totals) / 3)
    assert not any(value.requires_grad for value in metrics.values())
