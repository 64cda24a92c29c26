"""Evaluate formulas: exactly while they are rational, else to 80 digits or more, and always within bounds.

Every intermediate value is bounded, so that no formula takes long: ``9^9^9^9`` is refused, not evaluated.
"""

import functools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, TypeAlias

from agentrl.grading.formulas import Formula, Unreadable, parts

Number: TypeAlias = Any
"""A ``Fraction``, or one of mpmath's real numbers, which come without types."""

MAX_BITS = 4096
"""No value may be larger than two to this power, nor nearer to 0 than its inverse."""
DIGITS = 80
TOLERANCE = 40
"""Digits of two irrational numbers that must agree."""
_ROOM = 48
_LEAST_AGREEMENT = 2048
_MOST_AGREEMENT = 40_000


def value(formula: Formula, point: Mapping[str, Fraction] | None = None) -> Number:
    """Evaluate ``formula`` with its letters at the values in ``point``.

    Returns:
        A ``Fraction`` where that is exact, else a real number of 80 digits.

    Raises:
        Unreadable: it is undefined there, not real, or has an intermediate value that is too large.
    """
    return _usual().value(formula, point or {})


def same_number(answer: Number, expected: Number) -> bool:
    """Return True if two values are equal: exactly where both are rational, else to 40 of their 80 digits.

    A rational answer never equals an irrational value, however near it comes.
    """
    if isinstance(answer, Fraction):
        return isinstance(expected, Fraction) and answer == expected
    wanted = _usual().float(expected)
    return bool(abs(answer - wanted) <= _usual().real.mpf(10) ** -TOLERANCE * (abs(wanted) or 1))


def agree(answer: Formula, expected: Formula, point: Mapping[str, Fraction] | None = None) -> bool:
    """Return True if two formulas have the same value; near values are not the same, however near they are.

    A formula that approximates another contains a small number h (or a large one). A difference quotient of n terms
    errs by no less than about h^2n. So no intermediate value of ``answer`` may be nearer to 0 than those of
    ``expected`` justify. For each operation that may add a term, the digits of another h^2 must agree.

    Raises:
        Unreadable: one of them is undefined there, not real, or has an intermediate value that is too large.
    """
    point = point or {}
    if not same_number(value(answer, point), value(expected, point)):
        return False
    room = _ROOM + 2 * max(abs(_magnitude(value(part, point))) for part in parts(expected))
    # Sums and products only combine terms; divisions, powers and functions can add one to an approximation.
    terms = sum(isinstance(part, tuple) and part[0] not in ("+", "-", "*", "neg") for part in parts(answer))
    digits = _LEAST_AGREEMENT + 2 * room * (terms + 2)
    if digits > _MOST_AGREEMENT:
        raise Unreadable
    # Room for intermediate values of either size, and guard digits for rounding.
    exactly = _Arithmetic(digits + 2 * room + 128, largest=room, nothing=digits)
    return exactly.value(("-", answer, expected), point) == 0


