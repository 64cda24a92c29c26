import math

import pytest
import torch

from agentrl.algos.ratios import behaviour_weights, rejection_mask, token_log_ratio
from agentrl.algos.rows import Rows
from agentrl.errors import ConfigError, UnknownNameError

from . import reference

STARTS = torch.tensor([0, 3, 3, 5])
STEPS = torch.tensor([0.5, 2.0, -1.0, -0.25, 0.125])


def weights(kind, **options):
    sampler = torch.full((5,), -2.0)
    return behaviour_weights(sampler + STEPS, sampler, STARTS, kind=kind, **options)


def test_rows_know_their_tokens():
    rows = Rows.of(STARTS, STEPS)
    assert rows.lengths.tolist() == [3, 0, 2]
    assert rows.row.tolist() == [0, 0, 0, 2, 2]
    assert rows.ordinal.tolist() == [1, 2, 3, 1, 2]
    assert rows.sum(STEPS).tolist() == [1.5, 0.0, -0.125]
    assert rows.prefix_sum(STEPS).tolist() == [0.5, 2.5, 1.5, -0.25, -0.125]
    assert rows.suffix_sum(STEPS).tolist() == [1.5, 1.0, -1.0, -0.125, 0.125]


def test_prefix_sums_are_exact_to_the_row_however_large_the_rows_before():
    values = torch.cat([torch.full((100_000,), 1e6, dtype=torch.float64), torch.full((3,), 1e-12, dtype=torch.float64)])
    got = Rows.of(torch.tensor([0, 100_000, 100_003]), values).prefix_sum(values)[-3:]
    torch.testing.assert_close(got, torch.tensor([1e-12, 2e-12, 3e-12], dtype=torch.float64), rtol=1e-6, atol=0)


def test_starts_may_be_narrow_integers():
    assert Rows.of(STARTS.int(), STEPS).row.tolist() == [0, 0, 0, 2, 2]


def test_narrow_log_probs_are_widened_before_they_are_subtracted():
    # In bfloat16 the difference would be -1.
    narrow = [torch.tensor([value], dtype=torch.bfloat16) for value in (-1.0, -(2.0**-9))]
    assert token_log_ratio(*narrow).tolist() == [2.0**-9 - 1.0]
    assert token_log_ratio(narrow[0], torch.tensor([-1.001])).tolist() == pytest.approx([0.001], abs=1e-6)


def test_one_broken_log_prob_is_held_at_twenty():
    assert token_log_ratio(torch.tensor([-1.0, -90.0]), torch.tensor([-90.0, -1.0])).tolist() == [20.0, -20.0]


def test_behaviour_weights_by_hand():
    sequence = [math.exp(1.5)] * 3 + [math.exp(-0.125)] * 2
    prefix = [math.exp(0.5), 5.0, math.exp(1.5), math.exp(-0.25), math.exp(-0.125)]
    token = [math.exp(0.5), 5.0, math.exp(-1.0), math.exp(-0.25), math.exp(0.125)]
    assert weights("sequence").tolist() == pytest.approx(sequence, rel=1e-6)
    assert weights("prefix").tolist() == pytest.approx(prefix, rel=1e-6)
    assert weights("token").tolist() == pytest.approx(token, rel=1e-6)
    assert weights("none").tolist() == [1.0] * 5
    assert weights("sequence", cap=2.0).tolist() == pytest.approx([2.0] * 3 + sequence[3:], rel=1e-6)


def test_behaviour_weights_of_a_long_row_stay_finite():
    old, sampler = torch.zeros(4000), torch.full((4000,), -1.0)
    for kind in ("sequence", "prefix", "token"):
        got = behaviour_weights(old, sampler, torch.tensor([0, 4000]), kind=kind)
        assert bool(got.isfinite().all()) and float(got.max()) <= 5.0 + 1e-6


def test_behaviour_weights_are_one_where_old_is_the_sampler_and_carry_no_gradient():
    old = torch.randn(5, requires_grad=True)
    for kind in ("sequence", "prefix", "token", "none"):
        got = behaviour_weights(old, old.detach(), STARTS, kind=kind)
        assert got.tolist() == [1.0] * 5
        assert not got.requires_grad


def test_behaviour_weights_are_checked():
    with pytest.raises(UnknownNameError, match="sequence"):
        weights("sequenc")
    for cap in (0.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="cap"):
            weights("token", cap=cap)
    with pytest.raises(ValueError, match="sampler_logp"):
        behaviour_weights(STEPS, STEPS[:2], STARTS, kind="none")


@pytest.mark.parametrize(
    "bounds",
    [
        *({}, {"token": (0.5, 2.0)}, {"sequence": (0.7, 1.5)}, {"geometric": (0.9, 1.5)}, {"sequence": (0.0, 1.0)}),
        {"token": (0.4, 8.0), "geometric": (0.99, 2.0)},
    ],
)
def test_rejection_is_the_slow_loop(bounds):
    sampler = torch.full((5,), -2.0)
    accepted = rejection_mask(sampler + STEPS, sampler, STARTS, bounds)
    slow = [not rejected for row in reference.rejected([[0.5, 2.0, -1.0], [-0.25, 0.125]], bounds) for rejected in row]
    assert accepted.tolist() == slow and (not all(slow) or not bounds)


@pytest.mark.parametrize("bounds", [(2.0, 1.0), (-0.1, 1.0), (1.0, 1.0), (math.nan, 1.0)])
def test_bounds_of_a_rejection_rise(bounds):
    with pytest.raises(ConfigError, match="must rise from 0 up, but those of 'token'"):
        rejection_mask(STEPS, STEPS, STARTS, {"token": bounds})
