"""The charts of a page as data, drawn by ``charts.js``: the learning curve, the diagnostics, the seconds by phase."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias
from urllib.parse import unquote

from agentrl.runs.folder import number
from agentrl.runs.report.folder import RunRow, series, step_of
from agentrl.runs.report.text import percent

Point: TypeAlias = tuple[float, float]
"""A step and a value."""
DIAGNOSTICS = (
    ("clip_fraction", "Clip fraction", "share of tokens with an advantage that the loss clips"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("cut_turns", "Cut turns", "turns that ran into a limit of tokens"),
    ("entropy", "Entropy", "nats per sampled token"),
    ("baseline_best", "Best baseline", "mean return, weighed by energy"),
    ("noise_none", "Noise without a baseline", "predicted, as a multiple of the best one's"),
    ("noise_mean", "Noise of a mean", "predicted, as a multiple of the best baseline's"),
    ("logp_diff_max", "Max |Δ log-prob|", "engine against trainer, nats"),
)
"""Key, title and unit of each small chart."""
PLANNED = (
    ("share", "Tasks by kind", "share of the groups that the plan gave to each"),
    ("success", "Estimated success", "by which the plan weighs each kind of task"),
)
"""Last part of the metrics ``plan/STRATUM/…`` of a plan of tasks, title and unit of their charts."""
STYLES = 6
"""Styles of lines that differ in colour only."""
_MOST_STRATA = 12
PHASES = ("generate", "score", "credit", "update", "sync")
REWARD = "reward_mean"
_MOST_BARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a chart."""

    style: str
    """Its class in the page's style sheet, or a colour such as ``hsl(90, 65%, 45%)``."""
    name: str
    """Its name in tooltips."""
    points: Sequence[Point]
    """The points that it joins, in order of steps."""
    band: Sequence[tuple[float, float, float]] = ()
    """The area around it: step, low and high."""
    titles: Sequence[str] = ()
    """A tooltip for each point; without them, one tooltip tells the values of all lines at a step."""
    labels: bool = False
    """Write the percentages at both ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Consecutive steps, averaged."""

    span: tuple[float, float]
    """The first and the last step."""
    parts: Sequence[tuple[str, float]]
    """Class and value of each part, from the bottom to the top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of lines or of bars."""

    id: str
    """Name of its figure in the page."""
    title: str
    """Its title."""
    what: str = ""
    """The quantity and its unit."""
    keys: Sequence[tuple[str, str]] = ()
    """Style and text of each entry in the legend."""
    lines: Sequence[Line] = ()
    """Its lines."""
    bars: Sequence[Stack] = ()
    """Its bars."""
    within: Sequence[float] = ()
    """Values that its axis must reach, beside 0."""
    size: str = "small"
    """``small``, ``middle`` or ``wide``."""
    unit: str = "step"
    """What the horizontal axis counts."""


def data(charts: Sequence[Chart]) -> list[object]:
    """Return charts as plain data for JSON."""
    return [asdict(chart) for chart in charts]


def curve(evals: Sequence[RunRow], steps: Sequence[RunRow], env: str = "") -> list[Chart]:
    """Return the learning curve: success on held-out problems with its interval, and the training reward of each step.

    A reward far outside 0 to 1 has a chart of its own, see ``diagnostics``.

    Args:
        evals: evaluations on one split, in order of steps.
        steps: training steps, in order.
        env: the environment of a mix.

    Returns:
        A chart; none where neither success nor reward is known.
    """
    if env:
        steps = [{"step": row["step"], REWARD: row.get(f"env/{env}/{REWARD}")} for row in steps]
    measured = [row for row in evals if number(row.get("success")) is not None]
    success, reward = series(measured, "success"), series(steps, REWARD) if shares_axis(steps) else []
    intervals = ((step_of(row), number(row.get("low")), number(row.get("high"))) for row in measured)
    band = [(step, low, high) for step, low, high in intervals if low is not None and high is not None]
    titles = [_eval_title(row) for row in measured]
    lines = [
        Line(style="reward", name="training reward", points=reward),
        Line(style="success", name="success", points=success, band=band, titles=titles, labels=True),
    ]
    legend = {"success": "held-out success, with 95% interval", "reward": "mean training reward"}
    drawn = [line for line in lines if line.points]
    chart = Chart(
        id=f"curve-{env}" if env else "curve",
        title=f"Learning curve: {env}" if env else "Learning curve",
        keys=[(line.style, legend[line.style]) for line in reversed(drawn)],
        lines=drawn,
        within=[1.0],
        size="wide",
    )
    return [chart] if drawn else []


