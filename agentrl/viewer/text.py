"""How text and numbers are put on the page: everything escaped, nothing invisible.

Episodes hold whatever a model or a tool wrote. Here control characters, bidirectional marks, zero-width and unassigned
characters become visible signs, and the rest is escaped for HTML. Not covered: look-alike letters, and combining marks
piled on one letter.
"""

import html
from datetime import timedelta

_LARGEST = 1e300
"""Beyond this a number from a file is as good as infinite; integers there may be too long for a float."""


def visible(text: object) -> str:
    r"""``text`` with a sign in place of every character that shows nothing or moves its neighbours.

    Example:
        >>> visible("a\x00b\u202e")
        'a␀bU+202E'
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
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            divisor = 1e3 if unit == "k" else limit
            return f"{value / divisor:.3g}{unit}".replace("-", "\N{MINUS SIGN}", value < 0)
    return f"{value:.3g}".replace("-", "\N{MINUS SIGN}", value < 0)


def signed(value: float) -> str:
    """A number with its sign and three decimals."""
    return f"{value:+.3f}".replace("-", "\N{MINUS SIGN}")


def percent(value: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * value:.1f}%".replace("-", "\N{MINUS SIGN}")


def duration(seconds: float) -> str:
    """A time span in its two largest units: ``1 h 12 min``, ``3 min 20 s``, ``4.1 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds > timedelta.max.total_seconds():
        return f"{brief(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def _sign(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else f"U+{code:04X}"


def _mark(char: str) -> str:
    match char:
        case "\n":
            return '<i class="sign">↵</i>\n'
        case "\t":
            return '<i class="sign">⇥</i>\t'
        case _:
            return f'<i class="sign">{_sign(char)}</i>'
