import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algos.aggregate import AGGREGATES
from agentrl.algos.losses import ctpo
from agentrl.algos.ratios import cumulative_log_ratio

from . import reference
from .cases import case, gradient, ragged


def test_ctpo_hand_worked():
    logp, old, credit, starts = case([[0.02, 0.045, -0.01, 0.06, -0.20]], [[-1.0] * 5], dtype=torch.float32)
    out = ctpo(logp, old, credit, starts)
    assert out.loss.item() == pytest.approx(1.038941, abs=2e-6)
    assert gradient(out, logp).tolist() == pytest.approx([0.20404, 0.21343, 0.21131, 0, 0], abs=1e-5)
    assert float(out.metrics["clip_fraction"]) == pytest.approx(0.4)


def test_ctpo_two_turns_around_a_tool_token():
    first, second = [-0.02, -0.01], [-0.018, 0.05]

    def value(*rows):
        args = case(list(rows), [[-1.0] * len(row) for row in rows])
        return ctpo(*args, aggregate="token_mean").loss.item()

    assert value(first + second) == pytest.approx(0.977567, abs=1e-6)
    assert value(first, second) == pytest.approx(0.991331, abs=1e-6)


def test_ctpo_counting_the_tool_token_is_another_number():
    logp, old, credit, starts = case([[-0.02, -0.01, 0.0, -0.018, 0.05]], [[-1.0] * 5])
    only_sampled = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    out = ctpo(logp, old, credit, starts, weights=only_sampled, aggregate="token_mean")
    assert out.loss.item() * 5 / 4 == pytest.approx(0.976445, abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(ragged(), st.sampled_from(AGGREGATES), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([None, 0.05, 0.2]))
def test_ctpo_is_the_slow_loop(rows, aggregate, power, dual):
    steps, credit = rows
    logp, old, advantages, starts = case(steps, credit)
    out = ctpo(logp, old, advantages, starts, power=power, clip_dual=dual, aggregate=aggregate, max_tokens=7)
    losses, slopes = reference.ctpo(steps, credit, power=power, dual=dual)
    assert out.loss.item() == pytest.approx(reference.aggregate(losses, aggregate, 7), rel=1e-5, abs=1e-7)
    totals = [math.fsum(row[: t + 1]) for row in steps for t in range(len(row))]
    near_the_edge = any(abs(total - 10.0) < 1e-6 for total in totals)
    if aggregate == "token_mean" and totals and not near_the_edge:
        expected = [slope / len(totals) for slope in reference.flat(slopes)]
        assert gradient(out, logp).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_the_literal_gradient_through_the_prefix_is_another_one():
    logp, old, credit, starts = case([[0.001, -0.002, 0.003]], [[1.0, 2.0, -0.5]])
    literal = -(credit * (logp - old).cumsum(0).exp()).mean()
    out = ctpo(logp, old, credit, starts)
    assert out.loss.item() == pytest.approx(literal.item())
    ours, theirs = gradient(out, logp), torch.autograd.grad(literal, logp)[0]
    terms = (-credit * (logp - old).cumsum(0).exp() / 3).detach()
    torch.testing.assert_close(ours, terms)
    torch.testing.assert_close(theirs, terms.flip(0).cumsum(0).flip(0))
    assert float((ours - theirs).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("advantage", "total", "flows"),
    [(1, 0.049, True), (1, 0.051, False), (1, -3.0, True), (-1, -0.024, True), (-1, -0.026, False), (-1, 0.051, False)],
)
def test_ctpo_trains_a_token_iff_the_rule_says_so(advantage, total, flows):
    logp, old, credit, starts = case([[total]], [[float(advantage)]])
    out = ctpo(logp, old, credit, starts)
    assert (float(gradient(out, logp)) != 0) == flows
    assert float(out.metrics["clip_fraction"]) == (0 if flows else 1)


def test_the_window_widens_with_the_square_root_or_stays():
    logp, old, credit, starts = case([[0.0] * 15 + [0.19]], [[1.0] * 16])
    assert float(ctpo(logp, old, credit, starts).metrics["clip_fraction"]) == 0
    fixed = ctpo(logp, old, credit, starts, power=0)
    assert float(fixed.metrics["clip_fraction"]) == pytest.approx(1 / 16)
    assert fixed.loss.item() == pytest.approx(-(15 + math.exp(0.05)) / 16)


def test_dual_clip_off_lets_a_negative_advantage_through_and_infinity_is_off():
    logp, old, credit, starts = case([[1.0]], [[-1.0]])
    assert ctpo(logp, old, credit, starts).loss.item() == pytest.approx(math.exp(0.05))
    for off in (None, math.inf):
        out = ctpo(logp, old, credit, starts, clip_dual=off)
        assert out.loss.item() == pytest.approx(math.e)
        assert float(gradient(out, logp)) == pytest.approx(math.e)


def test_no_ratio_exceeds_e_to_the_tenth():
    for d in (12.0, 500.0):
        logp, old, credit, starts = case([[d, d]], [[-1.0, -1.0]])
        out = ctpo(logp, old, credit, starts, clip_dual=None)
        assert out.loss.item() == pytest.approx(math.exp(10))
        assert gradient(out, logp).tolist() == [0.0, 0.0]


def test_a_long_sum_does_not_stall_as_it_would_in_bfloat16():
    total = cumulative_log_ratio(torch.full((8192,), 2e-4), torch.zeros(8192), torch.tensor([0, 8192]))
    assert total.dtype == torch.float32
    assert float(total[-1]) == pytest.approx(1.6384, abs=1e-5)


def test_bfloat16_log_probs_are_widened_before_they_are_subtracted():
    logp = torch.tensor([-3.0, -1.0], dtype=torch.bfloat16, requires_grad=True)
    old = torch.tensor([-3.001, -1.0])
    out = ctpo(logp, old, torch.ones(2), torch.tensor([0, 2]))
    assert out.loss.dtype == torch.float32
    assert float(out.metrics["log_ratio_abs_max"]) == pytest.approx(0.001, abs=1e-6)
    assert gradient(out, logp).dtype == torch.bfloat16


def test_ctpo_metrics_are_detached_facts():
    logp, old, credit, starts = case([[0.1, -0.3], [0.2]], [[1.0, 1.0], [1.0]])
    metrics = ctpo(logp, old, credit, starts).metrics
    totals = [0.1, -0.2, 0.2]
    assert float(metrics["S_mean"]) == pytest.approx(sum(totals) / 3)
    assert float(metrics["S_std"]) == pytest.approx(float(torch.tensor(totals).std(correction=0)))
    assert float(metrics["ratio_mean"]) == pytest.approx(sum(math.exp(s) for s in totals) / 3)
    assert float(metrics["log_ratio_abs_max"]) == pytest.approx(0.3)
    assert not any(value.requires_grad for value in metrics.values())
