"""Tables, figures and verdicts of parts C and D: rates, and learning."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import correlation, geometric_mean, mean, stdev

from arms import LEARNING, POOLED, VARIANTS
from contrast import Contrast, Key, Row, by_arm, contrast, holm, levels, reached
from plot import Axis, Chart
from schedule import area, best_rate, by_rate, success
from verdict import NOT_RUN, Rows, Verdict
from weight_sets import TINY, sets_of

from agentrl.eval.pages import table
from agentrl.eval.paired import bootstrap

TARGETS = (0.3, 0.5, 0.7, 0.9)
PRIMARY = 0.5
_TUNING = 0.3
"""The success that two tuning seeds of an arm reach within their few steps."""
_FEWEST = 5
"""Pairs in which both runs got there, below which their interval decides nothing."""
_OTB, _CARRY, _POOLED, _NONE = ("otb", "0/1"), ("otb carry", "0/1"), ("otb_pooled", "0/1"), ("none", "0/1")
_MEAN, _GRPO_32, _SIGNED = ("group_mean", "0/1"), ("grpo at 32", "0/1"), ("none", "-1/1")


def name(key: Key) -> str:
    """Name an arm."""
    return key[0] if key[1] == "0/1" else f"{key[0]} ±1"


def rates(part: str, rows: Rows) -> str:
    """Table 3a: success by rate and arm, the rate that was chosen, and the largest stable one."""
    tried = _tried(part, rows)
    if not tried:
        return NOT_RUN
    every = sorted({rate for of in tried.values() for rate in of})
    lines = []
    for key, of in tried.items():
        shares = [f"{100 * mean(map(success, of[rate])):.0f}%" if rate in of else "" for rate in every]
        lines.append([name(key), *shares, f"{best_rate(of):g}", f"{stable(of):g}"])
    return table(["success", *(f"{rate:g}" for rate in every), "chosen", "largest stable"], lines)


def _tried(part: str, rows: Rows) -> dict[Key, dict[float, list[Row]]]:
    """Sort the tuning runs of a part by arm, and by rate."""
    return {key: by_rate(rows[part], *key) for key in by_arm(rows[part], "rates")}


def stable(tried: Mapping[float, Sequence[Row]]) -> float:
    """Find the highest rate at which no seed falls below half of its best success; 0 where there is none."""
    return max((rate for rate, rows in tried.items() if not any(map(_collapsed, rows))), default=0.0)


def _collapsed(row: Row) -> bool:
    shares = [share for _, share in levels(row)]
    halved = any(share < best / 2 for share, best in zip(shares, accumulate(shares, max), strict=True))
    return halved or "failed" in row


def success_by_rate(rows: Rows) -> str:
    """Figure 5: success by rate, a line an arm."""
    tried = _tried("C", rows)
    if not tried:
        return ""
    every = sorted({rate for of in tried.values() for rate in of})
    x = Axis(title="learning rate", low=every[0], high=every[-1] * 1.01, log=True)
    chart = Chart("Success over steps 8 to 15", x, Axis(title="mean success", low=0, high=1))
    for number, (key, of) in enumerate(tried.items()):
        points = [(rate, mean(map(success, some))) for rate, some in of.items()]
        chart.line(points, number, name(key))
        chart.dots([(x, y, f"{name(key)} at {x:g}: {y:.3f}") for x, y in points], number)
    return chart.svg()


def tokens(part: str, rows: Rows) -> str:
    """Table 3: tokens until each success, and held-out success after the last step."""
    arms = by_arm(rows[part], "results")
    if not arms:
        return NOT_RUN
    lines = []
    for key, runs in arms.items():
        cells = []
        for target in TARGETS:
            middle, never = tokens_to(runs, target)
            cells.append(f"{'> ' * bool(never)}{middle:.1f}k" + (f" ({never} never)" if never else ""))
        held = [row["held_out"][-1][2] for row in runs.values() if row["held_out"]]
        bound = max((norm for row in runs.values() for norm in row["grad_norm"]), default=0.0)
        rate = next(iter(runs.values()))["unit"]["lr"]
        last = f"{100 * mean(held):.1f}%" if held else ""
        lines.append([name(key), f"{rate:g}", len(runs), *cells, last, f"{bound:.3g}"])
    head = ["arm", "rate", "seeds", *(f"tokens to {100 * target:.0f}%" for target in TARGETS)]
    return table([*head, "held out at the end", "largest norm"], lines)


def tokens_to(runs: Mapping[int, Row], target: float) -> tuple[float, int]:
    """Average the tokens until a success, in thousands and geometrically, and count the runs that never got there."""
    needed = [reached(row, target) for row in runs.values()]
    return geometric_mean(run.tokens for run in needed) / 1000, sum(run.censored for run in needed)


def _drawn(rows: Rows) -> dict[Key, Mapping[int, Row]]:
    """The arms of figures 3 and 4: all thirteen would hide each other."""
    arms = by_arm(rows["D"], "results")
    return {key: arms[key] for key in (_POOLED, _OTB, _NONE, _MEAN, _GRPO_32, _SIGNED) if key in arms}


def curves(rows: Rows) -> str:
    """Figure 3: success over tokens, the mean over seeds with its interval, of six arms."""
    arms = _drawn(rows)
    if not arms:
        return ""
    most = max(sum(row["tokens"]) for runs in arms.values() for row in runs.values())
    x = Axis(title="sampled tokens (thousands)", low=0, high=most / 1000)
    chart = Chart("Training success, mean of three steps", x, Axis(title="success", low=0, high=1))
    for number, (key, runs) in enumerate(arms.items()):
        lines, bands = [], []
        for of_step in zip(*(levels(row) for row in runs.values()), strict=False):
            at = mean(tokens for tokens, _ in of_step) / 1000
            shares = [share for _, share in of_step]
            lines.append((at, mean(shares)))
            bands.append((at, *bootstrap(shares)))
        chart.band(bands, number)
        chart.line(lines, number, name(key))
    return chart.svg()


def norms(rows: Rows) -> str:
    """Figure 4: norms of gradients by step, the geometric mean over seeds, of six arms."""
    arms = _drawn(rows)
    if not arms:
        return ""
    norms_by_arm: dict[Key, list[float]] = {}
    for key, runs in arms.items():
        norms_of = [row["grad_norm"] for row in runs.values()]
        norms_by_arm[key] = [geometric_mean(max(norm, 1e-6) for norm in step) for step in zip(*norms_of, strict=False)]
    every = [value for of in norms_by_arm.values() for value in of]
    steps = Axis(title="step", low=1, high=max(map(len, norms_by_arm.values())))
    height = Axis(title="norm of the gradient", low=min(every) / 1.2, high=max(every) * 1.2, log=True)
    chart = Chart("Norm of the gradient", steps, height)
    for number, (key, of) in enumerate(norms_by_arm.items()):
        chart.line(list(enumerate(of, start=1)), number, name(key))
    return chart.svg()


def contrasts(rows: Rows) -> str:
    """Table 3b: the five primary contrasts, with Holm's correction."""
    asked = _asked(rows)
    if not asked:
        return NOT_RUN
    values = {label: effect.p(_QUESTIONS[label][2]) for label, effect in asked.items() if label != "D4"}
    if "D4" in asked:
        values["D4"] = _equivalence_p(asked["D4"])
    corrected = holm(values)
    lines = [
        [label, _CLAIMS[label], effect.words(), *(f"{p:.3g}" for p in (effect.rank_p, values[label], corrected[label]))]
        for label, effect in asked.items()
    ]
    return table(["", "statement", "found", "sign test p", "bootstrap p", "after Holm"], lines)


