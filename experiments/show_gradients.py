"""Tables, figures and verdicts of part B: gradients at fixed weights."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

from plot import Axis, Chart
from verdict import NOT_RUN, Rows, Verdict
from weight_sets import (
    AIMS,
    FEW,
    LARGEST,
    OTHERS,
    WeightSet,
    about,
    by_size,
    episodes,
    factors,
    name_of,
    sets_by_aim,
    sets_of,
)

from agentrl.eval.pages import table

WANTED, SETS = 9, 12
"""In how many sets of how many a statement about the order has to hold."""
_CELLS = 48
_LEAST_BETA = 5e-6
_NEAR = 1.5
_HALF = 0.05
"""Half of a bin of π."""


def weights(rows: Rows) -> str:
    """Table 2a: the sets of weights."""
    sets = sets_of(rows)
    lines = [
        [each.name, *(f"{each.shares[key]:.3g}" for key in ("p", "beta_W", "beta_S")), *_predicted(each)]
        for each in sets
    ]
    head = ["weights", "p", "β by W", "β by ‖S‖²", "predicted: none", "none ±1", "group_mean"]
    return table(head, lines) if lines else NOT_RUN


def _predicted(weight_set: WeightSet) -> list[str]:
    predicted = factors(weight_set.shares["p"], weight_set.shares["beta_S"])
    return [f"{predicted[arm]:.3g}" for arm in ("none", "none ±1", "group_mean")]


def worths(rewards: str) -> Callable[[Rows], str]:
    """Table 2: episodes until signal and noise are equal, at N = 4, of all weights of an aim."""

    def made(rows: Rows) -> str:
        of_aims = sets_by_aim(sets_of(rows))
        if not of_aims:
            return NOT_RUN
        arms = list(next(iter(of_aims.values()))[0].rows[rewards, FEW]["arms"])
        lines = [[arm, *(episodes(some, arm, FEW, rewards) for some in of_aims.values())] for arm in arms]
        return table([f"rewards {rewards}, N = {FEW}", *(about(*column) for column in of_aims.items())], lines)

    return made


def few_successes(rows: Rows) -> str:
    """Table 2d: the same by N, of the weights of 20%."""
    some = sets_by_aim(sets_of(rows)).get("20")
    return by_size(some, "0/1", about("20", some), partial(episodes, some, rewards="0/1")) if some else NOT_RUN


def pool_weights(rows: Rows) -> str:
    """Table 2e: the pool's best weight, derived and measured, mean over the sets of an aim."""
    of_aims: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows["B"]:
        if row["unit"].get("pool"):
            of_aims[row["unit"]["weights"].partition("-")[0]].append(row)
    lines = list[list[str]]()
    for aim in (aim for aim in (*AIMS, *OTHERS) if aim in of_aims):
        some = of_aims[aim]
        within, between = (mean(row[key] for row in some) for key in ("within", "between"))
        best = f"{within / between:.2g}" if between > 0 else "∞"
        for size, by_kappa in some[0]["noise"].items():
            values = [mean(row["noise"][size][kappa] for row in some) for kappa in by_kappa]
            lines.append([name_of(aim), str(len(some)), best, size, *(f"{value:.3g}" for value in values)])
    if not lines:
        return NOT_RUN
    return table(
        ["weights", "sets", "derived κ", "N", *(f"κ = {kappa}".replace("inf", "∞") for kappa in by_kappa)], lines
    )


def cells(sets: Iterable[WeightSet], beta: str = "beta_S") -> Iterator[tuple[str, str, float, float]]:
    """List set, arm, predicted and measured noise at N = 32, each relative to the best of the four."""
    for weight_set in sets:
        if ("0/1", LARGEST) not in weight_set.rows:
            continue
        predicted = factors(weight_set.shares["p"], weight_set.shares[beta])
        plain, signed = (weight_set.rows[rewards, LARGEST]["arms"] for rewards in ("0/1", "-1/1"))
        measured = {arm: plain[arm]["noise"][0] for arm in ("none", "group_mean", "otb")}
        # Rewards of ±1 are twice as far apart.
        measured["none ±1"] = signed["none"]["noise"][0] / 4
        least, best = min(predicted.values()), min(measured.values())
        for arm, value in predicted.items():
            yield weight_set.name, arm, value / least, measured[arm] / best


