"""95% confidence intervals of rates over tasks, whose attempts are not independent."""

import math
from collections.abc import Sequence

_Z = 1.959964
"""Two-sided 95% quantile of the normal distribution."""
_PRIOR = 0.1
"""Sum of squares that a cluster's variance begins with: rare successes say little about how much tasks differ."""


def interval(rates: Sequence[float], attempts: int = 1) -> tuple[float, float]:
    """Compute the 95% confidence interval of the mean of ``rates``, one of each task, each the mean of ``attempts``.

    It is Wilson's interval (1927) for as many trials as the rates are worth: their mean p varies as that of n =
    p(1-p)/variance independent trials would, where the variance is that between tasks. So several attempts at one task
    count as less than so many trials, and as one trial where all of them end alike. The quantile is Student's, as the
    variance is estimated.

    Korn and Graubard, Confidence intervals for proportions with small expected number of positive counts estimated from
    survey data (1998), for the number of trials; Franco et al., Comparative study of confidence intervals for
    proportions in complex sample surveys (2019), who find it best with Wilson's interval. ``_PRIOR`` is ours: without
    it the intervals of rare successes are far too narrow. tests/eval/test_intervals.py says how often they hold.

    Args:
        rates: of the tasks, at least one, each in [0, 1].
        attempts: how many trials a rate can be worth at most.
    """
    n = len(rates)
    mean = sum(rates) / n
    spread = mean * (1 - mean)
    if attempts == 1 or n == 1 or not 0 < mean < 1:
        return wilson(mean, n)
    squares = math.fsum((rate - mean) ** 2 for rate in rates)
    variance = (squares + _PRIOR) / (n - 1 + _PRIOR / spread)
    return wilson(mean, min(max(n * spread / variance, n), n * attempts), student(n - 1))


def wilson(share: float, n: float, quantile: float = _Z) -> tuple[float, float]:
    """Compute Wilson's 95% confidence interval (1927) of a chance, from the ``share`` of successes in ``n`` trials."""
    z = quantile
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def student(freedom: int) -> float:
    """Approximate the two-sided 95% quantile of Student's distribution, to 0.01 from 3 degrees of ``freedom`` on.

    Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.5.
    """
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
