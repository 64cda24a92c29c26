"""What a formula comes to: exact while it is rational, else to 80 digits, and always within bounds.

Every value on the way is bounded, so that no formula takes long: ``9^9^9^9`` is refused, not worked out.
"""

import functools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

from agentrl.formulas import Formula, Unreadable

Number: TypeAlias = Any
"""A ``Fraction``, or one of mpmath's real numbers, which come without types."""

MAX_BITS = 4096
"""No value may be larger than two to this power, nor nearer to 0 than its inverse."""
DIGITS = 80
TOLERANCE = 40
"""How many digits of two irrational numbers must agree."""


def value(formula: Formula, point: Mapping[str, Fraction] | None = None) -> Number:
    """What ``formula`` comes to, where its letters have the values that ``point`` gives.

    Returns:
        A ``Fraction`` where that is exact, else a real number of 80 digits.

    Raises:
        Unreadable: it is undefined there, not real, or too large on the way.
    """
    match formula:
        case Fraction():
            return formula
        case str():
            if point is not None and formula in point:
                return point[formula]
            return {"e": _real().e, "pi": _real().pi}[formula] * 1
        case (function, argument):
            return _checked(_APPLIED[function], value(argument, point))
        case (operator, left, right):
            return _checked(_WORKED[operator], value(left, point), value(right, point))


def same(answer: Number, expected: Number) -> bool:
    """Whether two values are equal: exactly where both are rational, else to 40 of their 80 digits.

    A rational answer never equals an irrational value, however near it comes.
    """
    if isinstance(answer, Fraction):
        return isinstance(expected, Fraction) and answer == expected
    scale = abs(_float(expected)) or 1
    return bool(abs(answer - _float(expected)) <= _real().mpf(10) ** -TOLERANCE * scale)


@functools.cache
def _real() -> Any:
    import mpmath

    # A context of our own: the library's shared one has a precision that anybody may change.
    context = mpmath.MPContext()
    context.dps = DIGITS
    return context


def _float(number: Number) -> Any:
    if isinstance(number, Fraction):
        return _real().mpf(number.numerator) / number.denominator
    return number


def _checked(function: Callable[..., Number], *arguments: Number) -> Number:
    try:
        result = function(*arguments)
    except (ZeroDivisionError, OverflowError, ValueError) as error:
        raise Unreadable from error
    if isinstance(result, Fraction):
        if max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
            raise Unreadable
    elif not isinstance(result, _real().mpf) or not _real().isfinite(result) or abs(_magnitude(result)) > MAX_BITS:
        raise Unreadable
    return result


def _magnitude(number: Number) -> int:
    """The power of two next above ``number``; 0 for 0."""
    return int(_real().mag(number)) if number else 0


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, Fraction) and exponent.denominator == 1:
        size = max(map(int.bit_length, base.as_integer_ratio())) if isinstance(base, Fraction) else _magnitude(base)
        if abs(exponent) > MAX_BITS or abs(size * exponent) > MAX_BITS:
            raise Unreadable
        return base**exponent.numerator
    if exponent == Fraction(1, 2):
        return _root(base)
    # An irrational power of a negative number is not real; one of 0 is 0 or nothing.
    if base <= 0 or abs(exponent) > MAX_BITS:
        raise Unreadable
    if abs(_real().log(_float(base), 2) * _float(exponent)) > MAX_BITS:
        raise Unreadable
    return _float(base) ** _float(exponent)


def _root(number: Number) -> Number:
    if number < 0:
        raise Unreadable
    if isinstance(number, Fraction):
        root = Fraction(math.isqrt(number.numerator), math.isqrt(number.denominator))
        if root * root == number:
            return root
    return _real().sqrt(_float(number))


def _exponential(number: Number) -> Number:
    if abs(number) > MAX_BITS:
        raise Unreadable
    return Fraction(1) if number == 0 else _real().exp(_float(number))


def _logarithm(number: Number) -> Number:
    if number <= 0:
        raise Unreadable
    return Fraction(0) if number == 1 else _real().log(_float(number))


def _mixed(work: Callable[[Number, Number], Number]) -> Callable[[Number, Number], Number]:
    def apply(left: Number, right: Number) -> Number:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return work(left, right)
        return work(_float(left), _float(right))

    return apply


_APPLIED: Mapping[str, Callable[[Number], Number]] = {
    "neg": lambda number: -number,
    "sqrt": _root,
    "exp": _exponential,
    "log": _logarithm,
    "sin": lambda number: Fraction(0) if number == 0 else _real().sin(_float(number)),
    "cos": lambda number: Fraction(1) if number == 0 else _real().cos(_float(number)),
    "atan": lambda number: Fraction(0) if number == 0 else _real().atan(_float(number)),
    "tan": lambda number: Fraction(0) if number == 0 else _real().tan(_float(number)),
}
_WORKED: Mapping[str, Callable[[Number, Number], Number]] = {
    "+": _mixed(lambda a, b: a + b),
    "-": _mixed(lambda a, b: a - b),
    "*": _mixed(lambda a, b: a * b),
    "/": _mixed(lambda a, b: a / b),
    "^": _power,
}