def areas(rows: Rows) -> str:
    """Table 3d: success over all steps, which no run leaves out, against `otb` within seeds."""
    arms = by_arm(rows["D"], "results")
    base = arms.get(_OTB, {})
    lines = []
    for key, runs in arms.items():
        apart = _areas_apart(base, runs)
        if apart:
            cells = _points(apart) if key != _OTB else ["", "", ""]
            level = f"{100 * mean(map(area, runs.values())):.1f}%"
            lines.append([name(key), len(apart), level, *cells, sum(value > 0 for value in apart)])
    head = ["arm", "seeds", "mean success", "against `otb`, points", "95%: low", "high", "seeds above `otb`"]
    return table(head, lines) if lines else NOT_RUN


def _areas_apart(base: Mapping[int, Row], runs: Mapping[int, Row]) -> list[float]:
    """Subtract the success over all steps of one arm from that of another, within each seed that both have."""
    return [area(runs[seed]) - area(base[seed]) for seed in sorted(runs.keys() & base.keys())]


def _points(apart: Sequence[float]) -> list[str]:
    """Write the mean of differences and both ends of its interval, in points."""
    return [f"{100 * value:+.1f}" for value in (mean(apart), *bootstrap(apart))]


_QUESTIONS: Mapping[str, tuple[Key, Key, float]] = {
    "D1": (_OTB, _POOLED, 1.0),
    "D2": (_OTB, _CARRY, 1.0),
    "D3": (_GRPO_32, _OTB, 0.35),
    "D4": (_POOLED, _NONE, 1.25),
    # Its ratio is the inverse: pooled over none.
    "D5": (_SIGNED, _POOLED, 1 / 1.5),
}
"""Arms A and B of each primary contrast, and the ratio of B's tokens to A's that is asked about."""
_CLAIMS = {
    "D1": "pooled needs fewer tokens to 50% than `otb`",
    "D2": "`otb` carry needs fewer than `otb`",
    "D3": "`otb` at N = 4 needs at most 35% of the tokens of `grpo` at N = 32",
    "D4": "`none` equals pooled with rewards 0/1, within [.8, 1.25]",
    "D5": "with ±1 `none` needs at least 1.5 times the tokens of pooled",
}


