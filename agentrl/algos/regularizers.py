"""Terms beside the policy loss: KL to a frozen reference, and an entropy bonus.

Shapes: ``S`` sampled tokens of all rows end to end, ``R`` rows, ``starts`` [R+1] the offset of each row.
"""

import torch
from torch import Tensor

from agentrl.algos.aggregate import Aggregate, coefficients
from agentrl.algos.losses import MAX_LOG_RATIO
from agentrl.algos.rows import Rows, check_per_token


def k3(logp: Tensor, reference_logp: Tensor) -> Tensor:
    """Estimate KL(θ‖reference) from each sampled token: e^x − 1 − x, x = reference − θ; differentiable [S].

    The estimate is never negative, and unbiased where θ sampled the tokens. GRPO descends its derivative by θ's
    log-prob, 1 − e^x; on average that is the gradient of KL(reference‖θ). Above x = 10 the estimate is continued by its
    tangent: so a token that θ has made that much less likely is still pulled back.

    Args:
        logp: Log-prob of each token under the policy being optimised [S], in nats.
        reference_logp: Under the reference [S], in nats.

    Raises:
        ValueError: shapes that do not fit, or log-probs that are not finite.

    Source: J. Schulman, Approximating KL Divergence, 2020; in the loss as in GRPO (arXiv 2402.03300, equation 4).
    """
    check_per_token("logp", logp, logp)
    check_per_token("reference_logp", reference_logp, logp)
    dtype = torch.promote_types(logp.dtype, torch.float32)
    difference = reference_logp.detach().to(dtype) - logp.to(dtype)
    # e^x may overflow for a token that is likely under the reference and nearly impossible under θ.
    held = difference.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(held) + held.exp() * (difference - held) - difference


def regularizer(
    logp: Tensor,
    entropy: Tensor,
    starts: Tensor,
    *,
    reference_logp: Tensor | None,
    kl_coef: float,
    entropy_coef: float,
    aggregate: Aggregate,
    max_tokens: int | None = None,
) -> Tensor:
    """Compute kl_coef·KL(θ‖reference) − entropy_coef·H, aggregated as the policy loss is, to be added to it.

    The weights old/sampler do not apply to it.

    Args:
        logp: Log-prob of each token under the policy being optimised [S], in nats.
        entropy: Entropy of the distribution of each token [S], in nats.
        starts: Offset of each row [R+1].
        reference_logp: Log-prob under the reference [S], in nats; None where ``kl_coef`` is 0.
        kl_coef: Weight of the KL.
        entropy_coef: Weight of the entropy.
        aggregate: How the tokens' terms become one number.
        max_tokens: The constant length of the aggregation ``token_sum_const``.

    Returns:
        A scalar that gradients flow from.

    Raises:
        ValueError: shapes that do not fit, or numbers that are not finite.

    Source: arXiv 2402.03300 for the KL in the loss, arXiv 1602.01783 for the entropy.
    """
    check_per_token("entropy", entropy, logp)
    term = -entropy_coef * entropy
    if reference_logp is not None:
        term = term + kl_coef * k3(logp, reference_logp)
    return (term * coefficients(aggregate, Rows.of(starts, logp), max_tokens).to(term)).sum()
