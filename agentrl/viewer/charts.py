"""The charts, as inline SVG: the learning curve, one small chart per diagnostic, and the seconds by phase."""

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.viewer.axes import Frame, Point, draw_axes, span, value_range
from agentrl.viewer.folder import Row, series, step_of
from agentrl.viewer.text import brief, escape, number, percent

DIAGNOSTICS = (
    ("clip_fraction", "Clip fraction", "share of tokens with an advantage that the loss clips"),
    ("grad_norm", "Gradient norm", "before clipping"),
    ("cut_turns", "Cut turns", "turns that ran into a limit of tokens"),
    ("entropy", "Entropy", "nats per sampled token"),
    ("logp_diff_max", "Max |Δ log-prob|", "engine against trainer, nats"),
)
"""Key, title and what is measured, of each small chart."""
PHASES = ("generate", "tools", "score", "credit", "update", "sync")
REWARD = "reward_mean"
_MOST_TARGETS = 240
"""More places to point at than this would be narrower than a pixel or two."""
_MOST_BARS = 60
_MARGIN = (10.0, 12.0, 26.0, 44.0)


def curve(evals: Sequence[Row], steps: Sequence[Row]) -> str:
    """The learning curve: success on held-out problems with its interval, and the training reward of each step.

    A reward far outside 0 to 1 is left to a chart of its own, see ``diagnostics``.

    Args:
        evals: evaluations on one split, in order of steps.
        steps: training steps, in order.

    Returns:
        A figure; empty where neither success nor reward is known.
    """
    success = series(evals, "success")
    reward = series(steps, REWARD) if shares_axis(steps) else []
    if not success and not reward:
        return ""
    points = success + reward
    frame = Frame(
        width=760,
        height=340,
        margin=(18, 30, 34, 52),
        steps=span([step for step, _ in points]),
        values=value_range([1.0, *(value for _, value in points)], 5),
    )
    body = draw_axes(frame, about=(8, 5))
    if reward:
        body += f'<path class="line reward" d="{frame.path(reward)}"/>' + _dots(frame, reward, "reward")
    body += _targets(frame, [(step, f"training reward {brief(value)}") for step, value in reward])
    if success:
        body += _interval(frame, evals) + f'<path class="line success" d="{frame.path(success)}"/>'
        body += "".join(_eval_dot(frame, row) for row in evals) + _end_labels(frame, success)
    legend = (("success", "held-out success, with 95% interval", success), ("reward", "mean training reward", reward))
    keys = "".join(_key(name, text) for name, text, there in legend if there)
    return _figure("curve", "Learning curve", keys, frame, body)


def size_of(row: Row) -> str:
    """How much an evaluation played, in words: ``200 problems``, or ``50 problems, 4 attempts each``."""
    problems, attempts = number(row.get("n", row.get("tasks"))), number(row.get("attempts"))
    if problems is None:
        return ""
    return f"{problems:g} problems" + (f", {attempts:g} attempts each" if attempts and attempts != 1 else "")


def shares_axis(steps: Sequence[Row]) -> bool:
    """Whether the training reward fits on the axis of a success rate."""
    return all(-1.5 <= value <= 1.5 for _, value in series(steps, REWARD))


def diagnostics(steps: Sequence[Row]) -> list[str]:
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


def seconds_by_phase(steps: Sequence[Row]) -> str:
    """How long each phase of a step took, stacked; empty where no phase was measured."""
    phases = [phase for phase in PHASES if series(steps, f"seconds_{phase}")]
    if not phases:
        return ""
    bars = _bars(steps, phases)
    frame = Frame(
        width=340,
        height=180,
        margin=_MARGIN,
        steps=(bars[0].first - 0.5, bars[-1].last + 0.5),
        values=value_range([sum(bar.seconds) for bar in bars], 4),
    )
    body = draw_axes(frame, about=(5, 4)) + "".join(_stack(frame, bar, phases) for bar in bars)
    keys = "".join(_key(phase, phase) for phase in phases)
    return _figure("seconds", "Seconds per step", f"<span class='what'>{keys}</span>", frame, body)


def _small(key: str, title: str, what: str, points: Sequence[Point]) -> str:
    values = [value for _, value in points]
    frame = Frame(
        width=340,
        height=180,
        margin=_MARGIN,
        steps=span([step for step, _ in points]),
        values=value_range(values, 4),
    )
    body = draw_axes(frame, about=(5, 4))
    body += f'<path class="line diagnostic" d="{frame.path(points)}"/>' + _dots(frame, points, "diagnostic")
    body += _targets(frame, [(step, f"{key} {brief(value)}") for step, value in points])
    note = f"<span class='last'>last {escape(brief(values[-1]))}</span><span class='what'>{escape(what)}</span>"
    return _figure(key, title, note, frame, body)


