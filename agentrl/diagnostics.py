"""How noisy a step's gradient is, how far the policy moved, and where in an episode: to watch, not to train on.

Shapes: ``S`` sampled tokens of all rows end to end, ``R`` rows (one episode each), ``starts`` [R+1] the offset of each
row, ``P`` parameters. ``t`` = 1, 2, … counts the sampled tokens of an episode through all its turns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.algos.losses import LossOut
from agentrl.algos.ratios import cumulative_log_ratio
from agentrl.algos.rows import Rows, check_tokens

BINS = 32
"""Bins of t: the k-th holds 2^k ≤ t < 2^(k+1), so episodes may have four thousand million sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarianceProxy:
    """What the authors of OTB watch: the noise of a gradient, guessed from the logits alone.

    *In logit space*: ``power`` takes each token's logits for parameters of its own, and ``signal`` is measured on the
    model's parameters. So the numbers have no scale in common with a real variance, and ``noise`` may be negative:
    compare them over the steps of one run, and take ``split_variance`` for a variance.
    """

    signal: float
    """‖ĝ‖², of the gradient that was measured."""
    power: float
    """mean_i Σ_t w_t A_t²: a row's squared gradient by its logits, averaged over the rows."""
    noise: float
    """power less signal, over one row less than there are."""


def variance_proxy(grad_norm: float, energy: Tensor, advantages: Tensor, starts: Tensor) -> VarianceProxy:
    """Guess the variance of a gradient from token energies and advantages.

    Args:
        grad_norm: ‖ĝ‖ of the mean over rows of Σ_t A_t ∇logp_t, before it is limited.
        energy: Token energy ``‖onehot(y) − π‖²`` [S], which is the squared norm of ∇logp by the logits.
        advantages: What multiplies ∇logp in that mean [S]: the advantage, over the row's length where the loss
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
    return VarianceProxy(signal=signal, power=power, noise=(power - signal) / (count - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitVariance:
    """What two independent halves of a batch tell about the gradient of the whole; unbiased, and rough by nature."""

    variance: float
    """Of the whole batch's gradient ĝ, summed over parameters: the mean of its squared distance to Eĝ."""
    signal: float
    """‖Eĝ‖²; negative where noise is all there is."""
    cosine: float
    """Of the two halves' gradients; 0 where one of them is 0."""


def split_variance(first: Tensor, second: Tensor) -> SplitVariance:
    """Measure a gradient's variance from those of two halves of the batch.

    With ĝ = (g₁ + g₂)/2 of independent halves, Var ĝ = E‖g₁ − g₂‖²/4 and ‖Eĝ‖² = E g₁·g₂.

    Args:
        first: Gradient of the mean loss of one half's rows [P].
        second: The same of the other half, no group in both [P].

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
    """Split a batch's groups in two halves at random, and measure from their gradients.

    Rows of one group share a baseline, so a group is never cut; an odd group is left out.

    Args:
        gradient: From the rows of a half, indices in rising order, to the gradient of their mean loss [P].
        group: Task instance of each row [R].
        generator: Chooses the halves.

    Returns:
        What the two gradients tell.

    Raises:
        ValueError: there are fewer than two groups, or what ``split_variance`` raises.
    """
    names = torch.unique(group)
    if len(names) < 2:
        raise ValueError(f"a batch is split by groups and needs at least two, not {len(names)}")
    half = len(names) // 2
    order = names[torch.randperm(len(names), generator=generator)]
    first, second = (torch.nonzero(torch.isin(group, part))[:, 0] for part in (order[:half], order[half : 2 * half]))
    return split_variance(gradient(first), gradient(second))


def effective_sample_size(weights: Tensor) -> float:
    """How many equally weighted samples are worth as much as these: (Σw)² / (n·Σw²), as a share of them.

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
    scaled = weights.detach().double() / largest
    return float(scaled.sum().square() / (scaled.numel() * scaled.square().sum()))


