r"""Whether an answer is right: the last ``\boxed{}`` of a text, compared as an exact number.

What is graded was written by the agent under training, so it is hostile: ``agentrl.formulas`` reads it and
``agentrl.formula_values`` works it out, both within bounds and never as Python. Rational values are compared exactly,
others (roots, π) to 40 digits. Not covered: variables, units, percent signs, sets, intervals and words; these are never
equal to anything.
"""

import re
from fractions import Fraction

from agentrl.formula_values import Number, same, value
from agentrl.formulas import MAX_CHARS, Unreadable, parse

_PLAIN = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+|[0-9]+/[0-9]+)")
_PLAIN_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_DRESSED = re.compile(r"\\(?:text|(?:math|text)(?:rm|bf|it|sf|normal)|boldsymbol|bm|[mh]box) *\{(.*)\}", re.DOTALL)
_FORMULA = re.compile(r"[\W\d_]*|(?!.*[^\W\d_]{2})(?=.*[-+*/^=<>\\]).*", re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,)(?=[0-9])")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` of ``text`` holds, its braces balanced; None where there is none.

    Only the last one counts, however many answers a text tries; one that is never closed is no answer.

    Example:
        >>> last_boxed(r"First \boxed{3}, no: \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for position in range(start, len(text)):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return text[start:position].strip()
    return None


def undressed(text: str) -> str:
    r"""``text`` out of ``\text{}``, ``\mathbf{}`` and their like around all of it, as long as those hold no words.

    Example:
        >>> undressed(r"\mathbf{\text{38}}"), undressed(r"\text{no solution}"), undressed(r"\text{3}8")
        ('38', '\\text{no solution}', '\\text{3}8')
    """
    while (found := _DRESSED.fullmatch(text)) and _FORMULA.fullmatch(_COMMAND.sub(r"\\", found[1])):
        if last_boxed(rf"\boxed{{{found[1]}}}") != found[1].strip():
            break
        text = found[1].strip()
    return text


def equal(answer: str | None, expected: str, *, plain: bool = False) -> bool:
    r"""Whether two texts write the same number. Never raises.

    Args:
        answer: what the agent wrote; None stands for no answer and is never right.
        expected: what it should be equal to.
        plain: accept no calculation as an answer: only an integer, a decimal, ``a/b`` or ``\frac{a}{b}``. Without it
            ``482*73`` is as good an answer as ``35186``.

    Example:
        >>> equal(r"$\frac{2}{4}$", "0.5"), equal("1,000.", "10^3"), equal("0.33", "1/3"), equal("nan", "nan")
        (True, True, False, False)
    """
    left, right = None if answer is None else plain_number(answer), plain_number(expected)
    if left is not None and right is not None:
        return left == right
    if answer is None or (plain and left is None):
        return False
    try:
        left, right = _value(answer) if left is None else left, _value(expected) if right is None else right
    except Unreadable:
        return False
    # A whole number may have been worked out from roots, to 80 digits, on either side.
    return same(right, left) if isinstance(left, Fraction) else same(left, right)


def plain_number(text: str) -> Fraction | None:
    r"""The integer, decimal, ``a/b`` or ``\frac{a}{b}`` that ``text`` writes, exactly; None for anything else.

    Commas between thousands (LaTeX's ``{,}`` and ``\,`` as well), dollar signs or ``\text{}`` around it and a full stop
    behind it are overlooked.
    """
    if len(text) > MAX_CHARS:
        return None
    bare = _bare(text)
    if found := _PLAIN_FRACTION.fullmatch(bare):
        bare = "{}{}/{}".format(*found.groups())
    if not _PLAIN.fullmatch(bare):
        return None
    numerator, _, denominator = bare.partition("/")
    if not denominator:
        return Fraction(numerator)
    return Fraction(int(numerator), int(denominator)) if int(denominator) else None


def without_thousands(text: str) -> str:
    """``text`` without the commas that group the digits of a number; one that divides a list has a blank behind it."""
    return _THOUSANDS.sub(lambda found: found.group().replace(",", ""), text)


def _value(text: str) -> Number:
    if len(text) > MAX_CHARS:
        raise Unreadable
    return value(parse(_bare(text), names=("pi",), functions=("sqrt",)))


def _bare(text: str) -> str:
    bare = undressed(text.strip().removesuffix(".").strip("$").removesuffix(".").strip()).strip("$")
    return without_thousands(_LATEX_COMMA.sub(",", bare).replace("\N{MINUS SIGN}", "-"))
