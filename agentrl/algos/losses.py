"""Policy losses on sampled tokens: CTPO, and what it is compared with.

Shapes: ``S`` sampled tokens of all rows end to end, ``R`` rows. A row is one episode: all of its sampled tokens in
time, whatever pieces the model has read it in (docs/rows.md). ``t`` = 1, 2, … counts them through all turns, and
d = logp − old_logp is a token's log ratio. Log-probs are in nats, at the sampling temperature. A loss is written as a
function of ``LossInputs`` and its own options. It is called with the inputs themselves:

    logp [S]         log-prob of each token under the policy being optimised
    old_logp [S]     log-prob at the start of the batch
    advantages [S]   advantage of each token; detached
    starts [R+1]     offset of each row
    weights [S]      importance weight of each token's loss, as ``behaviour_weights`` returns it; None: 1
    aggregate        how the tokens' losses become one number (``aggregate.coefficients``)
    max_tokens       the constant length of the aggregation ``token_sum_const``

A loss returns a ``LossOut``. It raises ValueError for shapes that do not fit or numbers that are not finite,
ConfigError for an option out of its range, and UnknownNameError for an aggregation that does not exist.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from inspect import Signature, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentrl.algos.aggregate import Aggregate, coefficients
from agentrl.algos.ratios import token_log_ratio
from agentrl.algos.rows import Rows, check_per_token
from agentrl.errors import ConfigError

MAX_LOG_RATIO = 10.0
"""Upper clamp of the logarithm of every ratio that a loss multiplies by."""


class LossOut(NamedTuple):
    """A loss and its metrics."""

    loss: Tensor
    """The aggregated loss, a scalar that gradients flow from."""
    metrics: dict[str, Tensor]
    """Detached means over the sampled tokens, by names of the loss's own. Two have a meaning for all losses:
    ``clip_fraction``, the share of tokens with an advantage that the loss clips, and ``ratio_mean``, the mean of the
    ratio that it reads. Without them the trainer reports the share without a gradient, and the tokens' own ratios."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The checked inputs of a loss, at least float32, everything but ``logp`` and ``grad_only`` detached."""

    rows: Rows
    """The rows of the tokens."""
    logp: Tensor
    """Log-prob of each token under the policy being optimised, as given [S]."""
    old_logp: Tensor
    """Log-prob of each token at the start of the batch, as given [S]."""
    advantages: Tensor
    """Advantage of each token [S]."""
    factors: Tensor
    """Factor of each token's loss in the aggregated one, its weight included [S]."""
    log_ratio: Tensor
    """The log ratio θ/old of each token, clamped to ±20 [S]."""
    grad_only: Tensor
    """Zeros that carry the gradient of the log-prob: logp less its detached self [S]."""


class PolicyLoss:
    """A loss that is written as a function of ``LossInputs`` and its own options, and called with the inputs.

    Args:
        function: the loss; its options are keyword arguments.
    """

    def __init__(self, function: Callable[..., LossOut]) -> None:
        self._function = function
        update_wrapper(self, function)
        # A config's options are checked against the signature, so it must show the loss's own options too.
        shared = signature(self.__call__).parameters.values()
        own = signature(function).parameters.values()
        parameters = [option for option in (*shared, *own) if option.name not in ("inputs", "options")]
        self.__signature__ = Signature(parameters, return_annotation=LossOut)

    def __call__(
        self,
        logp: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        starts: Tensor,
        *,
        weights: Tensor | None = None,
        aggregate: Aggregate = "seq_mean_token_mean",
        max_tokens: int | None = None,
        **options: Any,
    ) -> LossOut:
        """Compute the loss of a pack of rows; the arguments are those of the module's docstring."""
        check_per_token("logp", logp, logp)
        check_per_token("old_logp", old_logp, logp)
        check_per_token("advantages", advantages, logp)
        if weights is not None:
            check_per_token("weights", weights, logp, least=0.0)
        rows, log_ratio = Rows.of(starts, logp), token_log_ratio(logp, old_logp)
        factors = coefficients(aggregate, rows, max_tokens).to(log_ratio)
        inputs = LossInputs(
            rows=rows,
            logp=logp,
            old_logp=old_logp.detach(),
            advantages=advantages.detach().to(log_ratio),
            factors=factors if weights is None else factors * weights.detach().to(log_ratio),
            log_ratio=log_ratio,
            # Added to a detached value, it gives that value logp's gradient without changing it.
            grad_only=(logp - logp.detach()).to(log_ratio),
        )
        return self._function(inputs, **options)


