r"""Find what an answer leaves to be worked out; runs in the graders' processes only.

Undone is arithmetic with numbers: ``1/4+1/6``, like terms, a quotient that comes out even, a power such as ``5^2`` or
``(10\pi)^2``. Undone are also functions of numbers, as ``\arcsin\frac12`` or ``|4+6i|``, and exponentials of
logarithms. So are products of roots from which a number comes out, and letters that drop out of the value: ``x/x``. The
letter i is the root of -1. Roots of numbers, as ``\sqrt{52}`` or ``8^{1/2}``, fractions, and powers of ten are results.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import sympy
from sympy.core.function import Application
from sympy.functions.elementary.hyperbolic import HyperbolicFunction
from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction
from sympy.matrices import MatrixBase
from sympy.matrices.expressions import MatMul, MatrixExpr, MatrixSymbol

from agentrl.grading.latex.trees import LETTER_I, imaginary, value_at

_FAMILIES = (sympy.log, TrigonometricFunction, InverseTrigonometricFunction, HyperbolicFunction)
"""Functions of one kind: where ``\\ln 2`` is expected, ``\\log_2 3`` may be left unevaluated."""
_POINTS = ((0.3719, 0.1307), (-1.7243, 0.0911))
"""Two points: the first letter's value, and how much further each next letter's is."""
_NOTHING = 1e-10
_QUOTIENT = re.compile(r"(?<![0-9.^_])([0-9]+) ?/ ?([0-9]+)(?![0-9.^_!])|\\frac ?\{ ?([0-9]+) ?\} ?\{ ?([0-9]+) ?\}")


def has_even_quotient(text: str) -> bool:
    r"""Return True if ``text`` divides a number by another and nothing remains, as ``\frac{100}{4}\pi`` does."""
    quotients = [[int(digits) for digits in groups if digits] for groups in _QUOTIENT.findall(text)]
    return any(below and above % below == 0 for above, below in quotients)


def left_undone(tree: Any) -> Iterator[str]:
    """Yield the kinds of operations that ``tree`` leaves unevaluated."""
    for part in sympy.preorder_traversal(tree):
        letters = part.free_symbols - {LETTER_I}
        if letters and isinstance(part, sympy.Expr) and part.args and _drop_out(part, letters):
            yield "letters"
        undone = False
        if isinstance(part, sympy.exp):
            # The exponential of a logarithm is worked out to something else.
            undone = not isinstance(_worked(part), sympy.exp)
        elif isinstance(part, Application) and not letters:
            yield next((family.__name__ for family in _FAMILIES if isinstance(part, family)), type(part).__name__)
            undone = _worked(part).is_Rational
        elif isinstance(part, MatrixExpr):
            undone = _undone_matrix(part)
        elif isinstance(part, sympy.Add):
            undone = _undone_sum(flat(part))
        elif isinstance(part, sympy.Mul):
            undone = _undone_product(list(_factors(part)))
        elif isinstance(part, sympy.Pow):
            undone = bool(_worked(part).is_Rational) if letters else _undone_power(part)
            if part.exp.is_negative and LETTER_I in part.free_symbols:
                yield "division"
        if undone:
            yield "arithmetic"


def flat(part: Any) -> list[Any]:
    """Return the terms of a sum, or the factors of a product, those of nested ones too."""
    return [each for arg in part.args for each in (flat(arg) if arg.func is part.func else [arg])]


def _worked(part: Any) -> Any:
    return imaginary(part).doit()


def _drop_out(part: Any, letters: set[Any]) -> bool:
    """Return True if ``part`` has the same value whatever its letters are."""
    names = sorted(letters, key=str)
    points = [{name: sympy.Float(base + step * index) for index, name in enumerate(names)} for base, step in _POINTS]
    left, right = (value_at(part, point, 15) for point in points)
    if left is None or right is None:
        return False
    return bool(abs(left - right) <= _NOTHING * max(abs(left), abs(right)))


def _undone_sum(terms: list[Any]) -> bool:
    # Like terms: the same but for a rational factor, as are the roots of 50 and of 18.
    worked = [_worked(term) for term in terms]
    # A number times a sum of numbers is a sum of numbers.
    worked = [each for term in worked for each in ([term] if term.free_symbols else sympy.Add.make_args(term.expand()))]
    like = Counter(term.as_coeff_Mul()[1] for term in worked if not term.is_zero)
    return max(like.values(), default=0) > 1


def _factors(part: Any, *, below: bool = False) -> Iterator[Any]:
    """Yield the factors of a product, those of a denominator without letters one by one."""
    if part.is_Mul:
        for arg in part.args:
            yield from _factors(arg, below=below)
    elif part.is_Pow and part.exp == -1 and (below or not part.free_symbols - {LETTER_I}):
        yield from _factors(part.base, below=not below)
    else:
        yield sympy.Pow(part, -1, evaluate=False) if below else part


def _undone_product(factors: list[Any]) -> bool:
    above = [factor for factor in factors if factor.is_Rational and abs(factor) != 1]
    below = [factor.base for factor in factors if factor.is_Pow and factor.exp == -1 and factor.base.is_Integer]
    # One number above and one below are a fraction, unless it comes out even.
    if len(above) > 1 or len(below) > 1 or (below and above and not (above[0] / below[0]).q > 1 == above[0].q):
        return True
    # A factor above and below, with letters, cancels.
    powers = [factor.as_base_exp() for factor in factors if factor.free_symbols]
    if {base for base, exponent in powers if exponent.is_negative} & {base for base, _ in powers if base in factors}:
        return True
    numbers = [_worked(factor) for factor in factors if not factor.free_symbols - {LETTER_I}]
    numbers = [number for number in numbers if not number.is_Rational]
    # pi times its root is a result, as is twice the root of two.
    kinds = Counter((base, exponent.is_Integer) for base, exponent in (number.as_base_exp() for number in numbers))
    sums = [number for number in numbers if number.is_Add]
    complex_ = [number for number in numbers if number.has(sympy.I) and not isinstance(number, sympy.exp)]
    if max(kinds.values(), default=0) > 1 or len(sums) > 1 or len(complex_) > 1:
        return True
    # From the roots of 3 and of 6 comes a factor of 3.
    separate = sympy.prod(number.as_coeff_Mul()[0] for number in numbers)
    return sympy.Mul(*numbers).as_coeff_Mul()[0] != separate


def _undone_power(part: Any) -> bool:
    """Return True if a power without letters is a calculation, not a root nor a power of π."""
    base, exponent, worked = _worked(part.base), _worked(part.exp), _worked(part)
    # A power of ten is how large numbers are written, and a power of minus one is a denominator.
    if part.base == 10 or exponent == -1:
        return False
    if exponent.is_Integer:
        return base.is_Add or not worked.is_Pow
    parts: Any = sympy.preorder_traversal(worked)
    return not any(each.is_Pow and not each.exp.is_Integer for each in parts)


def _undone_matrix(part: Any) -> bool:
    """Return True if ``part`` is more than a matrix, or a number times one."""
    if isinstance(part, MatMul):
        numbers = [arg for arg in part.args if not arg.is_Matrix]
        return len(part.args) - len(numbers) > 1 or _undone_product(numbers)
    return not isinstance(part, MatrixBase | MatrixSymbol)