def _figure(name: str, title: str, note: str, frame: Frame, body: str) -> str:
    return (
        f'<figure class="chart" id="chart-{name}"><figcaption><b>{escape(title)}</b>{note}</figcaption>'
        f'<svg viewBox="0 0 {frame.width:g} {frame.height:g}" role="img" aria-label="{escape(title)}">{body}'
        "</svg></figure>"
    )


def _key(name: str, text: str) -> str:
    swatch = f'<svg viewBox="0 0 22 10" aria-hidden="true"><path class="swatch {name}" d="M1 5H21"/></svg>'
    return f'<span class="key">{swatch}{escape(text)}</span>'


def _dots(frame: Frame, points: Sequence[Point], name: str) -> str:
    """A line through few points hides where they are, and one through a single point is not drawn at all."""
    if len(points) > 30:
        return ""
    return "".join(
        f'<circle class="dot {name}" cx="{frame.x(s):.1f}" cy="{frame.y(v):.1f}" r="1.6"/>' for s, v in points
    )


def _interval(frame: Frame, evals: Sequence[Row]) -> str:
    rows = [(step_of(row), number(row.get("low")), number(row.get("high"))) for row in evals]
    known = [(step, low, high) for step, low, high in rows if low is not None and high is not None]
    if not known:
        return ""
    outline = [(step, high) for step, _, high in known] + [(step, low) for step, low, _ in reversed(known)]
    whiskers = "".join(f'<path class="whisker" d="{frame.path([(s, low), (s, high)])}"/>' for s, low, high in known)
    return f'<path class="band" d="{frame.path(outline)}Z"/>{whiskers}'


def _eval_dot(frame: Frame, row: Row) -> str:
    step, success = step_of(row), number(row.get("success"))
    if success is None:
        return ""
    low, high = number(row.get("low")), number(row.get("high"))
    about = f"step {step:g}: success {percent(success)}"
    if low is not None and high is not None:
        about += f", 95% interval {percent(low)} to {percent(high)}"
    if told := size_of(row):
        about += f", {told}"
    x, y = f"{frame.x(step):.1f}", f"{frame.y(success):.1f}"
    return (
        f'<g class="eval"><title>{escape(about)}</title><circle class="near" cx="{x}" cy="{y}" r="13"/>'
        f'<circle class="dot success" cx="{x}" cy="{y}" r="4"/></g>'
    )


def _end_labels(frame: Frame, success: Sequence[Point]) -> str:
    ends = [(success[0], "start")] + ([(success[-1], "end")] if len(success) > 1 else [])
    return "".join(
        f'<text class="value" x="{frame.x(step):.1f}" y="{frame.y(value) - 12:.1f}" text-anchor="{anchor}">'
        f"{escape(percent(value))}</text>"
        for (step, value), anchor in ends
    )


def _targets(frame: Frame, told: Sequence[tuple[float, str]]) -> str:
    """Invisible columns that tell a step's value when pointed at; at most so many that each can be hit."""
    kept = told[:: -(-len(told) // _MOST_TARGETS) or 1]
    top, bottom = frame.y(frame.values[1]), frame.y(frame.values[0])
    width = min(24.0, max(2.0, (frame.x(frame.steps[1]) - frame.x(frame.steps[0])) / max(len(kept), 1)))
    return "".join(
        f'<rect class="target" x="{frame.x(step) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{bottom - top:.1f}"><title>{escape(f"step {step:g}: {text}")}</title></rect>'
        for step, text in kept
    )


def _bars(steps: Sequence[Row], phases: Sequence[str]) -> list[_Bar]:
    rows = [row for row in steps if any(number(row.get(f"seconds_{phase}")) is not None for phase in phases)]
    size = -(-len(rows) // _MOST_BARS)
    bars: list[_Bar] = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        sums = [sum(value for _, value in series(part, f"seconds_{phase}")) for phase in phases]
        seconds = tuple(max(0.0, total / len(part)) for total in sums)
        bars.append(_Bar(first=step_of(part[0]), last=step_of(part[-1]), seconds=seconds))
    return bars


def _stack(frame: Frame, bar: _Bar, phases: Sequence[str]) -> str:
    left, right = frame.x(bar.first - 0.42), frame.x(bar.last + 0.42)
    told = " · ".join(f"{phase} {brief(value)} s" for phase, value in zip(phases, bar.seconds, strict=True))
    name = f"step {bar.first:g}" if bar.first == bar.last else f"steps {bar.first:g} to {bar.last:g}, mean"
    rects, below = "", 0.0
    for phase, value in zip(phases, bar.seconds, strict=True):
        top = frame.y(below + value)
        height = frame.y(below) - top
        rects += (
            f'<rect class="{phase}" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{height:.1f}"/>'
        )
        below += value
    return f'<g class="bar"><title>{escape(f"{name}: {told}")}</title>{rects}</g>'
