"""How text and numbers are put on the page: everything escaped, nothing invisible.

Episodes hold whatever a model or a tool wrote. Here control characters, bidirectional marks, zero-width and unassigned
characters become visible signs, and the rest is escaped for HTML. Not covered: look-alike letters, and combining marks
piled on one letter.
"""

import html

_LARGEST = 1e200
"""Beyond this a number from a file is as good as infinite: sums of such overflow, and integers may fit no float."""


def visible(text: object) -> str:
    r"""``text`` with a sign in place of every character that shows nothing or moves its neighbours.

    Example:
        >>> visible("a\x00b\u202e")
        'aU+0000bU+202E'
    """
    return "".join(char if char.isprintable() else _sign(char) for char in str(text))


def escape(text: object) -> str:
    """``text`` made visible and escaped, fit for the inside of an element and of a quoted attribute."""
    return html.escape(visible(text), quote=True)


def marked(text: str) -> str:
    """``text`` as HTML that keeps line breaks and tabs, with every sign set apart from real text."""
    if text.isprintable():
        return html.escape(text)
    return "".join(html.escape(char) if char.isprintable() else _mark(char) for char in text)


def number(value: object) -> float | None:
    """``value`` as a finite number; None where it is none, as booleans, texts, NaN and infinities are not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return None
    return float(value)


def brief(value: float) -> str:
    """A number in few characters, for axes and tables: ``0.0125``, ``1.5M``, ``2e-06``."""
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return _minus(f"{value / divisor:.3g}{unit}")
    return _minus(f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}")


def signed(value: float) -> str:
    """A number with its sign and three decimals."""
    return _minus(f"{value:+.3f}")


def percent(value: float) -> str:
    """A share as a percentage with one decimal."""
    return _minus(f"{100 * value:.1f}%")


def duration(seconds: float) -> str:
    """A time span in its two largest units: ``1 h 12 min``, ``3 min 20 s``, ``4.1 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 1000 else f"{brief(hours)} h"


def _minus(digits: str) -> str:
    return "\N{MINUS SIGN}" + digits[1:] if digits.startswith("-") else digits


def _sign(char: str) -> str:
    # The signs that Unicode has for control characters are in few fonts: they would show as boxes, all alike.
    return f"U+{ord(char):04X}"


def _mark(char: str) -> str:
    match char:
        case "\n":
            return '<i class="sign">↵</i>\n'
        case "\t":
            return '<i class="sign">⇥</i>\t'
        case _:
            return f'<i class="sign">{_sign(char)}</i>'
