r"""Whether two answers mean the same; runs in the graders' processes only, under their limits.

Shapes are compared first, then values, from the outside in:

- the same text, blanks and looks aside, is the same answer;
- ``x = 5`` is as good as ``5`` where only one of the two has the name; two different names are two equations;
- ``(1, 2)``, ``[1, 2]`` and their mixtures keep brackets and order; ``\{1, 2\}``, ``2, 1``, ``1 or 2`` and ``\pm 1``
  are sets; neither is ever the other;
- two units must be the same one, one alone may be left out; likewise the base of ``1011_2``; ``50\%`` equals ``50``
  and ``0.5``, since a question may ask for either;
- words are compared as words: ``\text{(C)}`` with ``C``;
- where a number written out is expected, nothing but the same number written out and worked out will do: ``2/4`` for
  ``1/2``, but no ``10/2`` for ``5``, no ``2^5`` for ``32``, no ``0.333`` for ``1/3``;
- an integral, sum, limit, factorial and the like is no answer unless the expected one has it as well;
- other expressions are read by latex2sympy and compared by their values, to 40 digits, at points of either sign;
  equations, sets and whatever has no value by math-verify.

math-verify alone would be more lenient: it drops units and the left side of ``3 = 5``, takes ``(1, 2)`` for a set,
rounds decimals to six digits and finds any two equations without a real solution alike. Not covered: whether an
expression is simplified or factored as asked, and capital letters, which mean the same as small ones.
"""

import random
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import sympy

from agentrl.answers.shape import blankless, collection, named, nesting, number, tidy, words
from agentrl.answers.units import Quantity, quantity

if TYPE_CHECKING:
    from agentrl.answers.shape import Number

Tree: TypeAlias = "sympy.Basic | sympy.MatrixBase"

_RELATION = re.compile(r"[=<>]|\\(?:le|ge|leq|geq|ne|neq|lt|gt|in|approx|equiv)(?![a-z])")
_SET = re.compile(r"\\(?:cup|cap|setminus|mathbb|emptyset|backslash)(?![a-z])|\\begin")
_LABOUR = (
    *(re.compile(rf"\\{name}(?![a-z])") for name in ("int", "sum", "prod", "lim", "det", "gcd", "lcm", "max", "min")),
    *(
        re.compile(pattern)
        for pattern in (r"\\[dt]?binom", r"!", r"\\[lr]?(?:floor|ceil)", r"\\[bp]?mod", r"\\[a-z]*prime")
    ),
)
"""What an answer may leave to be worked out only where the expected answer does."""
_DECIMAL = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]+)(?![0-9.])")
_CLOCK = re.compile(r"[0-9]{1,2}:[0-9]{2}")
_DIGITS = 60
_TOLERANCE = sympy.Float("1e-40", _DIGITS)
_MAX_EXPONENT = 10_000
"""No exponent and no argument of a function may be larger: their values would not fit into any memory."""
_MAX_NODES = 1000
_MAX_LENGTH = 500
_MAX_NESTING = 20
_MAX_SIGNS = 40
"""Longer and deeper formulas are nobody's answer, and latex2sympy takes exponential time for some of them."""
_POINTS = 8
_MAX_DEPTH = 6


class _Unreadable(Exception):
    """The text is no formula, or one that is not worked out here."""


def same(answer: str, expected: str) -> bool:
    """Whether ``answer`` means what ``expected`` means. Reads both as text and LaTeX, never as Python."""
    return _same(tidy(answer), tidy(expected), _MAX_DEPTH)


