r"""Parse how an answer is written: brackets, lists, names before ``=``, units, per cent, words, and literal numbers.

Text in, text out: only literal numbers are computed, and every step takes linear time.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from agentrl.grading.numbers import plain_number, undressed, without_thousands

Kind = Literal["single", "(", "[", "(]", "[)", "set"]
"""A single value, a tuple or interval by its brackets, or several values in any order."""

_REPLACED: tuple[tuple[str, str], ...] = (
    *((dash, "-") for dash in ("\N{MINUS SIGN}", "\N{EN DASH}")),
    *(("\N{MULTIPLICATION SIGN}", r"\times "), ("\N{MIDDLE DOT}", r"\cdot "), ("\N{GREEK SMALL LETTER PI}", r"\pi ")),
    *(("\N{INFINITY}", r"\infty "), ("\N{DEGREE SIGN}", r"^\circ"), ("\N{UNION}", r"\cup ")),
    *(("\N{LESS-THAN OR EQUAL TO}", r"\le "), ("\N{GREATER-THAN OR EQUAL TO}", r"\ge "), ("**", "^")),
    *((r"\lbrace", r"\{"), (r"\rbrace", r"\}"), (r"\varnothing", r"\emptyset"), (r"\degree", r"^\circ")),
    *((r"^{\circ}", r"^\circ"), (r"\displaystyle", ""), (r"\limits", "")),
)
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,)(?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"(?<!\\)\\[,;:! ]|\\q?quad(?![a-zA-Z])|~|[ \t\r\n]+"), " "),
    (re.compile(r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big)(?![a-zA-Z])"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:(?:math|text)(?:rm|bf|it|sf|normal)|boldsymbol|bm|[mh]box)(?![a-zA-Z])"), r"\\text"),
    (re.compile(r"\\frac ?([0-9])([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\sqrt ?([0-9])"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![A-Za-z\\])(pi|infinity|sqrt)(?![A-Za-z])"), r"\\\1"),
    (re.compile(r"\\infinity(?![a-zA-Z])"), r"\\infty"),
    (re.compile(r"\\sqrt ?\(([^()]*)\)"), r"\\sqrt{\1}"),
)
_SMALL_SCRIPT = re.compile(r"([_^])\{([A-Za-z0-9])\}")
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_SEPARATOR = re.compile(r"[,;]|\\text *\{ *,? *(?:and|or) *\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_NAME = re.compile(
    r"(\\[a-z]+|[A-Z]{2,3}|[A-Za-z](?:_\{?[A-Za-z0-9]+\}?)?(?:\([A-Za-z](?:, ?[A-Za-z])*\))?"
    r"|\([A-Za-z](?: ?, ?[A-Za-z])+\)) ?(?:=|\\in(?![a-z])) ?"
)
_LETTERS = re.compile(r"[A-Za-z][A-Za-z' -]*")
_SCIENTIFIC = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?) ?(?:[eE]|(?:\\times|\\cdot|\*) ?10 ?\^ ?)\{?([+-]?[0-9]{1,3})\}?")
_MIXED = re.compile(r"([+-]?) ?([0-9]+) ?(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|(?<= )([0-9]+)/([0-9]+))")
_FRACTION = re.compile(r"([+-]?) ?(?:\\frac\{([+-]?)([0-9]+)\}\{([0-9]+)\}|([0-9]+) ?/ ?([0-9]+))")
_REPEATING = re.compile(r"([+-]?[0-9]*)\.([0-9]*)\\(?:overline|bar)\{([0-9]{1,50})\}")
_MAX_DIGITS = 200


def tidy(text: str) -> str:
    r"""Normalize layout: dollar signs, spacing, ``\left``, ``\dfrac``, ``\mathbf``."""
    text = text.strip()
    # Wrappers nest, as in $\text{...}$; a bound keeps the time linear.
    for _ in range(3):
        text = undressed(text.removesuffix(".").strip())
        for opening, closing in _WRAPPERS:
            if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : len(text) - len(closing)].strip()
        if text.startswith("{") and text.endswith("}") and _closes_last(text):
            text = text[1:-1].strip()
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for pattern, new in _PATTERNS:
        text = pattern.sub(new, text)
    return text.strip()


def blankless(text: str) -> str:
    """Tidy ``text`` and remove all white space, so that two answers written alike become equal."""
    return _SMALL_SCRIPT.sub(r"\1\2", "".join(tidy(text).split()))


def nesting(text: str) -> int:
    """Return the greatest nesting depth of brackets."""
    return max(_depths(text), default=0)


def named(text: str) -> tuple[str, str]:
    r"""Split off the name before ``=`` or ``\in``, blanks removed; an empty name where there is none.

    Example:
        >>> named("f(x) = x^2"), named("5")
        (('f(x)', 'x^2'), ('', '5'))
    """
    match = _NAME.match(text)
    if not match:
        return "", text
    return "".join(match.group(1).split()), text[match.end() :]


def collection(text: str) -> tuple[Kind, tuple[str, ...]]:
    r"""Split ``text`` into the kind of its collection and its items.

    ``(1, 2)`` and ``[1, 2)`` are ordered and keep their brackets; ``\{1, 2\}``, ``1, 2``, ``1 or 2`` and ``\pm 1`` are
    sets. A comma between thousands separates nothing, unless it stands in brackets.
    """
    if text.startswith(r"\{") and text.endswith(r"\}") and _closes_last(text):
        return "set", tuple(part for item in _split(text[2:-2]) for part in _signs(item))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _closes_last(text):
        items = _split(text[1:-1])
        if len(items) > 1:
            kinds: dict[str, Kind] = {"()": "(", "[]": "[", "(]": "(]", "[)": "[)"}
            return kinds[text[0] + text[-1]], tuple(items)
        return ("single", (text[1:-1].strip(),)) if text[0] + text[-1] == "()" else ("single", (text,))
    items = [part for item in _split(without_thousands(text)) for part in _signs(item)]
    return ("single" if len(items) == 1 else "set"), tuple(items)


def _signs(item: str) -> tuple[str, ...]:
    if item.count(r"\pm") != 1:
        return (item,)
    before, after = item.split(r"\pm")
    return (f"{before}+{after}" if before.strip() else after.strip(), f"{before}-{after.strip()}")


def _depths(text: str) -> list[int]:
    """Count the brackets that are open after each character [len]; an escaped brace counts once, as a brace."""
    depth, depths = 0, list[int]()
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        depths.append(depth)
    return depths


def _closes_last(text: str) -> bool:
    """Return True if the bracket that ``text`` begins with is closed by its last character."""
    depths = _depths(text)
    start = 1 if text.startswith("\\") else 0
    return depths[-1] == 0 and all(depth > 0 for depth in depths[start:-1])


def _split(text: str) -> list[str]:
    depths, parts, start = _depths(text), list[str](), 0
    for match in _SEPARATOR.finditer(text):
        # \text{and} opens a brace of its own, which is closed again after its last character.
        if depths[match.end() - 1] == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    # "1, 2, and 3" has nothing between its last two separators.
    return [part.strip() for part in [*parts, text[start:]] if part.strip()] or [""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A literal number."""

    value: Fraction
    """Its exact value."""
    finished: bool
    """True if it is evaluated: ``10/2`` is not. A fraction need not be in lowest terms."""


