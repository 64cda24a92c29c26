"""Ratios between policies: cumulative log ratios, and the weights that correct for the engine's own policy.

Three policies: θ, being optimised; *old*, the trainer's log-probs at the start of the batch; *sampler*, what the
engine reported as it sampled. Shapes: ``S`` sampled tokens of all rows end to end, ``R`` rows, ``starts`` [R+1].
"""

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from agentrl.algos.rows import Rows, check_per_token
from agentrl.errors import ConfigError, UnknownNameError

MAX_TOKEN_LOG_RATIO = 20.0
"""A single token's log ratio is held within ±20, so that one broken log-prob can't make a sum infinite."""

CorrectionKind = Literal["sequence", "prefix", "token", "none"]

RejectionLevel = Literal["token", "sequence", "geometric"]


def token_log_ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    """Compute each token's log ratio d = clamp(logp − old, −20, 20), at least float32; detached [S].

    Args:
        logp: Log-prob of each token under the newer policy [S], in nats.
        old_logp: Under the older one [S], in nats.

    Returns:
        The log ratio of each token [S].
    """
    # Widened before the subtraction: in bfloat16 the difference of two near log-probs has no correct digit.
    dtype = torch.promote_types(logp.dtype, torch.float32)
    difference = logp.detach().to(dtype) - old_logp.detach().to(dtype)
    return difference.clamp(-MAX_TOKEN_LOG_RATIO, MAX_TOKEN_LOG_RATIO)


def cumulative_log_ratio(logp: Tensor, old_logp: Tensor, starts: Tensor) -> Tensor:
    """Sum the log ratios S_t = Σ_{j≤t} d_j along the sampled tokens of each row, across its turns; detached [S].

    ``exp(S_t)`` is also the ratio by which OTB's energy can be weighted.

    Args:
        logp: Log-prob of each token under the newer policy [S], in nats.
        old_logp: Under the older one [S], in nats.
        starts: Offset of each row [R+1].

    Returns:
        S_t of each token [S], at least float32; summed in float64, since 8192 steps of 2e-4 stall in bfloat16.

    Raises:
        ValueError: shapes that do not fit, or log-probs that are not finite.

    Source: arXiv 2605.07331.
    """
    rows, step = _checked_log_ratio(starts, logp=logp, old_logp=old_logp)
    return rows.prefix_sum(step).to(step.dtype)


def behaviour_weights(
    old_logp: Tensor, sampler_logp: Tensor, starts: Tensor, *, kind: CorrectionKind, cap: float = 5.0
) -> Tensor:
    """Compute importance weights that correct a loss on θ/old for off-policy tokens: truncated ratios old/sampler.

    Pass the true old log-probs. Where old *is* the sampler (θ is compared with the engine directly) every weight is 1,
    as it must be: the loss's own ratio contains the correction.

    Args:
        old_logp: Log-prob of each token as the trainer scored it at the start of the batch [S], in nats.
        sampler_logp: As the engine reported it [S], in nats.
        starts: Offset of each row [R+1].
        kind: ``"sequence"``: min(Π_row old/sampler, cap) on all tokens of the row; ``"prefix"``: the product up to and
            including the token; ``"token"``: the token's own ratio; ``"none"``: 1.
        cap: The largest weight.

    Returns:
        One detached weight per token [S], at least float32.

    Raises:
        ValueError: shapes that do not fit, or log-probs that are not finite.
        UnknownNameError: a kind that does not exist.
        ConfigError: a cap that is not a positive number.

    Source: arXiv 2605.07331 (truncated sequence weight, cap 5).
    """
    if kind not in get_args(CorrectionKind):
        raise UnknownNameError("behaviour correction", kind, get_args(CorrectionKind))
    if not (cap > 0 and math.isfinite(cap)):
        raise ConfigError(f"the cap of a behaviour weight must be a positive number, not {cap}")
    rows, step = _checked_log_ratio(starts, old_logp=old_logp, sampler_logp=sampler_logp)
    if kind == "none":
        return torch.ones_like(step)
    # The product of a row's token ratios is the importance weight of its complete episode.
    log_weight = step
    if kind == "sequence":
        log_weight = rows.sum(step)[rows.row]
    if kind == "prefix":
        log_weight = rows.prefix_sum(step)
    # min before exp: the product of a long row would overflow first.
    return log_weight.clamp(max=math.log(cap)).exp().to(step.dtype)


def rejection_mask(
    old_logp: Tensor, sampler_logp: Tensor, starts: Tensor, bounds: Mapping[RejectionLevel, tuple[float, float]]
) -> Tensor:
    """Return which tokens have ratios old/sampler within bounds: the trainer samples them much as the engine did.

    Args:
        old_logp: Log-prob of each token as the trainer scored it at the start of the batch [S], in nats.
        sampler_logp: As the engine reported it [S], in nats.
        starts: Offset of each row [R+1].
        bounds: Smallest and largest ratio by level; a token has to pass all. ``"token"``: its own ratio;
            ``"sequence"``: the product over its row; ``"geometric"``: the geometric mean over its row.

    Returns:
        True for the tokens to train on, bool [S].

    Raises:
        ValueError: shapes that do not fit, or log-probs that are not finite.
        ConfigError: bounds that are not two rising numbers from 0 up.

    Source: IcePop (arXiv 2510.18855) for tokens; ``token_k1``, ``seq_sum_k1`` and ``seq_mean_k1`` of verl, which the
    code of OTB and CTPO extends: they bound the inverse, sampler/old.
    """
    rows, step = _checked_log_ratio(starts, old_logp=old_logp, sampler_logp=sampler_logp)
    total = rows.sum(step)
    log_ratio = {
        "token": step.double(),
        "sequence": total[rows.row],
        # Rows without a token divide by 0, but no token indexes them.
        "geometric": (total / rows.lengths)[rows.row],
    }
    accepted = torch.ones_like(step, dtype=torch.bool)
    for level, (low, high) in bounds.items():
        if not 0 <= low < high:
            raise ConfigError(f"the bounds of a ratio must rise from 0 up, but those of {level!r} are {low} and {high}")
        accepted &= (log_ratio[level] >= (math.log(low) if low else -math.inf)) & (log_ratio[level] <= math.log(high))
    return accepted


def _checked_log_ratio(starts: Tensor, **logps: Tensor) -> tuple[Rows, Tensor]:
    """Check the rows and two named log-probs; return the rows and the log ratios of the first to the second."""
    newer, older = logps.values()
    for name, logp in logps.items():
        check_per_token(name, logp, newer)
    return Rows.of(starts, newer), token_log_ratio(newer, older)
