r"""Parse what follows a number: a unit, a per cent sign, degrees, the base it is written in."""

import re
from dataclasses import dataclass

from agentrl.grading.latex.shape import number

_PERCENT = re.compile(r" ?(?:\\?%|\\text *\{ *(?:percent|%|\\%) *\}|(?<![A-Za-z])percent)$")
_DEGREES = re.compile(r" ?(?:\^ ?\\circ|\\text *\{ *degrees? *\}|(?<![A-Za-z])degrees?)$")
_BASE = re.compile(r"([0-9A-Fa-f]+)_ ?(?:\{ ?([0-9]{1,2}) ?\}|([0-9]))")
_TEXT = re.compile(r"\\text *\{ *([A-Za-z][A-Za-z./ ]*?) *\} ?(?:\^ ?\{?([23])\}?)?$")
_PLAIN = re.compile(r"([0-9}])[ ]?([A-Za-z]{2,}[A-Za-z./ ]*?) ?(?:\^ ?\{?([23])\}?)?$")
_CURRENCY = (("\\$", "dollar"), ("$", "dollar"), ("\N{EURO SIGN}", "euro"), ("\N{POUND SIGN}", "pound"))
_NAMES = {
    **{"centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "kilometer": "km", "kilometre": "km"},
    **{"meter": "m", "metre": "m", "inches": "in", "inch": "in", "foot": "ft", "feet": "ft", "mile": "mi"},
    **{"yard": "yd", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "gram": "g", "kilogram": "kg"},
    **{"liter": "l", "litre": "l", "usd": "dollar", "cents": "cent", "pounds": "pound", "lb": "pound"},
}
_POWERS = {"square": "2", "sq": "2", "sq.": "2", "cubic": "3", "cu": "3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A value and its unit."""

    value: str
    """The text of the value alone."""
    unit: str = ""
    """The unit's usual name, such as ``cm^2``; empty where none is written."""
    percent: bool = False
    """True if a per cent sign follows."""

    def contradicts(self, other: "Quantity") -> bool:
        """Return True if both name a unit, and not the same one."""
        return bool(self.unit and other.unit and self.unit != other.unit)


def quantity(text: str) -> Quantity:
    r"""Split ``5 \text{ cm}^2``, ``50\%``, ``30^\circ``, ``\$5`` or ``1011_2``; other texts are values alone."""
    for sign, unit in _CURRENCY:
        if text.startswith(sign):
            return Quantity(value=text[len(sign) :].strip(), unit=unit)
    if match := _PERCENT.search(text):
        return Quantity(value=text[: match.start()].strip(), percent=True)
    # A unit with nothing before it is a text of its own.
    if (match := _DEGREES.search(text)) and match.start():
        return Quantity(value=text[: match.start()].strip(), unit="degree")
    if match := _BASE.fullmatch(text):
        return Quantity(value=match.group(1), unit=f"base {match.group(2) or match.group(3)}")
    if (match := _TEXT.search(text)) and match.start():
        return Quantity(value=text[: match.start()].strip(), unit=_usual(match.group(1), match.group(2)))
    if match := _PLAIN.search(text):
        value = text[: match.end(1)]
        # Letters after anything but a literal number may be variables.
        if number(value) is not None:
            return Quantity(value=value, unit=_usual(match.group(2), match.group(3)))
    return Quantity(value=text)


def _usual(name: str, power: str | None) -> str:
    parts = name.lower().rstrip(".").split()
    if parts and parts[0] in _POWERS:
        power = _POWERS[parts.pop(0)]
    elif len(parts) > 1 and parts[-1] in ("squared", "cubed"):
        power = "2" if parts.pop() == "squared" else "3"
    usual = [_NAMES.get(part, _NAMES.get(part.removesuffix("s"), part.removesuffix("s") or part)) for part in parts]
    return " ".join(usual) + (f"^{power}" if power else "")
