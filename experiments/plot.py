"""Charts as files of SVG that need nothing else: axes, lines, bands, points and a legend."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from axes import Frame, Point, ticks
from markupsafe import Markup, escape

from agentrl.runs.report.text import brief, visible

HUES = ("#1f5fbf", "#b4560b", "#0b7a6b", "#7a3fb8", "#b8860b", "#a8341f", "#4a5568", "#c2417c", "#5b8c2a")
"""Of the first lines; more of them begin again, dashed."""
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1c2230}.soft{fill:#5b6474}.title{font-weight:600;font-size:14px}"
    ".grid{stroke:#dfe1e6}.axis{stroke:#5b6474}path,line{fill:none;stroke-width:1.5}"
)
_LEGEND, _HEAD, _LINE = 170.0, 34.0, 18.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis: what it measures, over which range, and its ticks."""

    title: str
    """Quantity and unit."""
    low: float
    """Its smallest value."""
    high: float
    """Its largest value."""
    log: bool = False
    """Whether values are drawn by their logarithm."""

    def at(self, value: float) -> float:
        """Return the coordinate of a value, which is clamped to the range."""
        clamped = min(max(value, self.low), self.high)
        return math.log10(clamped) if self.log else clamped

    @property
    def range(self) -> tuple[float, float]:
        """The coordinates of both ends."""
        return self.at(self.low), self.at(self.high)

    def ticks(self) -> list[float]:
        """Round values along the axis."""
        if not self.log:
            return ticks(self.low, self.high, 5)
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        few = len(exponents) > 3
        candidates = [digit * 10.0**power for power in exponents for digit in ((1,) if few else (1, 3))]
        return [tick for tick in candidates if self.low * 0.999 <= tick <= self.high * 1.001]


