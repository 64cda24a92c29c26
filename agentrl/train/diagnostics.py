"""Diagnostics of a step: the drift of the policy, overall and by position in the episode. No decision reads them.

Shapes: ``S`` sampled tokens of all rows end to end, ``R`` rows, ``starts`` [R+1] the offset of each row. A row is one
episode, as in ``agentrl/algos``. ``t`` = 1, 2, … counts its sampled tokens through all its turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.algos.losses import LossOut
from agentrl.algos.ratios import cumulative_log_ratio, token_log_ratio
from agentrl.algos.regularizers import k3
from agentrl.algos.rows import Rows, check_per_token

BINS = 32
"""Bins of t: the k-th holds 2^k ≤ t < 2^(k+1), so episodes may have up to 2^BINS - 1 sampled tokens."""

_SHARED = ("clip_fraction", "ratio_mean")
"""Metrics that mean the same whatever the loss; those of a loss's own are logged as ``loss/NAME``."""


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
    check_per_token("weights", weights, weights, least=0.0)
    largest = float(weights.max())
    if largest == 0:
        return 0.0
    # The share does not depend on the scale, and squares of weights in [0, 1] can't overflow.
    scaled = weights.detach().double() / largest
    return float(scaled.sum().square() / (scaled.numel() * scaled.square().sum()))


def baseline_noise(rewards: Tensor, energy: Tensor, starts: Tensor, environment: Tensor) -> dict[str, float]:
    """Predict from a step's episodes how noisy the gradient is with other baselines than the best one.

    Let R be an episode's return and W its energy, the sum of its tokens'. With one baseline b for all episodes the
    second moment of the gradient is E W·[(b − β)² + v]. Here β = E W R / E W is the best baseline, which OTB estimates,
    and v = E W (R − β)² / E W. W stands for the squared norm of the gradient of the episode's log-prob. Each
    environment of a mix has baselines of its own, since returns of different ones do not compare.

    Args:
        rewards: of each sampled token [S].
        energy: Token energy [S], ‖onehot(y) − π‖².
        starts: Offset of each episode [R+1].
        environment: Number of each episode's environment [R].

    Returns:
        ``baseline_best`` β, where there is one environment. Where returns differ, also ``noise_none`` and
        ``noise_mean``: the second moment without a baseline and with the mean return, relative to that with β, at
        least 1. Nothing where no token has an energy.

    Raises:
        ValueError: shapes that do not fit, or numbers that are not finite.

    Source: agentrl/algos/README.md, *Which baseline wins where*; arXiv 2602.07078 for W.
    """
    check_per_token("rewards", rewards, energy)
    check_per_token("energy", energy, energy, least=0.0)
    rows = Rows.of(starts, energy)
    sampled = rows.lengths > 0
    returns, weights = rows.sum(rewards)[sampled], rows.sum(energy)[sampled]
    if not float(weights.sum()):
        return {}
    names, of = environment[sampled].unique(return_inverse=True)

    def average(share: Tensor) -> Tensor:
        sums = [share.new_zeros(len(names)).index_add(0, of, values) for values in (share * returns, share)]
        # An environment without energy counts for nothing.
        return (sums[0] / sums[1]).nan_to_num()[of]

    best, mean = average(weights), average(torch.ones_like(weights))
    spread = float((weights * (returns - best).square()).sum())
    alone = {"baseline_best": float(best[0])} if len(names) == 1 else {}
    # Where all returns of an environment are equal, what is left of them is rounding.
    if len(torch.stack([of.to(returns), returns]).unique(dim=1)[0]) == len(names) or spread == 0:
        return alone
    excess = {"noise_none": best, "noise_mean": mean - best}
    noise = {name: 1 + float((weights * off.square()).sum()) / spread for name, off in excess.items()}
    return alone | noise


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
    check_per_token("values", numbers, numbers)
    # frexp gives t = m·2^e with m in [½, 1), exactly where a logarithm might round.
    bins = torch.frexp(Rows.of(starts, numbers).ordinal.double()).exponent.long() - 1
    counted = torch.ones_like(numbers) if among is None else among.to(numbers)
    terms = torch.stack([counted, counted * numbers, counted * numbers.square()], 1)
    return numbers.new_zeros(BINS, 3).index_add(0, bins, terms)


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
    return {f"{name}_t{edge}": _std(*sums) for edge, sums in _filled(moments)}


@dataclass(slots=True)
class Drift:
    """Distance of the policy θ from *old* as a step's updates found it.

    It holds sums over packs, so that the metrics do not depend on how rows were packed.
    """

    shift: Tensor = field(default_factory=lambda: torch.zeros(BINS, 3, dtype=torch.float64))
    """Moments of S_t, the cumulative log ratio θ/old, in nats [BINS, 3]."""
    cut: Tensor = field(default_factory=lambda: torch.zeros(BINS, 3, dtype=torch.float64))
    """Moments of the indicator that a token's gradient is 0, among tokens with an advantage [BINS, 3]."""
    means: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """By a metric's name the tokens that count in its mean, and the sum over them."""
    largest: float = 0.0
    """Largest |log ratio θ/old| of a single token, in nats."""

    def add(self, out: LossOut, logp: Tensor, old_logp: Tensor, advantages: Tensor, starts: Tensor) -> None:
        """Add a pack after its backward pass, which has left a gradient on ``logp``."""
        assert logp.grad is not None
        # Without an advantage a token has no gradient anyway: only the others can be called cut off by the loss.
        credited = advantages != 0
        self.shift += position_moments(cumulative_log_ratio(logp, old_logp, starts), starts)
        cut, log_ratio = logp.grad == 0, token_log_ratio(logp, old_logp)
        self.cut += position_moments(cut, starts, credited)
        self.largest = max(self.largest, float(log_ratio.abs().max()))
        some = int(credited.sum())
        # What was sampled was so by *old*, or nearly: from its side k3 is unbiased.
        means = {
            "clip_fraction": (cut & credited).sum() / max(some, 1),
            "ratio_mean": log_ratio.exp().mean(),
            "kl_old": k3(old_logp, logp).mean(),
            **{name if name in _SHARED else f"loss/{name}": value for name, value in out.metrics.items()},
        }
        # Means of packs, weighed by their counts, add up to means of the step.
        for name, value in means.items():
            count, total = self.means.get(name, (0, 0.0))
            weight = some if name == "clip_fraction" else len(logp)
            self.means[name] = count + weight, total + weight * float(value)

    def metrics(self) -> dict[str, float]:
        """Return mean and std of S_t and the clip fraction, overall and by position; ratios, KL(old‖θ), ``loss/…``."""
        count, total, squares = self.shift.sum(0).tolist()
        return {
            **{name: total / max(count, 1) for name, (count, total) in self.means.items()},
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
    """Return lower edge and moments of each bin that holds a token."""
    rows: list[tuple[float, float, float]] = moments.tolist()
    return [(2**number, row) for number, row in enumerate(rows) if row[0] > 0]
