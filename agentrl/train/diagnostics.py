"""Diagnostics of a step: the noise of its gradient, the drift of the policy, and both by position in the episode.

They are watched, and no decision reads them.

Shapes: ``S`` sampled tokens of all rows end to end, ``R`` rows (one episode each), ``starts`` [R+1] the offset of each
row, ``P`` parameters. ``t`` = 1, 2, … counts the sampled tokens of an episode through all its turns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.algos.losses import LossOut
from agentrl.algos.ratios import cumulative_log_ratio
from agentrl.algos.regularizers import k3
from agentrl.algos.rows import Rows, check_tokens

BINS = 32
"""Bins of t: the k-th holds 2^k ≤ t < 2^(k+1), so episodes may have up to 2^BINS - 1 sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarianceProxy:
    """A cheap proxy for the gradient's variance, as the authors of OTB log it.

    ``power`` is a squared gradient with respect to the logits, as if each token's logits were parameters; ``signal``
    is one with respect to the model's parameters. So the proxy is not on the scale of the variance, and ``noise`` may
    be negative. Compare it across the steps of one run only; ``split_variance`` estimates the variance itself.
    """

    signal: float
    """‖ĝ‖² of the measured gradient."""
    power: float
    """mean_i Σ_t w_t A_t²: the squared gradient of a row with respect to its logits, averaged over the rows."""
    noise: float
    """(power - signal) / (n - 1), with n rows that have a sampled token."""