def number(text: str) -> Number | None:
    r"""Parse ``text`` as a literal number; None where it is something else, such as a calculation.

    Integers, decimals, fractions, mixed numbers ``1\frac{1}{2}``, ``1.5 \times 10^{3}``, ``0.1\overline{6}``.
    """
    # int() takes more than linear time, and refuses thousands of digits.
    if len(text) > _MAX_DIGITS:
        return None
    for pattern, read in _READERS:
        if match := pattern.fullmatch(text):
            return read(match)
    value = plain_number(text)
    return None if value is None else Number(value=value, finished=True)


def _scientific(match: re.Match[str]) -> Number | None:
    return Number(value=Fraction(match.group(1)) * Fraction(10) ** int(match.group(2)), finished=True)


def _mixed(match: re.Match[str]) -> Number | None:
    sign, whole = match.group(1, 2)
    part = _quotient(*(match.group(3, 4) if match.group(3) else match.group(5, 6)))
    if part is None:
        return None
    value = int(whole) + part.value
    # In 1 3/2 the fraction is above 1: the sum is left to do.
    return Number(value=-value if sign == "-" else value, finished=part.finished and part.value < 1)


def _fraction(match: re.Match[str]) -> Number | None:
    above, below = match.group(3, 4) if match.group(3) else match.group(5, 6)
    part = _quotient(above, below)
    negative = (match.group(1) == "-") != (match.group(2) == "-")
    return part and Number(value=-part.value if negative else part.value, finished=part.finished)


def _quotient(above: str, below: str) -> Number | None:
    if not int(below):
        return None
    value = Fraction(int(above), int(below))
    # 4/2 is a calculation that is left to do; 2/4 is only not reduced.
    return Number(value=value, finished=value.denominator > 1)


def _repeating(match: re.Match[str]) -> Number | None:
    whole, digits, period = match.groups()
    scale = 10 ** len(digits)
    tail = Fraction(int(digits or 0), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    size = abs(int(whole)) + tail if whole.strip("+-") else tail
    # The sign is read from the text, since int("-0") has none.
    return Number(value=-size if whole.startswith("-") else size, finished=True)


_READERS = ((_SCIENTIFIC, _scientific), (_MIXED, _mixed), (_FRACTION, _fraction), (_REPEATING, _repeating))


def words(text: str) -> str | None:
    r"""Return the words that ``text`` consists of, in lower case; None where it may be a formula.

    Words are the contents of ``\text{}``, three letters or more in a row, and one letter in parentheses: ``(C)``. One
    or two bare letters may be a formula.
    """
    inner = text
    if match := re.fullmatch(r"\\text *\{([^{}]*)\}", text):
        inner = match.group(1).strip()
    if choice := re.fullmatch(r"\(([A-Za-z])\)", inner):
        return choice.group(1).lower()
    if inner is text and re.fullmatch(r"[A-Za-z]{1,2}", text):
        return None
    return " ".join(inner.lower().split()) if _LETTERS.fullmatch(inner) else None
