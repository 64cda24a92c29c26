"""Where a value lies on paper, and round values along an axis.

Legend: data coordinates are steps and values; paper coordinates are SVG units from the top left corner.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]
"""A step and a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The drawing area of a chart: which data range lies where on paper."""

    width: float
    """Width of the whole drawing, in SVG units."""
    height: float
    """Height of the whole drawing, in SVG units."""
    margin: tuple[float, float, float, float]
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
    step = _step(low, high, about)
    lowest, highest = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(count * step, digits) for count in range(lowest, highest + 1)] or [(low + high) / 2]


def _step(low: float, high: float, about: int) -> float:
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _share(value: float, of: tuple[float, float]) -> float:
    return (value - of[0]) / (of[1] - of[0])