def variance_proxy(grad_norm: float, energy: Tensor, advantages: Tensor, starts: Tensor) -> VarianceProxy:
    """Compute the proxy from the gradient's norm, token energies and advantages.

    Args:
        grad_norm: ‖ĝ‖ of the mean over rows of Σ_t A_t ∇logp_t, before it is clipped.
        energy: Token energy ``‖onehot(y) − π‖²`` [S]: the squared norm of ∇logp with respect to the logits.
        advantages: The factor of ∇logp in that mean [S]: the advantage, divided by the row's length where the loss
            averages over a row's tokens.
        starts: Offset of each row [R+1].

    Returns:
        Signal, power and noise. A row without a sampled token does not count.

    Raises:
        ValueError: shapes that do not fit, numbers that are not finite, or fewer than two rows with a sampled token.

    Source: arXiv 2602.07078 and its authors' code; there power has one advantage per row, here one per token.
    """
    check_tokens("advantages", advantages, advantages)
    check_tokens("energy", energy, advantages, least=0.0)
    rows = Rows.of(starts, advantages)
    count = int((rows.lengths > 0).sum())
    if count < 2:
        raise ValueError(f"a variance needs at least two rows with a sampled token, not {count}")
    power = float((energy.double() * advantages.double().square()).sum()) / count
    signal = grad_norm**2
    # Of n independent gradients g_i with mean ĝ, Var ĝ is estimated by (mean‖g_i‖² − ‖ĝ‖²) / (n − 1).
    return VarianceProxy(signal=signal, power=power, noise=(power - signal) / (count - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitVariance:
    """Variance of a batch's gradient, estimated from two independent halves of it: unbiased, but itself noisy."""

    variance: float
    """Mean squared distance of the whole batch's gradient ĝ from its mean Eĝ, summed over parameters."""
    signal: float
    """‖Eĝ‖²; the estimate may be negative where the gradient is all noise."""
    cosine: float
    """Cosine of the two halves' gradients; 0 where one of them is 0."""


def split_variance(first: Tensor, second: Tensor) -> SplitVariance:
    """Estimate a gradient's variance from the gradients of two halves of the batch.

    With ĝ = (g₁ + g₂)/2 of independent halves, Var ĝ = E‖g₁ − g₂‖²/4 and ‖Eĝ‖² = E g₁·g₂.

    Args:
        first: Gradient of the mean loss of one half's rows [P].
        second: That of the other half [P]; no group is in both halves.

    Returns:
        Variance, signal and cosine.

    Raises:
        ValueError: the gradients are not two vectors of one length.
    """
    if first.ndim != 1 or first.shape != second.shape:
        raise ValueError(f"gradients must be two vectors of one length, not {list(first.shape)}, {list(second.shape)}")
    one, other = first.detach().double(), second.detach().double()
    signal = float(one @ other)
    scale = float(one.norm() * other.norm())
    variance = float((one - other).square().sum()) / 4
    return SplitVariance(variance=variance, signal=signal, cosine=signal / scale if scale else 0.0)


def measured_variance(
    gradient: Callable[[Tensor], Tensor], group: Tensor, generator: torch.Generator
) -> SplitVariance:  # fmt: skip
    """Split a batch's groups into two random halves, and estimate the variance from their gradients.

    Rows of one group share a baseline, so a group is never split; an odd group is left out.

    Args:
        gradient: Maps the rows of a half, indices in rising order, to the gradient of their mean loss [P].
        group: Task instance of each row [R].
        generator: Chooses the halves.

    Returns:
        Variance, signal and cosine.

    Raises:
        ValueError: there are fewer than two groups, or the gradients are not two vectors of one length.
    """
    names = torch.unique(group)
    if len(names) < 2:
        raise ValueError(f"a batch is split by groups and needs at least two, not {len(names)}")
    half = len(names) // 2
    order = names[torch.randperm(len(names), generator=generator)]
    first, second = (torch.nonzero(torch.isin(group, part))[:, 0] for part in (order[:half], order[half : 2 * half]))
    return split_variance(gradient(first), gradient(second))


def effective_sample_size(weights: Tensor) -> float:
    """Compute the effective sample size of importance weights as a share of n: (Σw)² / (n·Σw²).

    Args:
        weights: Importance weight of each sample [n].

    Returns:
        The share, in (0, 1]; 1 where all weights are one number, 0 where all are 0.

    Raises:
        ValueError: there are no weights, or one is negative or not finite.

    Source: Kish, Survey Sampling, 1965.
    """
    if weights.numel() == 0:
        raise ValueError("there are no weights to count")
    check_tokens("weights", weights, weights, least=0.0)
    largest = float(weights.max())
    if largest == 0:
        return 0.0
    # The share does not depend on the scale, and squares of weights in [0, 1] can't overflow.
    scaled = weights.detach().double() / largest
    return float(scaled.sum().square() / (scaled.numel() * scaled.square().sum()))


def position_moments(values: Tensor, starts: Tensor, among: Tensor | None = None) -> Tensor:
    """Compute count, sum and sum of squares of ``values`` in log-spaced bins of t; moments of several packs add up.

    Args:
        values: One number per sampled token [S]; booleans count as 0 and 1.
        starts: Offset of each row [R+1].
        among: True for the tokens that count, bool [S]; None for all.

    Returns:
        The moments of each bin 1, 2–3, 4–7, 8–15 … of t [BINS, 3], float64.

    Raises:
        ValueError: shapes that do not fit, or numbers that are not finite.
    """
    numbers = values.detach().double()
    check_tokens("values", numbers, numbers)
    # frexp gives t = m·2^e with m in [½, 1), exactly where a logarithm might round.
    place = torch.frexp(Rows.of(starts, numbers).ordinal.double()).exponent.long() - 1
    counted = torch.ones_like(numbers) if among is None else among.to(numbers)
    terms = torch.stack([counted, counted * numbers, counted * numbers.square()], 1)
    return numbers.new_zeros(BINS, 3).index_add(0, place, terms)


def position_means(name: str, moments: Tensor) -> dict[str, float]:
    """Name the mean of each bin that holds a token, as metrics.

    Args:
        name: Prefix of the metrics' names.
        moments: Result of ``position_moments``, or a sum of several [BINS, 3].

    Returns:
        ``{name}_t{edge}`` for each such bin, ``edge`` the smallest t in it: ``name_t1``, ``name_t2``, ``name_t4`` …
    """
    return {f"{name}_t{edge}": total / count for edge, (count, total, _) in _filled(moments)}


def position_stds(name: str, moments: Tensor) -> dict[str, float]:
    """Name the population standard deviation of each bin that holds a token; see ``position_means``."""
    return {f"{name}_t{edge}": _std(*one) for edge, one in _filled(moments)}


@dataclass(slots=True)
class Drift:
    """Distance of the policy θ from *old* as a step's updates found it.

    It holds sums over packs, so that the metrics do not depend on how rows were packed.
    """

    shift: Tensor = field(default_factory=lambda: torch.zeros(BINS, 3, dtype=torch.float64))
    """Moments of S_t, the cumulative log ratio θ/old, in nats [BINS, 3]."""
    cut: Tensor = field(default_factory=lambda: torch.zeros(BINS, 3, dtype=torch.float64))
    """Moments of the indicator that a token's gradient is 0, among tokens with an advantage [BINS, 3]."""
    sums: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    """Tokens with an advantage, clipped ones among them, all tokens, and the sums of their ratios and of k3 [5]."""
    largest: float = 0.0
    """Largest |log ratio θ/old| of a single token, in nats."""

    def add(self, out: LossOut, logp: Tensor, old_logp: Tensor, advantages: Tensor, starts: Tensor) -> None:
        """Add a pack after its backward pass, which has left a gradient on ``logp``."""
        assert logp.grad is not None
        # Without an advantage a token has no gradient anyway: only the others can be called cut off by the loss.
        credited = advantages != 0
        self.shift += position_moments(cumulative_log_ratio(logp, old_logp, starts), starts)
        self.cut += position_moments(logp.grad == 0, starts, credited)
        told = {name: float(value) for name, value in out.metrics.items()}
        # The loss reports means of its pack; weighed by their counts they add up to means of the step.
        some, count = int(credited.sum()), len(logp)
        # What was sampled was so by *old*, or nearly: from its side k3 is unbiased.
        kl = float(k3(old_logp, logp).sum())
        self.sums += torch.tensor([some, some * told["clip_fraction"], count, count * told["ratio_mean"], kl])
        self.largest = max(self.largest, told["log_ratio_abs_max"])

    def metrics(self) -> dict[str, float]:
        """Give mean and std of S_t and the clip fraction, overall and by position; the ratios; KL(old‖θ)."""
        count, total, squares = self.shift.sum(0).tolist()
        some, clipped, tokens, ratios, kl = self.sums.tolist()
        return {
            "clip_fraction": clipped / max(some, 1),
            "ratio_mean": ratios / tokens,
            "kl_old": kl / tokens,
            "log_ratio_abs_max": self.largest,
            "S_mean": total / count,
            "S_std": _std(count, total, squares),
            **position_means("S_mean", self.shift),
            **position_stds("S_std", self.shift),
            **position_means("clip_fraction", self.cut),
        }


def _std(count: float, total: float, squares: float) -> float:
    # Rounding can make the difference of two near-equal numbers negative.
    return max(0.0, squares / count - (total / count) ** 2) ** 0.5


def _filled(moments: Tensor) -> Sequence[tuple[int, tuple[float, float, float]]]:
    """Give lower edge and moments of each bin that holds a token."""
    rows: list[tuple[float, float, float]] = moments.tolist()
    return [(2**place, row) for place, row in enumerate(rows) if row[0] > 0]
