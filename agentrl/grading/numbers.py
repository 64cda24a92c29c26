r"""Grade the last ``\boxed{}`` of a text as an exact number.

The answer was written by the agent under training, so it is hostile: ``agentrl.grading.formulas`` parses it and
``agentrl.grading.values`` evaluates it, both within bounds and never as Python. Rational values are compared exactly,
others (roots, π) to 40 digits. Not covered: variables, units, percent signs, sets, intervals and words; these are never
equal to anything.
"""

import re
from fractions import Fraction

from agentrl.grading.formulas import MAX_CHARS, Unreadable, parse
from agentrl.grading.values import Number, same_number, value

_PLAIN = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+|[0-9]+/[0-9]+)")
_PLAIN_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_DRESSED = re.compile(r"\\(?:text|(?:math|text)(?:rm|bf|it|sf|normal)|boldsymbol|bm|[mh]box) *\{(.*)\}", re.DOTALL)
_FORMULA = re.compile(r"[\W\d_]*|(?!.*[^\W\d_]{2})(?=.*[-+*/^=<>\\]).*", re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\,)(?=[0-9])")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` of ``text``, its braces balanced; None where there is none.

    Only the last one counts, however many answers a text tries; a box that is never closed is no answer.

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
    r"""Strip ``\text{}``, ``\mathbf{}`` and the like from around all of ``text``, as long as they hold no words.

    Example:
        >>> undressed(r"\mathbf{\text{38}}"), undressed(r"\text{no solution}"), undressed(r"\text{3}8")
        ('38', '\\text{no solution}', '\\text{3}8')
    """
    while (match := _DRESSED.fullmatch(text)) and _FORMULA.fullmatch(_COMMAND.sub(r"\\", match[1])):
        # In \text{1}+\text{2} the first brace does not match the last.
        if last_boxed(rf"\boxed{{{match[1]}}}") != match[1].strip():
            break
        text = match[1].strip()
    return text


def equal(answer: str | None, expected: str, *, plain: bool = False) -> bool:
    r"""Return True if two texts write the same number. Never raises.

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
    # A whole number that was computed from roots is a real one of 80 digits, on either side. The real one goes first,
    # since same_number takes no rational first value for equal to a real one.
    return same_number(right, left) if isinstance(left, Fraction) else same_number(left, right)


def spelled(answer: str | None) -> str:
    """Spell ``answer`` so that votes for one number count together: ``0.50`` and ``1/2`` alike; empty for None.

    Anything but a plain number keeps its letters and loses its white space.
    """
    number = None if answer is None else plain_number(answer)
    return "".join((answer or "").split()) if number is None else str(number)


def plain_number(text: str) -> Fraction | None:
    r"""Read the integer, decimal, ``a/b`` or ``\frac{a}{b}`` that ``text`` writes, exactly; None for anything else.

    Commas between thousands (LaTeX's ``{,}`` and ``\,`` as well), dollar signs or ``\text{}`` around it and a full stop
    after it are ignored.
    """
    if len(text) > MAX_CHARS:
        return None
    bare = _bare(text)
    if match := _PLAIN_FRACTION.fullmatch(bare):
        bare = "{}{}/{}".format(*match.groups())
    if not _PLAIN.fullmatch(bare):
        return None
    numerator, _, denominator = bare.partition("/")
    if not denominator:
        return Fraction(numerator)
    return Fraction(int(numerator), int(denominator)) if int(denominator) else None


def without_thousands(text: str) -> str:
    """Remove the commas that group the digits of a number; a comma between list items has a blank after it."""
    return _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)


def _value(text: str) -> Number:
    if len(text) > MAX_CHARS:
        raise Unreadable
    return value(parse(_bare(text), names=("pi",), functions=("sqrt",)))


def _bare(text: str) -> str:
    bare = undressed(text.strip().removesuffix(".").strip("$").removesuffix(".").strip()).strip("$")
    return without_thousands(_LATEX_COMMA.sub(",", bare).replace("\N{MINUS SIGN}", "-"))
