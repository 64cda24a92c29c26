"""How text and numbers are put on the page: everything escaped, nothing invisible.

Episodes hold whatever a model or a tool wrote. Here control characters, bidirectional marks, zero-width and unassigned
characters become visible signs, and the rest is escaped for HTML. Text becomes ``Markup`` in ``tag`` and ``marked``
alone; the templates escape whatever else is put into them. Not covered: look-alike letters, and combining marks piled
on one letter.
"""

import markupsafe
from markupsafe import Markup

_LARGEST = 1e200
"""Beyond this a number from a file is as good as infinite: sums of such overflow, and integers may fit no float."""


def visible(text: object) -> str:
    r"""``text`` with a sign in place of every character that shows nothing or moves its neighbours; markup as it is.

    Example:
        >>> visible("a\x00b\u202e")
        'aU+0000bU+202E'
    """
    if isinstance(text, Markup):
        return text
    return "".join(char if char.isprintable() else _sign(char) for char in str(text))


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """An HTML or SVG element; what goes into it is made visible and escaped, unless it is markup.

    Args:
        name: of the element.
        inside: its texts and elements.
        attributes: a name may end in ``_``, as ``class_``; fractions are written with one decimal.

    Example:
        >>> tag("text", "<", class_="tick", x=2.54)
        Markup('<text class="tick" x="2.5">&lt;</text>')
    """
    told = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    values = {key: f"{value:.1f}" if isinstance(value, float) else value for key, value in told.items()}
    written = "".join(f' {key}="{_escaped(value)}"' for key, value in values.items())
    return Markup(f"<{name}{written}>{''.join(map(_escaped, inside))}</{name}>")


def marked(text: str) -> Markup:
    """``text`` as HTML that keeps line breaks and tabs, with every sign set apart from real text."""
    if text.isprintable():
        return markupsafe.escape(text)
    return Markup().join(char if char.isprintable() else _mark(char) for char in text)


def number(value: object) -> float | None:
    """``value`` as a finite number; None where it is none, as booleans, texts, NaN and infinities are not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return None
    return float(value)


def brief(value: float) -> str:
    """A number in few characters, for axes and tables: ``0.0125``, ``1.5M``, ``2e-06``."""
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return minus(f"{value / divisor:.3g}{unit}")
    return minus(f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}")


def percent(value: float) -> str:
    """A share as a percentage with one decimal."""
    return minus(f"{100 * value:.1f}%")


def duration(seconds: float) -> str:
    """A time span in its two largest units: ``1 h 12 min``, ``3 min 20 s``, ``4.1 s``, ``0.0023 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 1000 else f"{brief(hours)} h"


def minus(digits: str) -> str:
    """Write a number's hyphen as the minus sign that it means."""
    return "\N{MINUS SIGN}" + digits[1:] if digits.startswith("-") else digits


def _sign(char: str) -> str:
    # The signs that Unicode has for control characters are in few fonts: they would show as boxes, all alike.
    return f"U+{ord(char):04X}"


def _mark(char: str) -> Markup:
    kept = {"\n": "↵", "\t": "⇥"}
    return tag("i", kept.get(char, _sign(char)), class_="sign") + (char if char in kept else "")


def _escaped(text: object) -> Markup:
    return markupsafe.escape(visible(text))