class Chart:
    """A chart to draw into.

    Args:
        title: of the chart.
        x: the axis to the right.
        y: the axis upwards.
    """

    def __init__(self, title: str, x: Axis, y: Axis, width: float = 640, height: float = 380) -> None:
        self._title, self._x, self._y = title, x, y
        margin = (_HEAD, _LEGEND, 46.0, 62.0)
        self._frame = Frame(width=width, height=height, margin=margin, steps=x.range, values=y.range)
        self._body: list[Markup] = []
        self._keys: list[Markup] = []

    def line(self, points: Iterable[Point], number: int, name: str = "") -> None:
        """Draw a line in the colour of a number, and name it in the legend."""
        path = self._frame.path((self._x.at(x), self._y.at(y)) for x, y in points)
        self._body.append(tag("path", d=path, stroke=hue(number), stroke_dasharray=_dash(number)))
        if name:
            self._key(name, tag("path", d="M0 0H18", stroke=hue(number), stroke_dasharray=_dash(number)))

    def band(self, points: Sequence[tuple[float, float, float]], number: int) -> None:
        """Fill between two values of each x: x, low, high."""
        path = self._frame.band([(self._x.at(x), self._y.at(low), self._y.at(high)) for x, low, high in points])
        self._body.append(tag("path", d=path, style=f"fill:{hue(number)};opacity:.15"))

    def dots(self, points: Iterable[tuple[float, float, str]], number: int, name: str = "") -> None:
        """Draw points, each with a text that shows when it is pointed at."""
        for x, y, about in points:
            centre = {"cx": self._frame.x(self._x.at(x)), "cy": self._frame.y(self._y.at(y))}
            self._body.append(tag("circle", tag("title", about), r=4, fill=hue(number), stroke="#fff", **centre))
        if name:
            self._key(name, tag("circle", cx=9, cy=0, r=4, fill=hue(number)))

    def cells(self, cells: Iterable[tuple[float, float, float, float]], fill: str, name: str = "") -> None:
        """Fill rectangles, each from x, y to x, y."""
        for x, y, right, top in cells:
            left, bottom = self._frame.x(self._x.at(x)), self._frame.y(self._y.at(y))
            size = {"width": self._frame.x(self._x.at(right)) - left, "height": bottom - self._frame.y(self._y.at(top))}
            size["height"] += 0.2  # coordinates are rounded, which would leave a seam
            corner = {"x": left, "y": self._frame.y(self._y.at(top))}
            self._body.append(tag("rect", fill=fill, shape_rendering="crispEdges", **corner, **size))
        if name:
            self._key(name, tag("rect", x=2, y=-6, width=14, height=12, fill=fill))

    def text(self, x: float, y: float, words: str) -> None:
        """Write beside a point."""
        corner = {"x": self._frame.x(self._x.at(x)) + 7, "y": self._frame.y(self._y.at(y)) + 4}
        self._body.append(tag("text", words, class_="soft", **corner))

    def svg(self) -> str:
        """Write the whole file."""
        frame = self._frame
        size = {"viewBox": f"0 0 {frame.width:g} {frame.height:g}", "width": frame.width, "height": frame.height}
        head = tag("text", self._title, class_="title", x=frame.x(self._x.range[0]), y=18)
        inside = [tag("style", Markup(_STYLE)), tag("rect", width=frame.width, height=frame.height, fill="#fff"), head]
        drawn = tag("svg", *inside, self._grid(), *self._body, *self._keys, xmlns="http://www.w3.org/2000/svg", **size)
        return f"{drawn}\n"

    def _grid(self) -> Markup:
        frame, (left, right), (low, high) = self._frame, self._x.range, self._y.range
        parts: list[Markup] = []
        for value in self._y.ticks():
            y = frame.y(self._y.at(value))
            parts.append(tag("line", class_="grid", x1=frame.x(left), x2=frame.x(right), y1=y, y2=y))
            parts.append(tag("text", brief(value), class_="soft", x=frame.x(left) - 6, y=y + 4, text_anchor="end"))
        for value in self._x.ticks():
            x = frame.x(self._x.at(value))
            parts.append(tag("line", class_="axis", x1=x, x2=x, y1=frame.y(low), y2=frame.y(low) + 4))
            parts.append(tag("text", brief(value), class_="soft", x=x, y=frame.y(low) + 17, text_anchor="middle"))
        parts.append(tag("line", class_="axis", x1=frame.x(left), x2=frame.x(right), y1=frame.y(low), y2=frame.y(low)))
        middle = (frame.x(left) + frame.x(right)) / 2
        parts.append(tag("text", self._x.title, x=middle, y=frame.height - 8, text_anchor="middle"))
        at = f"translate(14 {(frame.y(low) + frame.y(high)) / 2:.1f}) rotate(-90)"
        parts.append(tag("text", self._y.title, transform=at, text_anchor="middle"))
        return tag("g", *parts)

    def _key(self, name: str, sign: Markup) -> None:
        x, y = self._frame.width - _LEGEND + 12, _HEAD + 8 + _LINE * len(self._keys)
        self._keys.append(tag("g", sign, tag("text", name, x=24, y=4), transform=f"translate({x:.1f} {y:.1f})"))


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """Return an HTML or SVG element; its contents are made visible and escaped, unless they are markup.

    Args:
        name: the element's name.
        inside: its texts and elements.
        attributes: a name may end in ``_``, as ``class_``; fractions are written with one decimal.

    Example:
        >>> tag("text", "<", class_="tick", x=2.54)
        Markup('<text class="tick" x="2.5">&lt;</text>')
    """
    names = {key: key.rstrip("_").replace("_", "-") for key in attributes}
    values = {key: f"{value:.1f}" if isinstance(value, float) else value for key, value in attributes.items()}
    written = "".join(f' {names[key]}="{_escaped(value)}"' for key, value in values.items())
    return Markup(f"<{name}{written}>{''.join(map(_escaped, inside))}</{name}>")


def hue(number: int) -> str:
    """Return the colour of a line's number."""
    return HUES[number % len(HUES)]


def _dash(number: int) -> str:
    return "none" if number < len(HUES) else "5 3"


def _escaped(text: object) -> Markup:
    return escape(visible(text))