def prediction(rows: Rows) -> str:
    """Figure 1: measured against predicted noise."""
    predictions = list(cells(sets_of(rows)))
    if not predictions:
        return ""
    top = 2 * max(max(predicted, measured) for _, _, predicted, measured in predictions)
    axes = [
        Axis(title=f"{what} noise over the best", low=0.5, high=top, log=True) for what in ("predicted", "measured")
    ]
    chart = Chart(f"Noise of a baseline at N = {LARGEST}: formula and measurement", *axes)
    chart.line([(0.5, 0.5), (top, top)], 6, "equal")
    for shift in (0.5, 2.0):
        chart.line([(max(0.5, 0.5 / shift), max(0.5, 0.5 * shift)), (min(top, top / shift), min(top, top * shift))], 15)
    for number, arm in enumerate(("none", "none ±1", "group_mean", "otb")):
        points = [(x, y, f"{name}: {x:.3g}, {y:.3g}") for name, other, x, y in predictions if other == arm]
        chart.dots(points, number, arm)
    return chart.svg()


def wins(rows: Rows) -> str:
    """Figure 2: which baseline wins where, by the formula, with the measured weights as points."""
    sets = sets_of(rows)
    if not sets:
        return ""
    y = Axis(title="β, share of energy", low=_LEAST_BETA, high=1, log=True)
    chart = Chart("Which baseline is within 1.5 times the least noise", Axis(title="success p", low=0, high=1), y)
    fills = {
        (True, True): ("#dcebf7", "none, mean, OTB"),
        (True, False): ("#cfe8dc", "none, OTB"),
        (False, True): ("#f6e3c5", "mean, OTB"),
        (False, False): ("#eed5e6", "OTB alone"),
    }
    sorted_by: dict[tuple[bool, bool], list[tuple[float, float, float, float]]] = {key: [] for key in fills}
    step, edges = 1 / _CELLS, [_LEAST_BETA ** (1 - line / _CELLS) for line in range(_CELLS + 1)]
    middles = [math.sqrt(low * top) for low, top in itertools.pairwise(edges)]
    for column in range(_CELLS):
        near = [factors((column + 0.5) * step, beta) for beta in middles]
        keys = [(factors_of["none"] <= _NEAR, factors_of["group_mean"] <= _NEAR) for factors_of in near]
        # Cells of one kind that lie on each other are one rectangle, without a seam.
        low = 0
        for key, same in itertools.groupby(keys):
            top = low + len(list(same))
            sorted_by[key].append((column * step, edges[low], (column + 1) * step, edges[top]))
            low = top
    for key, (fill, name) in fills.items():
        chart.cells(sorted_by[key], fill, name)
    points = [
        (weight_set.shares["p"], weight_set.shares["beta_S"], f"{weight_set.name}: β {weight_set.shares['beta_S']:.3g}")
        for weight_set in sets
    ]
    chart.dots(points, 6, "measured weights")
    return chart.svg()


def norms(rows: Rows) -> str:
    """Figure 9: the norm of a token's gradient by its probability, and the root of its energy that stands for it."""
    of_aims = {
        aim: lines
        for aim, some in sets_by_aim(sets_of(rows)).items()
        if (lines := [of for weight_set in some if (of := next(iter(weight_set.rows.values())).get("by_probability"))])
    }
    if not of_aims:
        return ""
    drawn = {aim: (_relative(lines, 2), _relative(lines, 3)) for aim, lines in of_aims.items()}
    high = max(value for pair in drawn.values() for points in pair for _, value in points)
    axes = (
        Axis(title="π of the token", low=0, high=1),
        Axis(title="relative to the mean of all tokens", low=0, high=high),
    )
    chart = Chart("Norm of a token's gradient", *axes)
    for number, (aim, (norm, root)) in enumerate(drawn.items()):
        chart.line(norm, number, name_of(aim))
        chart.dots([(pi, value, f"root of the energy: {value:.2f}") for pi, value in root], number)
    chart.dots([], 6, "root of the energy")
    return chart.svg()


def _relative(lines: Sequence[Sequence[Sequence[float]]], column: int) -> list[tuple[float, float]]:
    """Average a column of several sets by the middle of each bin of π, relative to its mean over a set's tokens."""
    values: dict[float, list[float]] = defaultdict(list)
    for of in lines:
        level = sum(bin_[1] * bin_[column] for bin_ in of) / sum(bin_[1] for bin_ in of)
        for bin_ in of:
            values[bin_[0] + _HALF].append(bin_[column] / level)
    return [(pi, mean(some)) for pi, some in sorted(values.items())]


def verdicts(rows: Rows) -> list[Verdict]:
    """Judge B1 to B5, and describe B6."""
    sets = [weight_set for weight_set in sets_of(rows) if weight_set.aim not in OTHERS]
    return [
        *_formula(sets),
        _ordered(sets),
        _count("B3", "`otb` at N = 4 is worth `group_mean` at N = 32 per episode", sets, _four_is_many),
        _count(
            "B4", "β by W and by ‖S‖² choose the same of `none`, `none` ±1 and the mean", sets, _same_choice, wanted=10
        ),
        *_weak_place(sets_of(rows)),
        _kappas(rows),
    ]