@PolicyLoss
def ctpo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.025,
    clip_high: float = 0.05,
    clip_dual: float | None = 0.05,
    power: float = 0.5,
) -> LossOut:
    """CTPO: the cumulative ratio c_t = exp(Σ_{j≤t} d_j) in a window that widens with t^power.

    The prefix is detached: ∂loss_t/∂logp_t = −A_t·c_t, and no other token's log-prob has a part in loss_t. A token with
    A > 0 is trained iff S_t ≤ clip_high·t^p, one with A < 0 iff −clip_low·t^p ≤ S_t ≤ clip_dual·t^p.

    Options:
        clip_low: Lower half-width of the window at t = 1, in nats.
        clip_high: Upper half-width at t = 1, in nats.
        clip_dual: Where the loss of a negative advantage stops growing at t = 1, in nats; None: nowhere.
        power: Exponent p; 0 for a window of fixed width.

    Source: arXiv 2605.07331.
    """
    dual = math.inf if clip_dual is None else clip_dual
    _check_widths("ctpo", clip_low=clip_low, clip_high=clip_high, clip_dual=dual, power=power)
    total = inputs.rows.prefix_sum(inputs.log_ratio).to(inputs.log_ratio.dtype)
    # S_t is a sum of t steps: with power 1/2 the window grows as the standard deviation of a random walk does.
    width = inputs.rows.ordinal.to(total.dtype) ** power
    # grad_only is the token's own log-prob, so the gradient sees the prefix as a constant factor.
    return _clipped(inputs, total, inputs.grad_only, low=-clip_low * width, high=clip_high * width, dual=dual * width)


@PolicyLoss
def cppo(inputs: LossInputs, *, threshold: float = 0.15, budget: float = 0.015, floor: float = 0.8) -> LossOut:
    """CPPO: −A·r, but 0 for a token that moves π away from *old* by more than its row's prefix leaves room for.

    D_t = |π(y_t) − old(y_t)| is weighed by w_t, which falls in a straight line from 1 at the row's first token to
    ``floor`` at its last. With the prefix sums S_t = Σ_{j≤t} w_j·D_j and W_t = Σ_{j≤t} w_j a token is trained iff
    A·(r − 1) ≤ 0 or w_t·D_t ≤ min(threshold, threshold + budget·W_{t−1} − S_{t−1}).

    Options:
        threshold: The largest w_t·D_t, δ in the paper.
        budget: The largest weighted mean of D over a prefix, δ_b; 1 for none, and DPPO with ``floor=1`` as well.
        floor: The weight of the row's last token, in (0, 1].

    Source: arXiv 2606.10968, equations 8 to 11 and 22, with the binary form of the divergence. Its μ, the policy that
    sampled, is *old* here, as in all losses.
    """
    _check_widths("cppo", threshold=threshold, budget=budget)
    if not 0 < floor <= 1:
        raise ConfigError(f"floor of cppo must be above 0 and at most 1, but is {floor}")
    rows = inputs.rows
    moved = (inputs.logp.detach().double().exp() - inputs.old_logp.double().exp()).abs()
    weight = 1 - (1 - floor) * (rows.ordinal - 1) / (rows.lengths - 1).clamp_min(1)[rows.row]
    spent = weight * moved
    # The part of the budget that the row's prefix left unused. Sums over the tokens before are the inclusive ones less
    # the token's own term.
    slack = budget * (rows.prefix_sum(weight) - weight) - (rows.prefix_sum(spent) - spent)
    # Only a token that moves further away from *old* is cut: one that moves back mends the row's divergence. A clamp
    # at 0 makes threshold + slack the smaller of the two bounds.
    away = inputs.advantages * inputs.log_ratio > 0
    cut = away & (spent > threshold + slack.clamp(max=0.0))
    ratio = (inputs.log_ratio + inputs.grad_only).clamp(max=MAX_LOG_RATIO).exp()
    surrogate = torch.where(cut, 0.0, -inputs.advantages * ratio)
    return _out(inputs, inputs.log_ratio, surrogate, cut)


@PolicyLoss
def ppo_clip(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None
) -> LossOut:
    """PPO's clipped surrogate per token: max(−A·r, −A·clip(r, 1 − low, 1 + high)), r = exp(logp − old).

    DAPO is this with ``clip_high=.28, aggregate="token_mean"``; the dual clip with ``clip_dual=3``.

    Options:
        clip_low: How far below 1 the ratio counts, at most 1.
        clip_high: How far above 1 the ratio counts.
        clip_dual: The ratio where the loss of a negative advantage stops growing, above 1; None: nowhere.

    Source: arXiv 1707.06347, as in GRPO (2402.03300); clip-higher 2503.14476; dual clip 1912.09729.
    """
    dual = math.inf if clip_dual is None else clip_dual
    if not dual > 1:
        raise ConfigError(f"clip_dual of ppo_clip is a ratio and must be above 1, but is {dual}")
    low, high = _log_window("ppo_clip", clip_low, clip_high)
    return _clipped(inputs, inputs.log_ratio, inputs.grad_only, low=low, high=high, dual=math.log(dual))


@PolicyLoss
def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4, token_form: bool = False) -> LossOut:
    """GSPO: PPO's clip on the row's length-normalised ratio s = exp(mean_j d_j).

    Options:
        clip_low: How far below 1 the ratio counts, at most 1.
        clip_high: How far above 1 the ratio counts.
        token_form: Let each token's gradient flow through its own log-prob only, with the row's ratio as value
            (GSPO-token), rather than through the mean over the row. Where the row has one advantage the two agree.

    Source: arXiv 2507.18071.
    """
    rows = inputs.rows
    # Rows without a token divide by 0, but no token indexes them.
    mean = (rows.sum(inputs.log_ratio) / rows.lengths)[rows.row].to(inputs.log_ratio)
    # The value is the row's mean ratio in both forms; the forms differ only in where its gradient goes.
    flow = inputs.grad_only
    if not token_form:
        flow = (rows.sum(flow) / rows.lengths)[rows.row].to(mean)
    low, high = _log_window("gspo", clip_low, clip_high)
    return _clipped(inputs, mean, flow, low=low, high=high, dual=math.inf)


