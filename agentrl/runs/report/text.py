"""Write text and numbers for the page: everything is escaped, and nothing is invisible.

Episodes hold whatever a model or a tool wrote. Here control characters, bidirectional marks, zero-width and unassigned
characters become visible signs, and the rest is escaped for HTML. Only ``marked`` makes ``Markup`` of text; the
templates escape all other values. Not covered: look-alike letters, and combining marks piled on one letter.
"""

import markupsafe
from markupsafe import Markup


def visible(text: object) -> str:
    r"""Replace every character that shows nothing or moves its neighbours by a sign; markup stays as it is.

    Example:
        >>> visible("a\x00b\u202e")
        'aU+0000bU+202E'
    """
    if isinstance(text, Markup):
        return text
    return "".join(char if char.isprintable() else _sign(char) for char in str(text))


def marked(text: str) -> Markup:
    """Return text as HTML that keeps line breaks and tabs, with every sign in an element of its own."""
    if text.isprintable():
        return markupsafe.escape(text)
    return Markup().join(char if char.isprintable() else _mark(char) for char in text)


def brief(value: float) -> str:
    """Return a number in few characters, for tables: ``0.0125``, ``1.5M``, ``2e-06``."""
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return minus(f"{value / divisor:.3g}{unit}")
    return minus(f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}")


def percent(value: float) -> str:
    """Return a share as a percentage with one decimal."""
    return minus(f"{100 * value:.1f}%")


def duration(seconds: float) -> str:
    """Return a time span in its two largest units: ``1 h 12 min``, ``3 min 20 s``, ``4.1 s``, ``0.0023 s``."""
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
    # Few fonts have Unicode's own signs for control characters: they would all show as equal boxes.
    return f"U+{ord(char):04X}"


def _mark(char: str) -> Markup:
    breaks = {"\n": "↵", "\t": "⇥"}
    return Markup('<i class="sign">{}</i>{}').format(breaks.get(char, _sign(char)), char if char in breaks else "")