def _same(answer: str, expected: str, depth: int) -> bool:
    if not answer or not expected or not depth:
        return False
    if blankless(answer) == blankless(expected):
        return True
    (name, rest), (other, expected_rest) = named(answer), named(expected)
    if (name or other) and (not name or not other or name == other) and not _RELATION.search(rest + expected_rest):
        return _same(rest, expected_rest, depth - 1)
    if _SET.search(answer) or _SET.search(expected):
        return _formulas(answer, expected)
    kind, items = collection(answer)
    expected_kind, expected_items = collection(expected)
    if kind == expected_kind == "single":
        peeled, expected_peeled = items[0], expected_items[0]
        if (words(answer) or words(expected)) is None and (peeled, expected_peeled) != (answer, expected):
            return _same(peeled, expected_peeled, depth - 1)
        return _single(
            peeled if words(answer) is None else answer, expected_peeled if words(expected) is None else expected
        )
    if "set" in (kind, expected_kind):
        return {kind, expected_kind} <= {"set", "single"} and _paired(items, expected_items, depth - 1)
    if kind == expected_kind:
        return len(items) == len(expected_items) and all(map(_same, items, expected_items, [depth - 1] * len(items)))
    # "1 < x < 2" against the interval (1, 2)
    return bool(_RELATION.search(answer) or _RELATION.search(expected)) and _formulas(answer, expected)


def _paired(answers: Sequence[str], expected: Sequence[str], depth: int) -> bool:
    """Whether each answer has a partner of its own; being equal is transitive but for per cent and units."""
    # Of "x = 1, y = 2" the names matter, of "x = 1, x = 2" they don't.
    several = len({named(item)[0] for item in (*answers, *expected)} - {""}) > 1

    def fits(answer: str, other: str) -> bool:
        return (not several or named(answer)[0] == named(other)[0]) and _same(answer, other, depth)

    left = list(expected)
    for answer in answers:
        partner = next((index for index, other in enumerate(left) if fits(answer, other)), None)
        if partner is None:
            return False
        del left[partner]
    return not left


def _single(answer: str, expected: str) -> bool:
    if words(answer) is not None or words(expected) is not None:
        return (words(answer) or answer.lower()) == (words(expected) or expected.lower())
    left, right = quantity(answer), quantity(expected)
    if left.contradicts(right) or not left.value or not right.value:
        return False
    wanted, given = number(right.value), number(left.value)
    if wanted is not None:
        return given is not None and given.finished and _worth(given, left, wanted, right)
    if _CLOCK.fullmatch(right.value):
        return False
    return _formulas(left.value, right.value)


def _worth(given: "Number", left: Quantity, wanted: "Number", right: Quantity) -> bool:
    if left.percent == right.percent:
        return given.value == wanted.value
    hundredth = given.value / 100 if left.percent else given.value * 100
    return wanted.value in (given.value, hundredth)


def _formulas(answer: str, expected: str) -> bool:
    if any(labour.search(answer) and not labour.search(expected) for labour in _LABOUR):
        return False
    if len(answer) > _MAX_LENGTH or nesting(answer) > _MAX_NESTING or max(map(answer.count, "^|_")) > _MAX_SIGNS:
        return False
    try:
        left, right = _read(answer), _read(expected)
    except _Unreadable:
        return False
    return _same_trees(left, right)


def _same_trees(left: Tree, right: Tree) -> bool:
    if isinstance(left, sympy.MatrixBase) and isinstance(right, sympy.MatrixBase):
        return left.shape == right.shape and all(map(_same_trees, left.flat(), right.flat()))
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        verdict = _same_values(left, right)
        return _verified(left, right) if verdict is None else verdict
    if isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq):
        return _same_equations(left, right)
    return type(left) is not sympy.Symbol and _verified(left, right)


def _same_values(left: sympy.Expr, right: sympy.Expr) -> bool | None:
    """Whether two expressions have the same value wherever both are real; None where no value can be found."""
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    pairs = [(_value(left, point), _value(right, point)) for point in _points(symbols)]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(known) < min(3, len(pairs)):
        return None
    real = [(a, b) for a, b in known if a.is_real and b.is_real]
    return all(_close(a, b) for a, b in (real if len(real) >= 3 else known))