@PolicyLoss
def cispo(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0) -> LossOut:
    """CISPO: −sg(clip(r, 1 − low, 1 + high))·A·logp; the ratio is clipped, but no token's gradient is cut.

    Its paper sets no lower bound, hence ``clip_low=1``, and does not state the upper one: a ratio of 5 is our choice.
    The metric ``clip_fraction`` counts the clipped ratios.

    Options:
        clip_low: How far below 1 the ratio counts, at most 1.
        clip_high: How far above 1 the ratio counts.

    Source: arXiv 2506.13585.
    """
    return _truncated(inputs, *_log_window("cispo", clip_low, clip_high))


@PolicyLoss
def reinforce(inputs: LossInputs, *, cap: float = 5.0) -> LossOut:
    """REINFORCE with a truncated weight: −sg(min(r, cap))·A·logp, r = exp(logp − old) and cap at least 1.

    The metric ``clip_fraction`` counts the truncated ratios.
    """
    # `not >=` refuses NaN as well.
    if not cap >= 1:
        raise ConfigError(f"cap of reinforce must be at least 1, but is {cap}")
    return _truncated(inputs, *_log_window("reinforce", 1.0, cap - 1.0))


def _truncated(inputs: LossInputs, low: float, high: float) -> LossOut:
    """Weigh −A·logp by the ratio, whose logarithm is clipped to [low, high]; no token's gradient is cut."""
    # log_ratio is detached, which makes the ratio the constant sg(…); the gradient is that of logp alone.
    ratio = inputs.log_ratio.clamp(low, min(high, MAX_LOG_RATIO)).exp()
    clipped = (inputs.log_ratio < low) | (inputs.log_ratio > high)
    return _out(inputs, inputs.log_ratio, -ratio * inputs.advantages * inputs.logp, clipped)


def _clipped(
    inputs: LossInputs,
    log_ratio: Tensor,
    flow: Tensor,
    *,
    low: Tensor | float,
    high: Tensor | float,
    dual: Tensor | float,
) -> LossOut:
    """Clip the surrogate of the detached ``log_ratio`` [S]; its gradient flows through the zeros ``flow`` [S].

    max(−A·r, −A·clip(r)), with min(·, −A·r_dual) where A < 0, is −A·exp of the log ratio clamped below ``high`` where
    A ≥ 0 and to [low, dual] where A < 0. The bounds are those of the log ratio, one for each token [S] or one for all.
    """
    negative = inputs.advantages < 0
    # Of two numbers torch.where would make float32.
    low, high, dual = (
        torch.as_tensor(bound, dtype=log_ratio.dtype, device=log_ratio.device) for bound in (low, high, dual)
    )
    floor = torch.where(negative, low, -math.inf)
    ceiling = torch.where(negative, dual, high).clamp(max=MAX_LOG_RATIO)
    cut = (log_ratio < floor) | (log_ratio > ceiling)
    # clamp's gradient is 0 outside its bounds, which is exactly what PPO's max and min cut.
    surrogate = -inputs.advantages * (log_ratio + flow).clamp(floor, ceiling).exp()
    return _out(inputs, log_ratio, surrogate, cut)


def _out(inputs: LossInputs, log_ratio: Tensor, surrogate: Tensor, cut: Tensor) -> LossOut:
    """Aggregate the tokens' losses; no metrics where there are no tokens, since no number would be true."""
    loss = (surrogate * inputs.factors).sum()
    if log_ratio.numel() == 0:
        return LossOut(loss, {})
    # A token without an advantage has no gradient to cut: counting it would only dilute the fraction.
    credited = inputs.advantages != 0
    metrics = {
        "clip_fraction": (cut & credited).sum() / credited.sum().clamp_min(1),
        "ratio_mean": log_ratio.clamp(max=MAX_LOG_RATIO).exp().mean(),
    }
    return LossOut(loss, metrics)


def _check_widths(loss: str, **widths: float) -> None:
    for name, value in widths.items():
        if not value >= 0:
            raise ConfigError(f"{name} of {loss} must not be negative, but is {value}")


def _log_window(loss: str, clip_low: float, clip_high: float) -> tuple[float, float]:
    """Turn the window [1 − low, 1 + high] of a ratio into bounds of its logarithm."""
    if not 0 <= clip_low <= 1:
        raise ConfigError(f"clip_low of {loss} must lie between 0 and 1, but is {clip_low}")
    if not clip_high >= 0:
        raise ConfigError(f"clip_high of {loss} must not be negative, but is {clip_high}")
    # log1p raises an error at -1, where there is no lower bound.
    return math.log1p(-clip_low) if clip_low < 1 else -math.inf, math.log1p(clip_high)