def position_moments(values: Tensor, starts: Tensor, among: Tensor | None = None) -> Tensor:
    """Count, sum and sum of squares of ``values`` in log-spaced bins of t; moments of several packs add up.

    Args:
        values: One number per sampled token [S]; booleans count as 0 and 1.
        starts: Offset of each row [R+1].
        among: Which tokens count, bool [S]; None for all.

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
    """The mean of each bin that holds a token, as metrics.

    Args:
        name: What was measured.
        moments: What ``position_moments`` gave, or a sum of it [BINS, 3].

    Returns:
        ``{name}_t{edge}`` for each such bin, ``edge`` the smallest t in it: ``name_t1``, ``name_t2``, ``name_t4`` …
    """
    return {f"{name}_t{edge}": total / count for edge, (count, total, _) in _filled(moments)}


def position_stds(name: str, moments: Tensor) -> dict[str, float]:
    """The population standard deviation of each bin that holds a token; arguments and names as ``position_means``."""
    return {f"{name}_t{edge}": _std(*one) for edge, one in _filled(moments)}


def position_metrics(values: Mapping[str, Tensor], starts: Tensor) -> dict[str, float]:
    """The means by position of several numbers of one batch.

    Args:
        values: One number per sampled token [S], by name.
        starts: Offset of each row [R+1].

    Returns:
        ``{name}_t{edge}``, as ``position_means`` gives it.

    Raises:
        ValueError: what ``position_moments`` raises.
    """
    metrics: dict[str, float] = {}
    for name, one in values.items():
        metrics |= position_means(name, position_moments(one, starts))
    return metrics


@dataclass(slots=True)
class Drift:
    """How far a step's updates found the policy from *old*, added up over their packs: metrics show no packing."""

    shift: Tensor = field(default_factory=lambda: torch.zeros(BINS, 3, dtype=torch.float64))
    """Moments of S_t, the cumulative log ratio θ/old, in nats [BINS, 3]."""
    cut: Tensor = field(default_factory=lambda: torch.zeros(BINS, 3, dtype=torch.float64))
    """Moments of whether the loss left a token with an advantage without a gradient, among such tokens [BINS, 3]."""
    sums: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    """Tokens with an advantage, those of them that the loss calls clipped, all tokens, and their ratios [4]."""
    largest: float = 0.0
    """Largest |log ratio θ/old| of a single token, in nats."""

    def add(self, out: LossOut, logp: Tensor, old_logp: Tensor, advantages: Tensor, starts: Tensor) -> None:
        """Count a pack whose loss ``out`` has been differentiated: ``logp`` has kept its gradient."""
        assert logp.grad is not None
        credited = advantages != 0
        self.shift += position_moments(cumulative_log_ratio(logp, old_logp, starts), starts)
        self.cut += position_moments(logp.grad == 0, starts, credited)
        told = {name: float(value) for name, value in out.metrics.items()}
        some, count = int(credited.sum()), len(logp)
        self.sums += torch.tensor([some, some * told["clip_fraction"], count, count * told["ratio_mean"]])
        self.largest = max(self.largest, told["log_ratio_abs_max"])

    def metrics(self) -> dict[str, float]:
        """Mean and std of S_t and the clip rate, in all and by position; mean and largest ratio."""
        count, total, squares = self.shift.sum(0).tolist()
        some, clipped, tokens, ratios = self.sums.tolist()
        return {
            "clip_fraction": clipped / max(some, 1),
            "ratio_mean": ratios / tokens,
            "log_ratio_abs_max": self.largest,
            "S_mean": total / count,
            "S_std": _std(count, total, squares),
            **position_means("S_mean", self.shift),
            **position_stds("S_std", self.shift),
            **position_means("clip_fraction", self.cut),
        }


def _std(count: float, total: float, squares: float) -> float:
    return max(0.0, squares / count - (total / count) ** 2) ** 0.5


def _filled(moments: Tensor) -> Sequence[tuple[int, tuple[float, float, float]]]:
    """Lower edge and moments of each bin that holds a token."""
    rows: list[tuple[float, float, float]] = moments.tolist()
    return [(2**place, row) for place, row in enumerate(rows) if row[0] > 0]
