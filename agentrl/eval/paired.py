"""Two agents on the same tasks: is one better, by how much, and how many tasks would show it.

Legend: n tasks; d [n] is, for each task, the share of attempts that B won minus the share that A won.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """B against A on the same tasks."""

    tasks: int
    """Number of tasks."""
    a: float
    """Share of A's episodes that succeeded, averaged over tasks."""
    b: float
    """The same of B."""
    difference: float
    """``b`` minus ``a``."""
    low: float
    """Lower end of the 95% interval of ``difference``, of a bootstrap over tasks."""
    high: float
    """Upper end of that interval."""
    better: int
    """Tasks of which B won more attempts."""
    worse: int
    """Tasks of which A won more attempts."""
    p: float
    """McNemar's exact p; with several attempts at a task that of the sign test over tasks, which it then is."""
    tasks_needed: int | None
    """Tasks that would show a difference of this size, at level 5%, four times in five; None where there is none."""


def contrast(a: Sequence[float], b: Sequence[float]) -> Contrast:
    """Compare shares of won attempts, task by task.

    Args:
        a: of each task [n], at least one.
        b: of the same tasks in the same order [n].
    """
    d = [after - before for before, after in zip(a, b, strict=True)]
    better, worse = sum(gain > 0 for gain in d), sum(gain < 0 for gain in d)
    low, high = bootstrap(d)
    return Contrast(
        tasks=len(d),
        a=math.fsum(a) / len(d),
        b=math.fsum(b) / len(d),
        difference=math.fsum(d) / len(d),
        low=low,
        high=high,
        better=better,
        worse=worse,
        p=mcnemar(better, worse),
        tasks_needed=tasks_needed(d),
    )


def mcnemar(better: int, worse: int) -> float:
    """Return the exact two-sided p of McNemar's test: both kinds of discordant pairs are equally likely.

    McNemar, Note on the sampling error of the difference between correlated proportions or percentages (1947), with the
    binomial distribution in place of its limit.
    """
    pairs = better + worse
    # Each number of ways from the one before: to compute them one by one takes seconds where there are thousands.
    ways = total = 1
    for lost in range(min(better, worse)):
        ways = ways * (pairs - lost) // (lost + 1)
        total += ways
    return min(1.0, 2 * total / 2**pairs)


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% percentile interval of the mean of ``values`` (Efron 1979), the same one each time."""
    # Few values are distinct: to resample how often each comes is the same, and takes no room for n of them.
    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    n = len(values)
    drawn = np.random.default_rng(0).multinomial(n, counts / n, size=_RESAMPLES) @ distinct / n
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def tasks_needed(d: Sequence[float]) -> int | None:
    """Return how many tasks show a mean difference like that of ``d``, with a power of 80% at level 5%.

    n = (z_0.975 √ψ + z_0.8 √(ψ - δ²))² / δ², where δ is the mean of d and ψ that of d², which with one attempt is the
    share of discordant pairs: Connor, Sample size for testing differences in proportions for the paired-sample design,
    Biometrics 43 (1987), 207-211. McNemar's exact test, which is cautious, then has a power of 75% to 81%.
    """
    delta, psi = math.fsum(d) / len(d), math.fsum(gain * gain for gain in d) / len(d)
    if abs(delta) < 1e-12:
        return None
    level, power = (NormalDist().inv_cdf(share) for share in (0.975, 0.8))
    return math.ceil((level * math.sqrt(psi) + power * math.sqrt(max(0.0, psi - delta**2))) ** 2 / delta**2)
