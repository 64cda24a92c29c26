"""The charts, as inline SVG: the learning curve, one small chart per diagnostic, and the seconds by phase."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from agentrl.runs.report.axes import Frame, Point, draw_axes, span, value_range
from agentrl.runs.report.folder import RunRow, series, step_of
from agentrl.runs.report.text import brief, number, percent, tag

DIAGNOSTICS = (
    ("clip_fraction", "Clip fraction", "share of tokens with an advantage that the loss clips"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("cut_turns", "Cut turns", "turns that ran into a limit of tokens"),
    ("entropy", "Entropy", "nats per sampled token"),
    ("logp_diff_max", "Max |Δ log-prob|", "engine against trainer, nats"),
)
"""Key, title and what is measured, of each small chart."""
PHASES = ("generate", "score", "credit", "update", "sync")
REWARD = "reward_mean"
_MOST_TARGETS = 240
"""More places to point at than this would be narrower than a pixel or two."""
_MOST_BARS = 60


def curve(evals: Sequence[RunRow], steps: Sequence[RunRow], env: str = "") -> Markup:
    """The learning curve: success on held-out problems with its interval, and the training reward of each step.

    A reward far outside 0 to 1 is left to a chart of its own, see ``diagnostics``.

    Args:
        evals: evaluations on one split, in order of steps.
        steps: training steps, in order.
        env: the environment of a mix that is drawn.

    Returns:
        A figure; empty where neither success nor reward is known.
    """
    if env:
        steps = [{"step": row["step"], REWARD: row.get(f"env/{env}/{REWARD}")} for row in steps]
    success = series(evals, "success")
    reward = series(steps, REWARD) if shares_axis(steps) else []
    if not success and not reward:
        return Markup()
    points = success + reward
    frame = Frame(
        width=760,
        height=340,
        margin=(18, 30, 34, 52),
        steps=span([step for step, _ in points]),
        values=value_range([1.0, *(value for _, value in points)], 5),
    )
    body = [draw_axes(frame, about=(8, 5))]
    if reward:
        body += [tag("path", class_="line reward", d=frame.path(reward)), *_dots(frame, reward, "reward")]
    body += targets(frame, [(step, f"training reward {brief(value)}") for step, value in reward])
    if success:
        body += [*_interval(frame, evals), tag("path", class_="line success", d=frame.path(success))]
        body += [*(_eval_dot(frame, row) for row in evals), *_end_labels(frame, success)]
    legend = (("success", "held-out success, with 95% interval", success), ("reward", "mean training reward", reward))
    keys = [swatch(name, text) for name, text, there in legend if there]
    name, title = ("curve", "Learning curve") if not env else (f"curve-{env}", f"Learning curve: {env}")
    return figure(name, title, keys, frame, body)


def size_of(row: RunRow) -> str:
    """How much an evaluation played, in words: ``200 problems``, or ``50 problems, 4 attempts each``."""
    problems, attempts = number(row.get("tasks")), number(row.get("attempts"))
    if problems is None:
        return ""
    return f"{problems:g} problems" + (f", {attempts:g} attempts each" if attempts and attempts != 1 else "")


def shares_axis(steps: Sequence[RunRow]) -> bool:
    """Whether the training reward fits on the axis of a success rate."""
    return all(-1.5 <= value <= 1.5 for _, value in series(steps, REWARD))


def diagnostics(steps: Sequence[RunRow]) -> list[Markup]:
    """A small chart for each diagnostic that the rows have."""
    reward = () if shares_axis(steps) else ((REWARD, "Training reward", "mean over the episodes of a step"),)
    found = ((key, title, what, series(steps, key)) for key, title, what in (*reward, *DIAGNOSTICS))
    return [_small(key, title, what, points) for key, title, what, points in found if points]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """Consecutive steps, averaged."""

    first: float
    """The first step."""
    last: float
    """The last step."""
    seconds: tuple[float, ...]
    """Mean seconds of each phase; 0 where a phase was not measured."""


def seconds_by_phase(steps: Sequence[RunRow]) -> Markup:
    """How long each phase of a step took, stacked; empty where no phase was measured."""
    phases = [phase for phase in PHASES if series(steps, f"seconds_{phase}")]
    if not phases:
        return Markup()
    bars = _bars(steps, phases)
    frame = Frame(
        steps=(bars[0].first - 0.5, bars[-1].last + 0.5),
        values=value_range([sum(bar.seconds) for bar in bars], 4),
    )
    body = [draw_axes(frame, about=(5, 4)), *(_stack(frame, bar, phases) for bar in bars)]
    keys = tag("span", *(swatch(phase, phase) for phase in phases), class_="what")
    return figure("seconds", "Seconds per step", [keys], frame, body)


def whisker(success: float, low: float | None, high: float | None) -> Markup:
    """A rate on a line from 0 to 1, with its interval."""
    at = [4 + 192 * min(max(value, 0.0), 1.0) for value in (success, low or 0.0, high or 0.0)]
    body = [tag("path", class_="axis", d="M4 9H196M4 5V13M196 5V13")]
    if low is not None and high is not None:
        body.append(tag("line", class_="reach", x1=at[1], x2=at[2], y1=9, y2=9))
    dot = tag("circle", class_="dot success", cx=at[0], cy=9, r=5)
    return tag("svg", *body, dot, class_="whisker-line", viewBox="0 0 200 18", aria_hidden="true")


def _small(key: str, title: str, what: str, points: Sequence[Point]) -> Markup:
    values = [value for _, value in points]
    frame = Frame(steps=span([step for step, _ in points]), values=value_range(values, 4))
    line = tag("path", class_="line diagnostic", d=frame.path(points))
    hit = targets(frame, [(step, f"{key} {brief(value)}") for step, value in points])
    body = [draw_axes(frame, about=(5, 4)), line, *_dots(frame, points, "diagnostic"), *hit]
    notes = [tag("span", f"last {brief(values[-1])}", class_="last"), tag("span", what, class_="what")]
    return figure(key, title, notes, frame, body)


def figure(name: str, title: str, notes: Sequence[Markup], frame: Frame, body: Sequence[Markup]) -> Markup:
    """A chart with its title and notes."""
    drawn = tag("svg", *body, viewBox=f"0 0 {frame.width:g} {frame.height:g}", role="img", aria_label=title)
    return tag("figure", tag("figcaption", tag("b", title), *notes), drawn, class_="chart", id=f"chart-{name}")


def swatch(name: str, text: str) -> Markup:
    """A line of a legend."""
    drawn = tag("path", class_=f"swatch {name}", d="M1 5H21")
    return tag("span", tag("svg", drawn, viewBox="0 0 22 10", aria_hidden="true"), text, class_="key")


def _dots(frame: Frame, points: Sequence[Point], name: str) -> list[Markup]:
    """A line through few points hides where they are, and one through a single point is not drawn at all."""
    shown = points if len(points) <= 30 else ()
    return [tag("circle", class_=f"dot {name}", cx=frame.x(step), cy=frame.y(value), r=1.6) for step, value in shown]


def _interval(frame: Frame, evals: Sequence[RunRow]) -> list[Markup]:
    rows = [(step_of(row), number(row.get("low")), number(row.get("high"))) for row in evals]
    known = [(step, low, high) for step, low, high in rows if low is not None and high is not None]
    if not known:
        return []
    whiskers = (tag("path", class_="whisker", d=frame.path([(step, low), (step, high)])) for step, low, high in known)
    return [tag("path", class_="band", d=frame.band(known)), *whiskers]


def _eval_dot(frame: Frame, row: RunRow) -> Markup:
    step, success = step_of(row), number(row.get("success"))
    if success is None:
        return Markup()
    low, high = number(row.get("low")), number(row.get("high"))
    about = f"step {step:g}: success {percent(success)}"
    if low is not None and high is not None:
        about += f", 95% interval {percent(low)} to {percent(high)}"
    if told := size_of(row):
        about += f", {told}"
    x, y = frame.x(step), frame.y(success)
    dots = (tag("circle", class_=name, cx=x, cy=y, r=r) for name, r in (("near", 13), ("dot success", 4)))
    return tag("g", tag("title", about), *dots, class_="eval")


def _end_labels(frame: Frame, success: Sequence[Point]) -> list[Markup]:
    ends = [(success[0], "start")] + ([(success[-1], "end")] if len(success) > 1 else [])
    return [
        tag("text", percent(value), class_="value", x=frame.x(step), y=frame.y(value) - 12, text_anchor=anchor)
        for (step, value), anchor in ends
    ]


def targets(frame: Frame, told: Sequence[tuple[float, str]]) -> list[Markup]:
    """Invisible columns that tell a step's value when pointed at; at most so many that each can be hit."""
    kept = told[:: -(-len(told) // _MOST_TARGETS) or 1]
    top, bottom = frame.y(frame.values[1]), frame.y(frame.values[0])
    width = min(24.0, max(2.0, (frame.x(frame.steps[1]) - frame.x(frame.steps[0])) / max(len(kept), 1)))
    size = {"y": top, "width": width, "height": bottom - top}
    return [
        tag("rect", tag("title", f"step {step:g}: {text}"), class_="target", x=frame.x(step) - width / 2, **size)
        for step, text in kept
    ]


def _bars(steps: Sequence[RunRow], phases: Sequence[str]) -> list[_Bar]:
    rows = [row for row in steps if any(number(row.get(f"seconds_{phase}")) is not None for phase in phases)]
    size = -(-len(rows) // _MOST_BARS)
    bars: list[_Bar] = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        sums = [sum(value for _, value in series(part, f"seconds_{phase}")) for phase in phases]
        seconds = tuple(max(0.0, total / len(part)) for total in sums)
        bars.append(_Bar(first=step_of(part[0]), last=step_of(part[-1]), seconds=seconds))
    return bars


def _stack(frame: Frame, bar: _Bar, phases: Sequence[str]) -> Markup:
    left, right = frame.x(bar.first - 0.42), frame.x(bar.last + 0.42)
    told = " · ".join(f"{phase} {brief(value)} s" for phase, value in zip(phases, bar.seconds, strict=True))
    name = f"step {bar.first:g}" if bar.first == bar.last else f"steps {bar.first:g} to {bar.last:g}, mean"
    rects: list[Markup] = []
    below = 0.0
    for phase, value in zip(phases, bar.seconds, strict=True):
        top = frame.y(below + value)
        rects.append(tag("rect", class_=phase, x=left, y=top, width=right - left, height=frame.y(below) - top))
        below += value
    return tag("g", tag("title", f"{name}: {told}"), *rects, class_="bar")
