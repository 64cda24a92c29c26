r"""Whether an answer is right: the last ``\boxed{}`` of a text, compared as an exact number.

What is graded was written by the agent under training, so it is hostile: it is never evaluated as Python. Only digits,
operators, parentheses, commas between thousands and a few LaTeX commands are read; length, powers and the size of every
number are bounded, and no input takes more than linear time. Rational values are compared exactly, others (roots, π) to
50 digits. Not covered: variables, units, percent signs, sets, intervals and words; these are never equal to anything.
"""

import ast
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import sympy

Number: TypeAlias = "Fraction | sympy.Float"
"""A rational as it is, anything else to 60 digits."""

MAX_CHARS = 200
"""A longer answer is wrong, whatever it says."""
MAX_BITS = 4096
"""No numerator or denominator may grow beyond this many bits, and no exponent beyond this value."""
_DIGITS = 60
_TOLERANCE = Fraction(1, 10**50)
_PLAIN = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+|[0-9]+/[0-9]+)")
_PLAIN_FRACTION = re.compile(r"([+-]?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")
_ALLOWED = re.compile(r"(?:sqrt|pi|[0-9+\-*/(). ])+")
_WORDING: tuple[tuple[str, str], ...] = (
    *((command, "") for command in (r"\left", r"\right", r"\,", r"\!", r"\;", r"\:")),
    *((sign, "*") for sign in (r"\cdot", r"\times", "\N{MULTIPLICATION SIGN}", "\N{MIDDLE DOT}")),
    *((sign, "/") for sign in (r"\div", "\N{DIVISION SIGN}")),
    *((r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), (r"\pi", "pi")),
)
_COMMANDS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\sqrt\{([^{}]*)\}"), r"sqrt(\1)"),
    (re.compile(r"\^\{([^{}]*)\}"), r"**(\1)"),
)
_IMPLIED_PRODUCT = re.compile(r"(?<=[0-9)])(?=sqrt|pi)")


class _Unreadable(ValueError):
    """The text is no number that is graded here."""


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
        return _same(_read(answer) if left is None else left, _read(expected) if right is None else right)
    except (_Unreadable, ZeroDivisionError):
        return False


def plain_number(text: str) -> Fraction | None:
    r"""The integer, decimal, ``a/b`` or ``\frac{a}{b}`` that ``text`` writes, exactly; None for anything else.

    Commas between thousands, dollar signs around it and a full stop behind it are overlooked.
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


def _bare(text: str) -> str:
    bare = text.strip().removesuffix(".").strip("$").removesuffix(".").strip()
    bare = bare.replace("{,}", ",").replace("\N{MINUS SIGN}", "-")
    return _THOUSANDS.sub(lambda found: found.group().replace(",", ""), bare)


def _same(left: Number, right: Number) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    tolerance = _real(_TOLERANCE)
    scale = abs(_real(right))
    return bool(abs(_real(left) - _real(right)) <= tolerance * (scale if scale > 1 else 1))


def _read(text: str) -> Number:
    if len(text) > MAX_CHARS:
        raise _Unreadable
    source = _as_python(text)
    if not _ALLOWED.fullmatch(source):
        raise _Unreadable
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:  # too deep for the parser is as unreadable as wrong
        raise _Unreadable from error
    return _value(tree.body, source)


def _as_python(text: str) -> str:
    for latex, python in _WORDING:
        text = text.replace(latex, python)
    text = _bare(text)
    changes = 1
    while changes:  # from the inside out; every change takes a pair of braces away
        changes = 0
        for pattern, python in _COMMANDS:
            text, count = pattern.subn(python, text)
            changes += count
    return _IMPLIED_PRODUCT.sub("*", " ".join(text.replace("^", "**").split()))


def _value(node: ast.expr, source: str) -> Number:
    match node:
        case ast.Constant():
            # The parser would round a decimal to a binary float: read its digits instead.
            return Fraction(source[node.col_offset : node.end_col_offset])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _checked(-_value(operand, source))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, source)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _checked(_OPERATIONS[type(op)](_value(left, source), _value(right, source)))
        case ast.Call(func=ast.Name(id="sqrt"), args=[argument], keywords=[]):
            return _checked(_power(_value(argument, source), Fraction(1, 2)))
        case ast.Name(id="pi"):
            return _pi()
        case _:
            raise _Unreadable


def _power(base: Number, exponent: Number) -> object:
    if not isinstance(exponent, Fraction) or max(_bits(exponent), abs(exponent)) > MAX_BITS:
        raise _Unreadable
    if isinstance(base, Fraction) and exponent.denominator == 1:
        if _bits(base) * abs(exponent) > MAX_BITS:
            raise _Unreadable
        return base**exponent.numerator
    import sympy

    return _real(base) ** sympy.Rational(exponent.numerator, exponent.denominator)


def _bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def _real(number: Number) -> "sympy.Float":
    import sympy

    if not isinstance(number, Fraction):
        return number
    return sympy.Float(sympy.Rational(number.numerator, number.denominator), _DIGITS)


def _pi() -> "sympy.Float":
    import sympy

    return sympy.Float(sympy.pi, _DIGITS)


def _checked(number: object) -> Number:
    """Refuse what is infinite, complex, undefined or too large."""
    if isinstance(number, Fraction):
        if _bits(number) > MAX_BITS:
            raise _Unreadable
        return number
    import sympy

    if not isinstance(number, sympy.Number) or not number.is_finite:
        raise _Unreadable
    return sympy.Float(number, _DIGITS)


def _mixed(operation: Callable[[Number, Number], object]) -> Callable[[Number, Number], object]:
    def apply(left: Number, right: Number) -> object:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return operation(left, right)
        return operation(_real(left), _real(right))

    return apply


_OPERATIONS: Mapping[type[ast.operator], Callable[[Number, Number], object]] = {
    ast.Add: _mixed(lambda a, b: a + b),
    ast.Sub: _mixed(lambda a, b: a - b),
    ast.Mult: _mixed(lambda a, b: a * b),
    ast.Div: _mixed(lambda a, b: a / b),
    ast.Pow: _power,
}
