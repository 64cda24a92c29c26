"""95% confidence intervals of rates over tasks, whose attempts are not independent."""

import math
from collections.abc import Sequence

_PRIOR = 0.1
"""Sum of squares that a cluster's variance begins with: rare successes say little about how much tasks differ."""


def interval(rates: Sequence[float], attempts: int = 1) -> tuple[float, float]:
    """Compute the 95% confidence interval of the mean of ``rates``, one of each task, each the mean of ``attempts``.

    It is Wilson's interval (1927) for as many trials as the rates are worth: their mean p varies as that of n =
    p(1-p)/variance independent trials would, where the variance is that between tasks. So several attempts at one task
    count as less than so many trials, and as one trial where all of them end alike.

    Korn and Graubard, Confidence intervals for proportions with small expected number of positive counts estimated from
    survey data (1998), for the number of trials; Franco et al., Comparative study of confidence intervals for
    proportions in complex sample surveys (2019), who find it best with Wilson's interval. ``_PRIOR`` is ours: without
    it the intervals of rare successes are far too narrow. With it Student's quantile in place of the normal one makes
    them too wide. tests/eval/test_intervals.py says how often they hold.

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
    return wilson(mean, min(max(n * spread / variance, n), n * attempts))


def wilson(share: float, n: float) -> tuple[float, float]:
    """Compute Wilson's 95% confidence interval (1927) of a chance, from the ``share`` of successes in ``n`` trials."""
    z = 1.959964  # two-sided 95% quantile of the normal distribution
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)
