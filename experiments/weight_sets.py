"""Sets of weights of part B: their rows, and what estimators are worth there.

Legend: K tasks of a set. A row holds, for each estimator, inner products of a step's gradient, the sum over K tasks,
and the same without each task in turn [1 + K].
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, pvariance, stdev
from typing import Any

from verdict import Rows

from agentrl.eval.pages import table
from agentrl.runs.report.text import brief

LARGEST, FEW = 32, 4
"""N where the formula is asked, and N of OTB's claim."""
TRUTH = "otb_pooled"
"""Its gradient is unbiased; at the largest N it is the truth that others are measured by."""
AIMS = ("5", "20", "50", "80")
OTHERS = {"mixed": "levels 1 to 5", "quiet": "quiet failures", "long": "long episodes", "pretrained": "SmolLM2"}
"""Sets that the statements do not count, and what the tables call them."""
FEWER_ROWS = ("quiet", "long", "pretrained")
"""Sets with N up to 8."""
TINY = 1e-12
_LARGEST_ERROR = math.log(10)
"""Of a logarithm, that is still written as a percentage."""


@dataclass(frozen=True, slots=True)
class WeightSet:
    """The rows of a set of weights."""

    name: str
    """As in the rows: the aim and the seed."""
    rows: Mapping[tuple[str, int], Mapping[str, Any]]
    """By rewards and N."""

    @property
    def aim(self) -> str:
        """The success in percent that the weights were to have, or one of ``OTHERS``."""
        return self.name.partition("-")[0]

    @property
    def shares(self) -> Mapping[str, float]:
        """Success p, and β by both measures."""
        return next(iter(self.rows.values()))

    def worth(self, arm: str, size: int, rewards: str = "0/1", without: int = 0) -> float:
        """Compute kept² / (noise · episodes) of an arm, with ‖g‖² as the unit; without a task where one is named.

        The inverse is the number of episodes at which the signal that an arm keeps is as large as its noise.
        """
        arm_row = self.rows[rewards, size]["arms"][arm]
        truth = self._truth(rewards, without)
        along, noise = arm_row["along"][without], arm_row["noise"][without]
        tasks = len(arm_row["noise"]) - 1 - bool(without)
        # A mean of one episode leaves no gradient; without the only task that succeeds there is no truth either.
        return max(along, 0.0) ** 2 / (truth * noise * size * tasks) if truth * noise > 0 else 0.0

    def measures(self, arm: str, size: int, rewards: str) -> tuple[float, float, float]:
        """Compute the cosine to the true gradient g, the share of g that is kept, and the noise over ‖g‖²."""
        of = self.rows[rewards, size]["arms"][arm]
        truth = self._truth(rewards, 0)
        signal, noise, along = (of[key][0] for key in ("signal", "noise", "along"))
        return along / math.sqrt(truth * max(signal + noise, TINY)), along / truth, noise / truth

    def _truth(self, rewards: str, without: int) -> float:
        """The squared norm of the true gradient g."""
        largest = max(size for _, size in self.rows)
        return float(self.rows[rewards, largest]["arms"][TRUTH]["along"][without])

    def excess(self, arm: str, size: int, rewards: str = "0/1", without: int = 0) -> float:
        """Compute the logarithm of the episodes of an arm over those of ``otb_pooled``, on the same draws."""
        pooled, mine = (self.worth(name, size, rewards, without) for name in (TRUTH, arm))
        return math.log(max(pooled, TINY) / max(mine, TINY))

    def error(self, arm: str, size: int, rewards: str = "0/1") -> float:
        """Compute the standard error of ``excess``, by a jackknife over tasks."""
        count = len(self.rows[rewards, size]["arms"][arm]["noise"]) - 1
        left = [self.excess(arm, size, rewards, task) for task in range(1, count + 1)]
        return math.sqrt((count - 1) * pvariance(left))


def sets_of(rows: Rows) -> list[WeightSet]:
    """Gather the sets that have all their rows, the tiny model's on one level before others."""
    rows_of: dict[str, dict[tuple[str, int], Mapping[str, Any]]] = defaultdict(dict)
    for row in rows["B"]:
        if row["unit"].get("pool"):
            continue
        rows_of[row["unit"]["weights"]][row["unit"]["rewards"], row["unit"]["group_size"]] = row
    sets = [WeightSet(name, of) for name, of in rows_of.items()]
    whole = [each for each in sets if len(each.rows) == (8 if each.aim in FEWER_ROWS else 12)]
    return sorted(whole, key=lambda weight_set: ([*AIMS, *OTHERS].index(weight_set.aim), weight_set.name))


def factors(p: float, beta: float) -> dict[str, float]:
    """Compute how many times noisier than the best constant baseline β each is, by the plan's formula."""
    baselines = {"none": 0.0, "none ±1": 0.5, "group_mean": p, "otb": beta}
    return {name: 1 + (baseline - beta) ** 2 / (beta * (1 - beta)) for name, baseline in baselines.items()}


def sets_by_aim(sets: Sequence[WeightSet]) -> dict[str, list[WeightSet]]:
    """Sort sets by what their weights aim at."""
    sorted_by: dict[str, list[WeightSet]] = defaultdict(list)
    for weight_set in sets:
        sorted_by[weight_set.aim].append(weight_set)
    return dict(sorted_by)


def about(aim: str, some: Sequence[WeightSet]) -> str:
    """Name the sets of an aim, with their mean success."""
    p = mean(weight_set.shares["p"] for weight_set in some)
    return f"{name_of(aim)}: p {p:.2f}, {len(some)} set{'s' * (len(some) > 1)}"


def name_of(aim: str) -> str:
    """Name an aim in tables."""
    return OTHERS.get(aim, f"about {aim}%")


def episodes(some: Sequence[WeightSet], arm: str, size: int, rewards: str) -> str:
    """Write the episodes that an arm needs, and in brackets their ratio to ``TRUTH`` with its standard errors.

    The first error is over tasks, the second over sets where there are several, both in percent. Nothing is written
    where nothing of the true gradient is left.
    """
    if not all(each.worth(arm, size, rewards) for each in some):
        return ""
    needed = brief(math.exp(mean(-math.log(each.worth(arm, size, rewards)) for each in some)))
    if arm == TRUTH:
        return needed
    excess = [each.excess(arm, size, rewards) for each in some]
    # The mean of several sets varies less with their tasks than each of them.
    errors = [math.sqrt(mean(each.error(arm, size, rewards) ** 2 for each in some) / len(some))]
    if len(some) > 1:
        errors.append(stdev(excess) / math.sqrt(len(some)))
    words = ", ".join(f"{100 * math.expm1(error):.0f}" if error < _LARGEST_ERROR else "> 999" for error in errors)
    return f"{needed} ({brief(math.exp(mean(excess)))} ± {words})"


def by_size(some: Sequence[WeightSet], rewards: str, head: str, cell: Callable[[str, int], str]) -> str:
    """Tabulate a text for each arm and N."""
    sizes = sorted({size for of, size in some[0].rows if of == rewards})
    lines = [[arm, *(cell(arm, size) for size in sizes)] for arm in some[0].rows[rewards, sizes[0]]["arms"]]
    return table([head, *(f"N = {size}" for size in sizes)], lines)