def _same_equations(left: sympy.Eq, right: sympy.Eq) -> bool:
    """One is a multiple of the other, or both have the same solutions and at least one."""
    one, other = _difference(left), _difference(right)
    if one is None or other is None:
        return _verified(left, right)
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    values = [(_value(one, point), _value(other, point)) for point in _points(symbols)]
    factors = [a / b for a, b in values if a is not None and b is not None and not a.is_zero and not b.is_zero]
    if len(factors) > 2 and all(_close(factor, factors[0]) for factor in factors):
        return True
    return one.free_symbols == other.free_symbols and bool(sympy.solve(right)) and _verified(left, right)


def _difference(equation: sympy.Eq) -> sympy.Expr | None:
    """Left minus right; None where a side is a set or the like."""
    left, right = equation.lhs, equation.rhs
    return left - right if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr) else None


def _verified(left: Tree, right: Tree) -> bool:
    from math_verify import verify

    return bool(verify(right, left, timeout_seconds=None, allow_set_relation_comp=True))


def _points(symbols: Sequence[sympy.Basic]) -> Iterator[dict[sympy.Basic, sympy.Basic | float]]:
    """Values for ``symbols``, first all positive, then of either sign; a single empty point where there is none."""
    rng = random.Random(7)
    for number_ in range(_POINTS if symbols else 1):
        values = [rng.uniform(0.2, 3.0) * (rng.choice((1, -1)) if number_ >= _POINTS // 2 else 1) for _ in symbols]
        yield {symbol: sympy.Float(value, _DIGITS) for symbol, value in zip(symbols, values, strict=True)}


def _value(tree: sympy.Expr, point: dict[sympy.Basic, sympy.Basic | float]) -> sympy.Expr | None:
    try:
        value = tree.evalf(_DIGITS, subs=point, maxn=4 * _DIGITS)
    except (ArithmeticError, TypeError, ValueError, AttributeError, NotImplementedError):  # whatever the tree holds
        return None
    return value if all(part.is_Float or part.is_Integer for part in value.as_real_imag()) else None


def _close(left: sympy.Expr, right: sympy.Expr) -> bool:
    largest = max(abs(left), abs(right))
    return bool(abs(left - right) <= _TOLERANCE * largest)


def _read(text: str) -> Tree:
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex

    looks = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    try:
        latex = normalize_latex(_DECIMAL.sub(_as_fraction, text), config=looks)
        tree = latex2sympy(latex, is_real=True, convert_degrees=True, normalization_config=None)
    except MemoryError:
        raise
    except Exception as error:  # the parser raises whatever its input leads it to
        raise _Unreadable from error
    if not isinstance(tree, sympy.Basic | sympy.MatrixBase):
        raise _Unreadable
    tree = tree.xreplace({symbol: sympy.I for symbol in tree.free_symbols if str(symbol) == "i"})
    _tame(tree)
    return tree


def _as_fraction(found: re.Match[str]) -> str:
    # A decimal is exact: 0.1 is a tenth, not the nearest binary float.
    return rf"(\frac{{{int(found.group(1) + found.group(2))}}}{{{10 ** len(found.group(2))}}})"


def _tame(tree: Tree) -> None:
    """Refuse what is undefined or too large to evaluate, looking at every part before what it is a part of."""
    for count, part in enumerate(sympy.postorder_traversal(tree)):
        if count > _MAX_NODES or part in (sympy.nan, sympy.zoo):
            raise _Unreadable
        arguments = (
            part.args[1:] if isinstance(part, sympy.Pow) else part.args if isinstance(part, sympy.Function) else ()
        )
        for argument in arguments:
            if not argument.free_symbols and isinstance(argument, sympy.Expr):
                size = abs(argument.evalf(15))
                if not (size.is_Float or size.is_Integer or size.is_infinite) or (size > _MAX_EXPONENT) is sympy.true:
                    raise _Unreadable