class _Arithmetic:
    """Arithmetic with a fixed number of binary digits.

    Args:
        digits: precision of a value that is not rational.
        largest: no value may be larger than two to this power, but a rational one, nor nearer to 0 than its inverse.
        nothing: a difference, or a function's value, counts as 0 below two to minus this power.
    """

    def __init__(self, digits: int, *, largest: int, nothing: int) -> None:
        import mpmath

        # A context of our own: the library's shared one has a precision that anybody may change.
        self.real: Any = mpmath.MPContext()
        self.real.prec = digits
        self._largest = largest
        self._nothing = nothing

    def value(self, formula: Formula, point: Mapping[str, Fraction]) -> Number:
        """Evaluate ``formula`` at ``point``."""
        match formula:
            case Fraction():
                return self._checked(formula)
            case str():
                return point[formula] if formula in point else {"e": self.real.e, "pi": self.real.pi}[formula] * 1
            case (name, argument):
                operands = (self.value(argument, point),)
            case (name, left, right):
                operands = (self.value(left, point), self.value(right, point))
        try:
            return self._checked(self._worked(name, *operands))
        except (ZeroDivisionError, OverflowError, ValueError) as error:
            raise Unreadable from error

    def float(self, number: Number) -> Any:
        """Convert ``number`` to a real one of this precision."""
        return self.real.mpf(number.numerator) / number.denominator if isinstance(number, Fraction) else number

    def _checked(self, number: Number) -> Number:
        size = _magnitude(number)
        if isinstance(number, Fraction):
            # A large whole number is as exact as a small one, and may be a logarithm's argument.
            bits = max(number.numerator.bit_length(), number.denominator.bit_length())
            fits = bits <= MAX_BITS and size >= -self._largest
        else:
            fits = isinstance(number, self.real.mpf) and self.real.isfinite(number) and abs(size) <= self._largest
        if not fits:
            raise Unreadable
        return number

    def _worked(self, name: str, left: Number, right: Number = Fraction(0)) -> Number:
        if name not in ("neg", "sqrt", "exp", "log", "^") and not (
            isinstance(left, Fraction) and isinstance(right, Fraction) and name in "+-*/"
        ):
            left, right = self.float(left), self.float(right)
        match name:
            case "neg":
                return -left
            case "+" | "-":
                return self._left_over(left + right if name == "+" else left - right, max(abs(left), abs(right)))
            case "*":
                return left * right
            case "/":
                return left / right
            case "^":
                return self._power(left, right)
            case "sqrt":
                return self._root(left)
            case "exp":
                return self._exponential(left)
            case "log":
                return self._logarithm(left)
            case _:
                if left == 0:
                    return Fraction(1 if name == "cos" else 0)
                applied = {"sin": self.real.sin, "cos": self.real.cos, "tan": self.real.tan, "atan": self.real.atan}
                return self._left_over(applied[name](left), 1)

    def _left_over(self, number: Number, terms: Number) -> Number:
        """Return ``number``, or 0 where it is only a rounding error of numbers as large as ``terms``."""
        small = not isinstance(number, Fraction) and _magnitude(number) < _magnitude(terms) - self._nothing
        return Fraction(0) if small else number

    def _power(self, base: Number, exponent: Number) -> Number:
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            # The result's size is estimated before the power is computed: that computation is the attack.
            size = max(map(int.bit_length, base.as_integer_ratio())) if isinstance(base, Fraction) else _magnitude(base)
            if abs(exponent) > MAX_BITS or abs(size * exponent) > MAX_BITS:
                raise Unreadable
            return base**exponent.numerator
        if exponent == Fraction(1, 2):
            return self._root(base)
        # An irrational power of a negative number is not real; one of 0 is 0 or nothing.
        if base <= 0 or abs(exponent) > MAX_BITS or abs(_magnitude(base) * exponent) > 2 * MAX_BITS:
            raise Unreadable
        return self.float(base) ** self.float(exponent)

    def _root(self, number: Number) -> Number:
        if number < 0:
            raise Unreadable
        if isinstance(number, Fraction):
            # A square's root stays rational, so that it is compared exactly.
            root = Fraction(math.isqrt(number.numerator), math.isqrt(number.denominator))
            if root * root == number:
                return root
        return self.real.sqrt(self.float(number))

    def _exponential(self, number: Number) -> Number:
        if abs(number) > MAX_BITS:
            raise Unreadable
        return Fraction(1) if number == 0 else self.real.exp(self.float(number))

    def _logarithm(self, number: Number) -> Number:
        if number <= 0:
            raise Unreadable
        return Fraction(0) if number == 1 else self._left_over(self.real.log(self.float(number)), 1)


@functools.cache
def _usual() -> _Arithmetic:
    return _Arithmetic(math.ceil(DIGITS * math.log2(10)) + 4, largest=MAX_BITS, nothing=10 * MAX_BITS)


def _magnitude(number: Number) -> int:
    """Estimate the power of two next above ``number``; 0 for 0.

    Raises:
        ValueError, OverflowError: it is not finite.
    """
    if isinstance(number, int | Fraction):
        return number.numerator.bit_length() - number.denominator.bit_length() + 1 if number else 0
    return int(_usual().real.mag(number)) if number else 0
