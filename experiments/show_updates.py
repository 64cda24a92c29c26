"""Tables, figures and verdicts of parts E and F: losses under many updates of a batch, and stale weights."""

import math
from collections.abc import Mapping
from statistics import mean

from arms import LOSSES
from contrast import Contrast, Row, by_arm, contrast, reached
from plot import Axis, Chart
from schedule import area
from show_learning import PRIMARY, decided, name, tokens_to
from verdict import NOT_RUN, Rows, Verdict

from agentrl.eval.pages import table
from agentrl.eval.paired import bootstrap

PASSES = {1: "1 pass", 4: "4 passes"}
STALENESS = (0, 2, 8)
_CORNERS = {
    "neither": "grpo, ppo_clip",
    "otb_pooled": "otb_pooled, ppo_clip",
    "ctpo": "grpo, ctpo",
    "both": "otb_pooled, ctpo",
}


def _against(rows: Rows, passes: int, loss: str, other: str) -> Contrast | None:
    arms = by_arm(rows["E"], "results")
    a, b = (arms.get((f"{name}, {PASSES[passes]}", "0/1"), {}) for name in (other, loss))
    return contrast(a, b, PRIMARY)


def by_loss(rows: Rows) -> str:
    """Table 4a: each loss against REINFORCE with weights, by passes."""
    losses = [loss for loss in LOSSES if loss != "reinforce"]
    lines = []
    for passes, words in PASSES.items():
        for loss in losses:
            if (compared := _against(rows, passes, loss, "reinforce")) is not None:
                lines.append([f"{loss}, {words}", compared.words()])
    return table(["against `reinforce` with as many passes", "tokens to 50%"], lines) if lines else NOT_RUN


def tokens_by_loss(rows: Rows) -> str:
    """Figure 6: tokens to 50% by loss and passes, each seed a point."""
    arms = by_arm(rows["E"], "results")
    if not arms:
        return ""
    most = max(sum(row["tokens"]) for runs in arms.values() for row in runs.values()) / 1000
    y = Axis(title="sampled tokens to 50% (thousands)", low=0, high=most * 1.05)
    chart = Chart(
        "Tokens to 50% by loss",
        Axis(title="losses as in the legend: 1 pass, and beside it 4", low=0, high=len(LOSSES)),
        y,
    )
    for number, loss in enumerate(LOSSES):
        for side, passes in zip((0.3, 0.7), PASSES.values(), strict=True):
            runs = arms.get((f"{loss}, {passes}", "0/1"), {})
            run_by_seed = {seed: reached(row, PRIMARY) for seed, row in runs.items()}
            points = [
                (number + side, run.tokens / 1000, f"{loss}, {passes}, seed {seed}{', never' * run.censored}")
                for seed, run in run_by_seed.items()
            ]
            chart.dots(points, number, loss if passes == PASSES[1] else "")
    return chart.svg()


def both(rows: Rows) -> str:
    """Table 6: tokens to 50% with either, both and neither of pooled OTB and CTPO, by staleness."""
    arms = by_arm(rows["F"], "results")
    if not arms:
        return NOT_RUN
    lines = []
    for staleness in STALENESS:
        cells = [f"{staleness}"]
        for corner in _CORNERS.values():
            runs = arms.get((f"{corner}, staleness {staleness}", "0/1"), {})
            cells.append(_corner(runs) if runs else "")
        lines.append([*cells, _sum_of_gains(rows, staleness)])
    return table(["staleness", *_CORNERS, "log gain of both less the sum of each"], lines)


def _corner(runs: Mapping[int, Row]) -> str:
    needed, never = tokens_to(runs, PRIMARY)
    return f"{needed:.1f}k ({never} of {len(runs)} never), {mean(map(area, runs.values())):.0%}"


def _sum_of_gains(rows: Rows, staleness: int) -> str:
    arms = by_arm(rows["F"], "results")
    runs = {which: arms.get((f"{corner}, staleness {staleness}", "0/1"), {}) for which, corner in _CORNERS.items()}
    seeds = set.intersection(*(set(of) for of in runs.values()))
    apart = []
    for seed in sorted(seeds):
        logs = {which: math.log(reached(of[seed], PRIMARY).tokens) for which, of in runs.items()}
        apart.append(logs["both"] - logs["otb_pooled"] - logs["ctpo"] + logs["neither"])
    if not apart:
        return ""
    low, high = bootstrap(apart)
    return f"{math.fsum(apart) / len(apart):.2f}, 95% {low:.2f} to {high:.2f}"


def verdicts(rows: Rows) -> list[Verdict]:
    """Judge E1 and E2, and describe E3, F1 and F2."""
    results = list[Verdict]()
    for label, other in (("E1", "ppo_clip"), ("E1", "gspo"), ("E2", "ctpo power 0")):
        claim = f"with 4 passes `ctpo` needs fewer tokens to 50% than `{name((other, '0/1'))}`"
        effect = _against(rows, 4, "ctpo", other)
        results.append(
            Verdict(label, claim) if effect is None else Verdict(label, claim, decided(effect, 1.0), effect.words())
        )
    return [*results, _e3(rows), *_additive(rows)]


def _e3(rows: Rows) -> Verdict:
    """Describe the losses with one pass that differ from REINFORCE by more than a quarter."""
    effects = {loss: _against(rows, 1, loss, "reinforce") for loss in LOSSES if loss != "reinforce"}
    ratios = {loss: effect.ratio for loss, effect in effects.items() if effect is not None}
    apart = [f"`{loss}` {ratio:.2f} times" for loss, ratio in ratios.items() if not 0.8 <= ratio <= 1.25]
    words = f"{', '.join(apart) or 'none'}; {len(ratios)} losses" if ratios else ""
    return Verdict(
        "E3", "losses that differ from `reinforce` by more than a quarter with 1 pass", figures=words, described=True
    )


def _additive(rows: Rows) -> list[Verdict]:
    """Describe F1, whether gains add up, and F2, what staleness costs with either loss."""
    arms = by_arm(rows["F"], "results")
    sums = [f"{_sum_of_gains(rows, staleness)} at {staleness}" for staleness in STALENESS] if arms else []
    costs = list[str]()
    for advantage in ("grpo", "otb_pooled") if arms else ():
        for loss in ("ppo_clip", "ctpo"):
            fresh, stale = (arms[f"{advantage}, {loss}, staleness {staleness}", "0/1"] for staleness in (0, 8))
            left = mean(area(stale[seed]) / area(fresh[seed]) for seed in stale.keys() & fresh.keys())
            costs.append(f"{advantage}, {loss} {left:.2f}")
    return [
        Verdict(
            "F1", "gains add up: log gain of both less the sum, by staleness", figures="; ".join(sums), described=True
        ),
        Verdict(
            "F2", "share of the success that is left at a staleness of 8", figures="; ".join(costs), described=True
        ),
    ]
