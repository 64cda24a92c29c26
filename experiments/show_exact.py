"""Tables and verdicts of part A: bias and variance by enumeration."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from verdict import NOT_RUN, Rows, Verdict

from agentrl.eval.pages import table

SIZE = 4
"""N of table 1."""
EXACT, NEARLY = 1e-12, 1e-10
RATIOS = ("none", "token", "gspo", "prefix", "full")


def _asked(rows: Rows, question: str) -> list[dict[str, Any]]:
    return [row for row in rows["A"] if row["unit"]["question"] == question]


def estimators(rows: Rows) -> str:
    """Table 1: bias and variance of each estimator on each policy at N = 4."""
    arms_by_policy = {row["unit"]["policy"]: row["arms"] for row in _asked(rows, "estimators") if _size(row) == SIZE}
    if not arms_by_policy:
        return NOT_RUN
    arms = list(next(iter(arms_by_policy.values())))
    lines = [[arm, *(_cell(arms_of[arm]) for arms_of in arms_by_policy.values())] for arm in arms]
    return table(["N = 4: bias, variance, cosine", *(f"`{policy}`" for policy in arms_by_policy)], lines)


def pools(rows: Rows) -> str:
    """Table 1a: bias of baselines with a pool, by N, the mean over random policies."""
    asked = _asked(rows, "steps")
    if not asked:
        return NOT_RUN
    sizes = sorted({_size(row) for row in asked})
    lines = [
        [arm, *(_number(mean(row["arms"][arm]["bias"] for row in asked if _size(row) == size)) for size in sizes)]
        for arm in asked[0]["arms"]
    ]
    return table(["bias", *(f"N = {size}" for size in sizes)], lines)


def ratios(rows: Rows) -> str:
    """Table 5: bias and variance of each ratio by drift, the mean over policies."""
    asked = _asked(rows, "ratios")
    if not asked:
        return NOT_RUN
    drifts = sorted({row["unit"]["drift"] for row in asked})

    def cell(credit: str, ratio: str, drift: float) -> str:
        errors = [row["arms"][credit][ratio] for row in asked if row["unit"]["drift"] == drift]
        return ", ".join(_number(mean(error[key] for error in errors)) for key in ("bias", "variance"))

    lines = [
        [ratio, "sampled return" if credit == "return" else "Q", *(cell(credit, ratio, drift) for drift in drifts)]
        for ratio in RATIOS
        for credit in ("return", "Q")
    ]
    return table(["ratio: bias, variance", "credit", *(f"drift {drift:g}" for drift in drifts)], lines)


def verdicts(rows: Rows) -> list[Verdict]:
    """Judge A1 to A3."""
    return [_a1(rows), _a2(rows), _a3(rows)]


def _a1(rows: Rows) -> Verdict:
    asked = [*_asked(rows, "estimators"), *_asked(rows, "steps")]
    claim = "`otb_pooled` is unbiased for N = 1, 2, 4"
    if not asked:
        return Verdict("A1", claim)
    worst = max(row["arms"]["otb_pooled"]["bias"] for row in asked)
    return Verdict("A1", claim, worst <= EXACT, f"largest error {worst:.1e} in {len(asked)} enumerations")


def _a2(rows: Rows) -> Verdict:
    asked = _asked(rows, "moment")
    claim = "the second moment with a constant baseline b is e·[(b - β)² + β(1 - β)]"
    if not asked:
        return Verdict("A2", claim)
    worst = max(abs(measured - formula) for row in asked for _, measured, formula in row["moments"])
    return Verdict("A2", claim, worst <= NEARLY, f"largest error {worst:.1e} on {len(asked)} policies")


def _a3(rows: Rows) -> Verdict:
    asked = [row["arms"] for row in _asked(rows, "ratios")]
    claim = (
        "the full ratio is unbiased; the prefix ratio is so only with credit Q; the token and GSPO ratios are biased"
    )
    if not asked:
        return Verdict("A3", claim)
    exact = max(max(arms["return"]["full"]["bias"], arms["Q"]["prefix"]["bias"]) for arms in asked)
    others: Sequence[tuple[str, str]] = (("return", "prefix"), ("return", "token"), ("return", "gspo"), ("Q", "gspo"))
    least = min(arms[credit][ratio]["bias"] for arms in asked for credit, ratio in others)
    words = f"error of the unbiased ones at most {exact:.1e}, bias of the others at least {least:.3f}"
    return Verdict("A3", claim, exact <= EXACT < least, words)


def _size(row: Mapping[str, Any]) -> int:
    return int(row["unit"]["group_size"])


def _cell(arm: Mapping[str, float]) -> str:
    return ", ".join(_number(arm[key]) for key in ("bias", "variance", "cosine"))


def _number(value: float) -> str:
    return "0" if abs(value) < EXACT else f"{value:.3g}"