def size_of(row: RunRow) -> str:
    """Return how much an evaluation played, in words: ``200 problems``, or ``50 problems, 4 attempts each``."""
    problems, attempts = number(row.get("tasks")), number(row.get("attempts"))
    if problems is None:
        return ""
    return f"{problems:g} problems" + (f", {attempts:g} attempts each" if attempts and attempts != 1 else "")


def shares_axis(steps: Sequence[RunRow]) -> bool:
    """Return True if the training reward fits on the axis of a success rate."""
    return all(-1.5 <= value <= 1.5 for _, value in series(steps, REWARD))


def diagnostics(steps: Sequence[RunRow]) -> list[Chart]:
    """Return a small chart for each diagnostic that the rows have."""
    reward = () if shares_axis(steps) else ((REWARD, "Training reward", "mean over the episodes of a step"),)
    return [
        Chart(id=key, title=title, what=what, lines=[Line(style="diagnostic", name=key, points=points)])
        for key, title, what in (*reward, *DIAGNOSTICS)
        if (points := series(steps, key))
    ]


def planned(steps: Sequence[RunRow]) -> list[Chart]:
    """Return two charts of what a plan of tasks chose, a line for each of the first twelve strata; none without any."""
    charts = list[Chart]()
    for key, title, what in PLANNED:
        names = sorted({name for row in steps for name in row if re.fullmatch(f"plan/.+/{key}", name)})[:_MOST_STRATA]
        drawn = [(name, points) for name in names if (points := series(steps, name))]
        keys = [(f"run{at % STYLES}", unquote(name[5 : -len(key) - 1])) for at, (name, _) in enumerate(drawn)]
        lines = [
            Line(style=style, name=stratum, points=points)
            for (style, stratum), (_, points) in zip(keys, drawn, strict=True)
        ]
        if lines:
            charts.append(Chart(id=f"plan-{key}", title=title, what=what, keys=keys, lines=lines, within=[1.0]))
    return charts


def seconds_by_phase(steps: Sequence[RunRow]) -> list[Chart]:
    """Return a chart of how long each phase of a step took, stacked; none where no phase was measured."""
    phases = [phase for phase in PHASES if series(steps, f"seconds_{phase}")]
    rows = [row for row in steps if any(series([row], f"seconds_{phase}") for phase in phases)]
    size, bars = -(-len(rows) // _MOST_BARS), list[Stack]()
    for start in range(0, len(rows), size or 1):
        part = rows[start : start + size]
        sums = [(phase, sum(value for _, value in series(part, f"seconds_{phase}"))) for phase in phases]
        parts = [(phase, max(0.0, total / len(part))) for phase, total in sums]
        bars.append(Stack(span=(step_of(part[0]), step_of(part[-1])), parts=parts))
    keys = [(phase, phase) for phase in phases]
    return [Chart(id="seconds", title="Seconds per step", keys=keys, bars=bars)] if bars else []


def _eval_title(row: RunRow) -> str:
    success, low, high = (number(row.get(key)) for key in ("success", "low", "high"))
    interval = "" if low is None or high is None else f", 95% interval {percent(low)} to {percent(high)}"
    size = size_of(row)
    return f"step {step_of(row):g}: success {percent(success or 0.0)}{interval}{size and f', {size}'}"