def _asked(rows: Rows) -> dict[str, Contrast]:
    arms = by_arm(rows["D"], "results")
    effects = {label: contrast(arms.get(a, {}), arms.get(b, {}), PRIMARY) for label, (a, b, _) in _QUESTIONS.items()}
    return {label: effect for label, effect in effects.items() if effect is not None}


def _equivalence_p(effect: Contrast) -> float:
    inverse = Contrast(
        1 / effect.ratio, 1 / effect.high, 1 / effect.low, tuple(-log for log in effect.logs), effect.more, effect.fewer
    )
    return max(effect.p(1.25), inverse.p(1.25))


def verdicts(rows: Rows) -> list[Verdict]:
    """Judge C1 and D0 to D8."""
    asked = _asked(rows)
    results = [_c1(rows), _d0(rows)]
    for label, claim in _CLAIMS.items():
        effect, limit = asked.get(label), _QUESTIONS[label][2]
        if effect is None:
            results.append(Verdict(label, claim))
            continue
        holds = decided(effect, limit)
        if label == "D4" and len(effect.logs) >= _FEWEST:
            inside, outside = effect.low >= 0.8 and effect.high <= 1.25, effect.low > 1.25 or effect.high < 0.8
            holds = True if inside else False if outside else None
        results.append(
            Verdict(
                label,
                claim,
                holds,
                effect.words() + (effect.bound() if holds is None and len(effect.logs) >= _FEWEST else ""),
            )
        )
    return [*results, _d6(rows), *_variants(rows)]


