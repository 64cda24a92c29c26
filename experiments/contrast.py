"""Compare arms of learning runs, within seeds: tokens until a success, their ratios and intervals.

A run that never gets there counts with all its tokens, and its pair is ranked, not averaged.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from agentrl.eval.paired import bootstrap, mcnemar

WINDOW = 3
"""Steps whose mean success is asked."""
_RESAMPLES = 10_000
Row = Mapping[str, Any]
Key = tuple[str, str]
"""Arm and rewards."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Tokens until a success."""

    tokens: float
    """As many as were sampled; all of them where the run never got there."""
    censored: bool
    """Whether it never got there."""


def levels(row: Row) -> list[tuple[int, float]]:
    """List tokens sampled so far, and the mean success of the last three steps, from the third step on."""
    tokens = list(accumulate(row["tokens"]))
    levels_so_far: list[tuple[int, float]] = []
    for end in range(WINDOW, len(tokens) + 1):
        won, played = (sum(row[key][end - WINDOW : end]) for key in ("successes", "episodes"))
        levels_so_far.append((tokens[end - 1], won / played))
    return levels_so_far


def reached(row: Row, target: float) -> Reached:
    """Find the tokens until the mean success of three steps is ``target``."""
    for tokens, level in levels(row):
        if level >= target:
            return Reached(tokens, False)
    return Reached(sum(row["tokens"]) or 1, True)


def by_arm(rows: Iterable[Row], purpose: str) -> dict[Key, dict[int, Row]]:
    """Sort runs by arm and rewards, and by seed."""
    runs: dict[Key, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        unit = row["unit"]
        if unit["purpose"] == purpose:
            runs[unit["arm"], unit["rewards"]][unit["seed"]] = row
    return dict(runs)


@dataclass(frozen=True, slots=True)
class Contrast:
    """Tokens of B in units of those of A, within seeds."""

    ratio: float
    """Geometric mean over pairs in which both got there."""
    low: float
    """Lower end of its 95% interval, of a bootstrap over seeds."""
    high: float
    """Upper end of it."""
    logs: tuple[float, ...]
    """Log ratio of each of these pairs."""
    fewer: int
    """Pairs in which B needed fewer tokens, of all pairs."""
    more: int
    """Pairs in which it needed more."""

    @property
    def rank_p(self) -> float:
        """The sign test's p over all pairs, those of runs that never got there included."""
        return mcnemar(self.fewer, self.more)

    def p(self, ratio: float = 1.0) -> float:
        """Return the share of resampled means above a ratio, doubled: small where B needs fewer tokens than that."""
        if len(self.logs) < 2:
            return 1.0
        drawn = np.random.default_rng(1).integers(len(self.logs), size=(_RESAMPLES, len(self.logs)))
        above = float((np.asarray(self.logs)[drawn].mean(1) >= math.log(ratio)).mean())
        return min(1.0, 2 * max(above, 1 / _RESAMPLES))

    def words(self) -> str:
        """Return the comparison in words."""
        pairs = self.fewer + self.more
        if not self.logs:
            return f"no pair got there; fewer tokens in {self.fewer} of {pairs} pairs"
        return (
            f"{self.ratio:.2f} times the tokens, 95% {self.low:.2f} to {self.high:.2f} ({len(self.logs)} pairs); "
            f"fewer in {self.fewer} of {pairs}"
        )

    def bound(self) -> str:
        """Return what an interval that decides nothing excludes, in words."""
        return f"; no difference above {max(self.high, 1 / self.low):.2f} times"


def contrast(a: Mapping[int, Row], b: Mapping[int, Row], target: float) -> Contrast | None:
    """Compare two arms on the seeds that both have; None where there is none.

    Raises:
        ValueError: the runs of a seed began with different weights.
    """
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    if other := [seed for seed in seeds if a[seed]["warm"] != b[seed]["warm"]]:
        raise ValueError(f"the runs of seed {other[0]} began with different weights")
    pairs = [(reached(a[seed], target), reached(b[seed], target)) for seed in seeds]
    logs = [math.log(of_b.tokens / of_a.tokens) for of_a, of_b in pairs if not (of_a.censored or of_b.censored)]
    fewer, more = _ranks(pairs)
    low, high = bootstrap(logs) if logs else (-math.inf, math.inf)
    middle = math.fsum(logs) / len(logs) if logs else 0.0
    return Contrast(math.exp(middle), math.exp(low), math.exp(high), tuple(logs), fewer, more)


def _ranks(pairs: Sequence[tuple[Reached, Reached]]) -> tuple[int, int]:
    fewer = more = 0
    for a, b in pairs:
        # Of two that never got there, nobody knows; one that did was sooner.
        if a.censored and b.censored:
            continue
        sooner = (b.censored, b.tokens) < (a.censored, a.tokens)
        fewer, more = fewer + sooner, more + ((a.censored, a.tokens) < (b.censored, b.tokens))
    return fewer, more


def holm(values: Mapping[str, float]) -> dict[str, float]:
    """Correct p values for their number (Holm 1979)."""
    corrected: dict[str, float] = {}
    highest = 0.0
    for rank, (name, value) in enumerate(sorted(values.items(), key=lambda pair: pair[1])):
        highest = max(highest, min(1.0, (len(values) - rank) * value))
        corrected[name] = highest
    return corrected