def _formula(sets: Sequence[WeightSet]) -> list[Verdict]:
    """Judge B1 with the measured β, and describe it with the one that each step's metrics have."""
    claim = (
        "the formula predicts the noise of `none`, `none` ±1, the mean and OTB within a factor of 2 in 80% of the cells"
    )
    right, every = {}, 0
    for beta in ("beta_S", "beta_W"):
        near = [0.5 <= measured / predicted <= 2 for *_, predicted, measured in cells(sets, beta)]
        right[beta], every = sum(near), len(near)
    words = {beta: f"{count} of {every} cells" for beta, count in right.items()}
    by_energy = words["beta_W"] if sets else ""
    return [
        Verdict("B1", claim, *_so_far(sets, right["beta_S"] >= 0.8 * every, words["beta_S"])),
        Verdict("B1", "the same with β by W, the energy of the metrics", figures=by_energy, described=True),
    ]


def _weak_place(sets: Sequence[WeightSet]) -> list[Verdict]:
    """Judge B5: whether a task's own group knows better than the pool, and a pool of few pseudo-rows does too."""
    own, few = (
        "where tasks differ and failures are quiet, the own group (`otb` carry) needs fewer episodes than the pool",
        "there the pool of 1 and of 4 beside the own group need fewer than the pool alone",
    )
    some = [weight_set for weight_set in sets if weight_set.aim in ("mixed", "quiet")]
    if len(some) < 2:
        return [Verdict("B5", own), Verdict("B5", few, described=True)]
    times = {
        arm: [math.exp(each.excess(arm, FEW)) for each in some] for arm in ("otb carry", "otb pool 1", "otb pool 4")
    }
    words = {
        arm: ", ".join(f"{OTHERS[each.aim]} {value:.2f}" for each, value in zip(some, of, strict=True))
        for arm, of in times.items()
    }
    return [
        Verdict("B5", own, min(times["otb carry"]) < 1, f"times the episodes: {words['otb carry']}"),
        Verdict(
            "B5",
            few,
            figures=f"pool 1: {words['otb pool 1']}; pool 4: {words['otb pool 4']}",
            described=True,
        ),
    ]


def _kappas(rows: Rows) -> Verdict:
    """Describe B6: the derived weight of the pool, from set to set."""
    of = sorted(
        row["within"] / row["between"] if row["between"] > 0 else math.inf
        for row in rows["B"]
        if row["unit"].get("pool") and row["unit"]["weights"].partition("-")[0] in AIMS
    )
    claim = "the best weight κ of the pool, derived, where tasks are of one level"
    finite = [f"{value:.0f}" for value in of if value < math.inf]
    words = f"{finite[0]} to {finite[-1]} in {len(finite)} of {len(of)} sets, ∞ in the others" if finite else ""
    return Verdict("B6", claim, figures=words, described=True)


def _ordered(sets: Sequence[WeightSet]) -> Verdict:
    """Judge B2, which asks for each of its two inequalities in so many sets."""
    claim = "per episode at N = 4 `otb_pooled` is worth at least `otb` with `carry`, and this at least `otb` (`zero`)"
    worths_of = [[each.worth(arm, FEW) for arm in ("otb_pooled", "otb carry", "otb")] for each in sets]
    above = [(pooled >= carry, carry >= zero) for pooled, carry, zero in worths_of]
    upper, lower = (sum(pair[side] for pair in above) for side in (0, 1))
    words = f"in {upper} and {lower} of {len(sets)} sets, both in {sum(map(all, above))}"
    return Verdict("B2", claim, *_so_far(sets, min(upper, lower) >= WANTED, words))


def _four_is_many(weight_set: WeightSet) -> bool:
    return weight_set.worth("otb", FEW) >= weight_set.worth("group_mean", LARGEST)


def _same_choice(weight_set: WeightSet) -> bool:
    best = [
        min(("none", "none ±1", "group_mean"), key=factors(weight_set.shares["p"], weight_set.shares[key]).__getitem__)
        for key in ("beta_W", "beta_S")
    ]
    return best[0] == best[1]


def _count(
    name: str, claim: str, sets: Sequence[WeightSet], holds: Callable[[WeightSet], bool], wanted: int = WANTED
) -> Verdict:
    right = sum(map(holds, sets))
    return Verdict(name, claim, *_so_far(sets, right >= wanted, f"in {right} of {len(sets)} sets"))


def _so_far(sets: Sequence[WeightSet], holds: bool, words: str) -> tuple[bool | None, str]:
    if not sets:
        return None, ""
    return (holds, words) if len(sets) == SETS else (None, f"{words}; {SETS - len(sets)} sets are to come")