def _d6(rows: Rows) -> Verdict:
    """Compare the order of the nine arms by tokens to the primary level with that by gradients at weights of 20%."""
    claim = "the order of the nine arms is that of their gradients at 20% success"
    sets, arms = [each for each in sets_of(rows) if each.aim == "20"], by_arm(rows["D"], "results")
    keys = [(arm.name, arm.rewards) for arm in LEARNING]
    if not sets or not all(key in arms for key in keys):
        return Verdict("D6", claim, described=True)
    needed = [tokens_to(arms[key], PRIMARY)[0] for key in keys]
    # The gradients' name of an arm says nothing of N.
    named = [(arm.name.removesuffix(" at 32"), arm.group_size, arm.rewards) for arm in LEARNING]
    worth = [mean(math.log(max(each.worth(*which), TINY)) for each in sets) for which in named]
    ranks = [[sorted(values).index(value) for value in values] for values in (needed, [-value for value in worth])]
    return Verdict("D6", claim, figures=f"Spearman's coefficient {correlation(*ranks):.2f}", described=True)


def _variants(rows: Rows) -> list[Verdict]:
    """Describe D7 and D8, which compare the pool by position with two others."""
    arms, results = by_arm(rows["D"], "results"), list[Verdict]()
    base = arms.get((POOLED.name, POOLED.rewards), {})
    for label, arm in zip(("D7", "D8"), VARIANTS, strict=True):
        other, words = arms.get((arm.name, arm.rewards), {}), ""
        if (effect := contrast(base, other, PRIMARY)) is not None:
            points, low, high = _points(_areas_apart(base, other))
            words = f"{effect.words()}; success over all steps {points} points ({low} to {high})"
        claim = f"`{arm.name}` needs fewer tokens to 50% than `otb_pooled`"
        results.append(Verdict(label, claim, figures=words, described=True))
    return results


def decided(effect: Contrast, limit: float) -> bool | None:
    """Decide on which side of a ratio the interval lies; None where it is on both, or has too few pairs."""
    if len(effect.logs) < _FEWEST:
        return None
    return True if effect.high < limit else False if effect.low >= limit else None


def _c1(rows: Rows) -> Verdict:
    claim = "the largest stable rate of `otb` is at least three times that of `grpo`"
    tried = {arm: by_rate(rows["C"], arm, "0/1") for arm in ("otb", "grpo")}
    if not all(tried.values()):
        return Verdict("C1", claim)
    otb, grpo = (stable(tried[arm]) for arm in ("otb", "grpo"))
    holds = True if otb >= 2.9 * grpo else False if otb <= grpo else None
    return Verdict("C1", claim, holds, f"{otb:g} and {grpo:g}")


def _d0(rows: Rows) -> Verdict:
    claim = "arms that see differences of rewards alone learn the same with ±1, within one episode in a hundred"
    arms, apart = by_arm(rows["D"], "results"), defaultdict(list)
    for (arm, rewards), runs in arms.items():
        if rewards == "-1/1" and arm not in ("otb", "none"):
            for seed, row in runs.items():
                if seed in arms.get((arm, "0/1"), {}):
                    other = arms[arm, "0/1"][seed]
                    off = zip(row["successes"], other["successes"], row["episodes"], strict=True)
                    apart[arm].append(max(abs(a - b) / played for a, b, played in off))
    if not apart:
        return Verdict("D0", claim)
    worst = {arm: max(of) for arm, of in apart.items()}
    words = ", ".join(f"{arm} {100 * value:.1f} points" for arm, value in worst.items())
    return Verdict("D0", claim, max(worst.values()) <= 0.01, f"largest difference of a step: {words}")


def spread(rows: Rows) -> str:
    """Table 3c: the spread of paired differences of log tokens to 30%, in C, which the power of D depends on."""
    chosen = {key: {row["unit"]["seed"]: row for row in of[best_rate(of)]} for key, of in _tried("C", rows).items()}
    base = chosen.get(_OTB, {})
    effects = {key: contrast(base, runs, _TUNING) for key, runs in chosen.items() if key != _OTB}
    lines = [
        [name(key), effect.words(), f"{stdev(effect.logs):.2f}" if len(effect.logs) > 1 else ""]
        for key, effect in effects.items()
        if effect is not None
    ]
    return table(["arm against `otb`, two seeds", "tokens to 30%", "spread s"], lines) if lines else NOT_RUN
