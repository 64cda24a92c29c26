import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import algos
from agentrl.algos.losses import LossOut, cispo, cppo, ctpo, gspo, ppo_clip, reinforce
from agentrl.errors import ConfigError, UnknownNameError

from . import reference
from .cases import LOSSES, assert_slow, case, gradient, ragged, random_case


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_multiply_each_tokens_loss_and_get_no_gradient(loss):
    logp, old, advantages, starts = case(*random_case([3, 2]))
    weights = torch.tensor([0.0, 2.0, 1.0, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    got = loss(logp, old, advantages, starts, weights=weights, aggregate="token_mean")
    singles = [
        loss(logp, old, advantages, starts, weights=torch.eye(5, dtype=torch.float64)[k], aggregate="token_mean").loss
        for k in range(5)
    ]
    assert got.loss.item() == pytest.approx(sum(w.item() * s.item() for w, s in zip(weights, singles, strict=True)))
    got.loss.backward()
    assert weights.grad is None


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("position", [1, 2, "weights"])
def test_only_the_log_prob_gets_a_gradient_and_nan_is_refused(loss, position):
    logp, old, advantages, starts = case([[0.1, 0.2]], [[1.0, -1.0]])
    args, options = [logp, old.requires_grad_(), advantages.requires_grad_(), starts], {"weights": torch.ones(2)}
    loss(*args, **options).loss.backward()
    assert logp.grad is not None and old.grad is None and advantages.grad is None
    assert loss(*(part.detach().bfloat16() for part in args[:3]), starts).loss.dtype == torch.float32, "widened"
    bad = torch.tensor([math.nan, 1.0])
    if position == "weights":
        options["weights"] = bad
    else:
        args[position] = bad
    with pytest.raises(ValueError, match="finite"):
        loss(*args, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("old_logp", [-1.0]), ("advantages", [1.0]), ("starts", [0, 1]), ("weights", [1.0, -1.0])],
)
def test_shapes_and_weights_are_checked(name, value):
    good = dict(zip(("logp", "old_logp", "advantages", "starts"), case([[0.1, 0.2]], [[1.0, -1.0]]), strict=True))
    with pytest.raises(ValueError, match=f"{name} must"):
        ctpo(**good | {name: torch.tensor(value)})


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        *((ctpo, {"clip_low": -0.1}), (ctpo, {"clip_dual": math.nan}), (ctpo, {"power": -1.0})),
        *((ppo_clip, {"clip_low": 1.5}), (ppo_clip, {"clip_high": -0.1}), (ppo_clip, {"clip_dual": 0.5})),
        *((cppo, {"threshold": -0.1}), (cppo, {"budget": math.nan}), (cppo, {"floor": 0.0}), (cppo, {"floor": 1.1})),
        *((gspo, {"clip_low": -1.0}), (cispo, {"clip_high": math.nan}), (reinforce, {"cap": 0.5})),
    ],
)
def test_settings_out_of_range_are_refused(loss, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        loss(*case([[0.1]], [[1.0]]), **options)


@settings(max_examples=100, deadline=None)
@given(ragged(), st.sampled_from([(0.2, 0.2), (0.2, 0.28), (1.0, 0.5)]), st.sampled_from([None, 3.0]))
def test_ppo_clip_is_the_slow_loop(rows, window, dual):
    steps, credit = rows
    logp, old, advantages, starts = case(steps, credit)
    out = ppo_clip(logp, old, advantages, starts, clip_low=window[0], clip_high=window[1], clip_dual=dual)
    losses, slopes = reference.ppo([[max(-20.0, d) for d in row] for row in steps], credit, low=window[0],
                                   high=window[1], dual=dual)  # fmt: skip
    assert_slow(out, logp, advantages, losses, slopes)


@settings(max_examples=150, deadline=None)
@given(ragged(), st.sampled_from([0.0, 0.015, 0.1, 1.0]), st.sampled_from([0.3, 0.8, 1.0]))
def test_cppo_is_the_slow_loop(rows, budget, floor):
    steps, credit = rows
    logp, old, advantages, starts = case(steps, credit)
    lengths = [len(row) for row in steps]
    options = {"threshold": 0.1, "budget": budget, "floor": floor}
    out = cppo(logp, old, advantages, starts, **options)
    rows = (reference.cut(tensor.tolist(), lengths) for tensor in (logp, old))
    losses, slopes = reference.cppo(*rows, credit, **options)
    assert_slow(out, logp, advantages, losses, slopes)


def test_gspo_sequence_and_token_form_share_a_gradient_where_the_row_has_one_advantage():
    steps, _ = random_case([4, 3], spread=1e-4)
    logp, old, credit, starts = case(steps, [[0.7] * 4, [-0.3] * 3])
    sequence, token = gspo(logp, old, credit, starts), gspo(logp, old, credit, starts, token_form=True)
    torch.testing.assert_close(sequence.loss, token.loss)
    torch.testing.assert_close(gradient(sequence, logp), gradient(token, logp))
    means = [sum(row) / len(row) for row in steps]
    value = -(0.7 * math.exp(means[0]) - 0.3 * math.exp(means[1])) / 2
    assert sequence.loss.item() == pytest.approx(value)
    uneven = torch.arange(7, dtype=torch.float64)
    assert not torch.allclose(
        gradient(gspo(logp, old, uneven, starts), logp),
        gradient(gspo(logp, old, uneven, starts, token_form=True), logp),
    )


def test_gspo_gradient_is_the_finite_difference():
    logp, old, credit, starts = case(*random_case([4, 3], spread=1e-4))
    assert float(gspo(logp, old, credit, starts).metrics["clip_fraction"]) == 0
    assert torch.autograd.gradcheck(lambda values: gspo(values, old, credit, starts).loss, logp)


def test_gspo_clips_whole_rows():
    logp, old, credit, starts = case([[0.01, -0.008], [2e-4, 2e-4]], [[1.0, 1.0], [1.0, 1.0]])
    out = gspo(logp, old, credit, starts)
    assert gradient(out, logp).tolist()[:2] == [0.0, 0.0]
    assert float(out.metrics["clip_fraction"]) == 0.5


@pytest.mark.parametrize("loss", LOSSES)
def test_clipped_tokens_are_counted_among_those_with_an_advantage(loss):
    logp, old, credit, starts = case([[3.0, 3.0], [0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    assert float(loss(logp, old, credit, starts).metrics["clip_fraction"]) == pytest.approx(1 / 3)
    assert float(loss(logp, old, 0 * credit, starts).metrics["clip_fraction"]) == 0


def test_cispo_and_reinforce_hold_the_ratio_and_keep_every_gradient():
    logp, old, credit, starts = case([[3.0, -0.1, 0.1]], [[1.0, -1.0, 2.0]])
    out = cispo(logp, old, credit, starts)
    ratio = [5.0, math.exp(-0.1), math.exp(0.1)]
    expected = [-r * a / 3 for r, a in zip(ratio, [1.0, -1.0, 2.0], strict=True)]
    assert gradient(out, logp).tolist() == pytest.approx(expected)
    assert float(out.metrics["clip_fraction"]) == pytest.approx(1 / 3)
    low = cispo(logp, old, credit, starts, clip_low=0.05)
    assert float(gradient(low, logp)[1]) == pytest.approx(0.95 / 3)
    got = gradient(reinforce(logp, old, credit, starts, cap=2.0), logp)
    assert got.tolist() == pytest.approx([-2.0 / 3, math.exp(-0.1) / 3, -2.0 * math.exp(0.1) / 3])


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(loss):
    logp, _, credit, starts = case(*random_case([3, 1]))
    got = gradient(loss(logp, logp.detach(), credit, starts, aggregate="token_mean"), logp)
    if loss is gspo:
        got = gradient(loss(logp, logp.detach(), credit, starts, aggregate="token_mean", token_form=True), logp)
    torch.testing.assert_close(got, -credit / 4)


def test_the_table_of_losses():
    args = case(*random_case([3, 2], spread=0.3))
    assert set(algos.LOSSES) == {
        *("ctpo", "cppo", "ppo_clip", "dapo", "gspo", "gspo_token", "cispo", "reinforce"),
    }
    for name in algos.LOSSES:
        assert isinstance(algos.loss(name, *args), LossOut)
    torch.testing.assert_close(
        algos.loss("dapo", *args).loss, ppo_clip(*args, clip_high=0.28, aggregate="token_mean").loss
    )
    torch.testing.assert_close(algos.loss("gspo_token", *args).loss, gspo(*args, token_form=True).loss)
    torch.testing.assert_close(
        algos.loss("dapo", *args, aggregate="seq_mean_token_mean").loss, ppo_clip(*args, clip_high=0.28).loss
    )
    with pytest.raises(UnknownNameError, match="did you mean 'ctpo'"):
        algos.loss("ctpoo", *args)
    with pytest.raises(ConfigError, match="did you mean 'clip_low'"):
        algos.loss("ctpo", *args, clip_lo=0.1)
