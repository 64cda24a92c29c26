"""Where a value lies on paper: scales, round tick values, and the drawn axes of a chart.

Legend: data coordinates are steps and values; paper coordinates are SVG units from the top left corner.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from markupsafe import Markup

from agentrl.runs.report.text import brief, tag

Point: TypeAlias = tuple[float, float]
"""A step and a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The drawing area of a chart: which data range lies where on paper."""

    width: float = 340
    """Width of the whole drawing, in SVG units."""
    height: float = 180
    """Height of the whole drawing, in SVG units."""
    margin: tuple[float, float, float, float] = (10.0, 12.0, 26.0, 44.0)
    """Room for labels at the top, right, bottom and left, in SVG units."""
    steps: tuple[float, float]
    """The range of steps, from left to right."""
    values: tuple[float, float]
    """The range of values, from bottom to top."""

    def x(self, step: float) -> float:
        """The paper coordinate of a step."""
        _, right, _, left = self.margin
        return left + _share(step, self.steps) * (self.width - left - right)

    def y(self, value: float) -> float:
        """The paper coordinate of a value."""
        top, _, bottom, _ = self.margin
        return self.height - bottom - _share(value, self.values) * (self.height - top - bottom)

    def path(self, points: Iterable[Point]) -> str:
        """The ``d`` of a line through ``points``."""
        return "M" + "L".join(f"{self.x(step):.1f} {self.y(value):.1f}" for step, value in points)

    def band(self, points: Sequence[tuple[float, float, float]]) -> str:
        """The ``d`` of the area between two values of each step, given as step, low and high."""
        upper, lower = [(step, high) for step, _, high in points], [(step, low) for step, low, _ in points]
        return f"{self.path(upper + lower[::-1])}Z"


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values within ``low`` to ``high``, about so many: 1, 2 or 5 times a power of ten apart.

    Where no round value lies within, there is one tick in the middle.

    Example:
        >>> ticks(0, 1, 5)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    apart = _apart(low, high, about)
    first, last = math.ceil(low / apart - 1e-9), math.floor(high / apart + 1e-9)
    digits = max(0, 1 - math.floor(math.log10(apart)))
    return [round(at * apart, digits) for at in range(first, last + 1)] or [(low + high) / 2]


def span(values: Sequence[float]) -> tuple[float, float]:
    """The range of ``values``, never empty."""
    low, high = min(values), max(values)
    room = max(abs(low), abs(high), 1e-9)
    return (low, high) if high - low > 1e-6 * room else (low - room / 2, high + room / 2)


def value_range(values: Sequence[float], about: int) -> tuple[float, float]:
    """The range of a value axis with ``about`` ticks: it reaches to zero and ends, at both ends, on a tick."""
    low, high = span([0.0, *values])
    apart = _apart(low, high, about)
    low, high = math.floor(low / apart + 1e-9) * apart, math.ceil(high / apart - 1e-9) * apart
    return (low, high) if any(values) else (0.0, 1.0)


def draw_axes(frame: Frame, *, about: tuple[int, int], unit: str = "step") -> Markup:
    """Grid lines, tick labels and the two axes, as SVG.

    Args:
        frame: the drawing area.
        about: how many ticks to aim for, of steps and of values.
        unit: what the horizontal axis counts.
    """
    left, right = frame.x(frame.steps[0]), frame.x(frame.steps[1])
    bottom = frame.y(frame.values[0])
    parts: list[Markup] = []
    for value in ticks(*frame.values, about[1]):
        y = frame.y(value)
        parts.append(tag("line", class_="grid", x1=left, x2=right, y1=y, y2=y))
        parts.append(tag("text", brief(value), class_="tick", x=left - 7, y=y, dy=".34em"))
    for step in _whole(ticks(*frame.steps, about[0])):
        x = frame.x(step)
        parts.append(tag("line", class_="axis", x1=x, x2=x, y1=bottom, y2=bottom + 4))
        parts.append(tag("text", brief(step), class_="tick step", x=x, y=bottom + 7, dy=".9em"))
    parts.append(tag("text", unit, class_="tick", x=left - 18, y=bottom + 7, dy=".9em"))
    return tag("g", *parts, tag("line", class_="axis", x1=left, x2=right, y1=bottom, y2=bottom))


def _whole(steps: list[float]) -> list[float]:
    return [step for step in steps if step == int(step)]


def _apart(low: float, high: float, about: int) -> float:
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _share(value: float, of: tuple[float, float]) -> float:
    return (value - of[0]) / (of[1] - of[0])
