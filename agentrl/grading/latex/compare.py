r"""Compare what two answers mean; runs in the graders' processes only, under their limits.

Shapes are compared first, then values, from the outside in:

- the same text but for white space and layout is the same answer;
- ``x = 5`` is as good as ``5`` where only one of the two has the name; two different names are two equations;
- ``(1, 2)``, ``[1, 2]`` and their mixtures keep brackets and order; ``\{1, 2\}``, ``2, 1``, ``1 or 2`` and ``\pm 1``
  are sets; neither is ever the other;
- two units must be the same; a unit on one side only is ignored, as is the base of ``1011_2``; ``50\%`` equals ``50``
  and ``0.5``, since a question may ask for either;
- words are compared as words: ``\text{(C)}`` with ``C``;
- where a literal number is expected, only the same number, literal and evaluated, will do: ``2/4`` for ``1/2``, but not
  ``10/2`` for ``5``, ``2^5`` for ``32``, or ``0.333`` for ``1/3``;
- a derivative, integral, sum, limit, factorial, union and the like is no answer unless the expected one has it as well;
- other expressions are read by latex2sympy and compared by their values, to 40 digits at points of either sign and to
  900 at one; equations, sets and whatever has no value by math-verify.

math-verify alone would be more lenient: it drops units and the left side of ``3 = 5``, reads ``(1, 2)`` as a set, and
rounds decimals to six digits. It calls any two equations without a real solution equal. Where the caller passes the
problem's text, ``form`` checks whether an expression is evaluated, and simplified or factored as asked.
Not covered: capital letters, which mean the same as small ones.
"""

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import sympy

from agentrl.grading.latex.form import fits, number_fits, unreduced
from agentrl.grading.latex.shape import Number, blankless, collection, named, number, tidy, words
from agentrl.grading.latex.trees import Tree, UnreadableLatex, read, value_at, with_imaginary
from agentrl.grading.latex.undone import has_even_quotient
from agentrl.grading.latex.units import Quantity, quantity

_RELATION = re.compile(r"[=<>]|\\(?:le|ge|leq|geq|ne|neq|lt|gt|in|approx|equiv)(?![a-z])")
_SET = re.compile(r"\\(?:cup|cap|setminus|mathbb|emptyset|backslash)(?![a-z])|\\begin")
_UNION = re.compile(r"\\(?:cup|cap|setminus|backslash)(?![a-z])")
_COMMANDS = ("int", "sum", "prod", "lim", "det", "gcd", "lcm", "max", "min", "choose", "Gamma")
_SIGNS = (r"\\[dt]?binom", r"!", r"\\[lr]?(?:floor|ceil)", r"\\[bp]?mod", r"\\[a-z]*prime", r"\\partial")
_WORDS = (r"\\operatorname ?\{(?! ?(?:arc)?(?:sin|cos|tan|cot|sec|csc)h? ?\})", r"\\frac ?\{ ?\\text ?\{ ?d")
_LABOUR = tuple(map(re.compile, (*(rf"\\{name}(?![a-z])" for name in _COMMANDS), *_SIGNS, *_WORDS)))
"""Operations that an answer may leave unevaluated only where the expected answer does."""
_OPERATIONS = (sympy.Derivative, sympy.Integral, sympy.Limit, sympy.Sum, sympy.Product)
Point: TypeAlias = "dict[sympy.Basic, sympy.Basic | float]"
_CLOCK = re.compile(r"[0-9]{1,2}:[0-9]{2}")
_DIGITS = 60
_TOLERANCE = sympy.Float("1e-40", _DIGITS)
_MANY_DIGITS = 1000
_MANY_AGREE = sympy.Float("1e-900", _DIGITS)
_NEAR_ZERO = 1e-15
_POINTS = 8
_MAX_DEPTH = 6


def same(answer: str, expected: str, problem: str = "") -> bool:
    """Return True if ``answer`` means the same as ``expected``. Parses both as text and LaTeX, never as Python.

    Args:
        answer: what the agent wrote.
        expected: the right answer.
        problem: the problem's text; unless it is empty, the answer must be evaluated and in the form that it asks for.
    """
    return _same(tidy(answer), tidy(expected), problem, _MAX_DEPTH)


def verified(answer: str, expected: str) -> bool:
    """Return the verdict of math-verify alone, which is more lenient.

    It reads LaTeX only: math-verify's defaults would evaluate other parts of a text as Python.
    """
    from math_verify import LatexExtractionConfig, parse

    # The process has a timer of its own.
    options: dict[str, Any] = {"extraction_config": [LatexExtractionConfig()], "parsing_timeout": None}
    return _verified(*(parse(rf"\boxed{{{text}}}", **options) for text in (answer, expected)))


def _same(answer: str, expected: str, problem: str, depth: int) -> bool:
    if not answer or not expected or not depth:
        return False
    if blankless(answer) == blankless(expected):
        return True
    (name, rest), (other, expected_rest) = named(answer), named(expected)
    if (name or other) and (not name or not other or name == other) and not _RELATION.search(rest + expected_rest):
        return _same(rest, expected_rest, problem, depth - 1)
    if _UNION.search(answer) and not (_UNION.search(expected) or _RELATION.search(expected)):
        return False
    # The commas inside sets and matrices are not those of a list.
    if _SET.search(answer) or _SET.search(expected):
        return _formulas(answer, expected, problem)
    kind, items = collection(answer)
    expected_kind, expected_items = collection(expected)
    if kind == expected_kind == "single":
        peeled, expected_peeled = items[0], expected_items[0]
        if (words(answer) or words(expected)) is None and (peeled, expected_peeled) != (answer, expected):
            return _same(peeled, expected_peeled, problem, depth - 1)
        return _single(
            peeled if words(answer) is None else answer,
            expected_peeled if words(expected) is None else expected,
            problem,
        )
    if "set" in (kind, expected_kind):
        return {kind, expected_kind} <= {"set", "single"} and _paired(items, expected_items, problem, depth - 1)
    if kind == expected_kind:
        pairs = zip(items, expected_items, strict=False)
        return len(items) == len(expected_items) and all(_same(*pair, problem, depth - 1) for pair in pairs)
    # "1 < x < 2" against the interval (1, 2)
    return bool(_RELATION.search(answer) or _RELATION.search(expected)) and _formulas(answer, expected, problem)


def _paired(answers: Sequence[str], expected: Sequence[str], problem: str, depth: int) -> bool:
    """Match each answer with an expected one of its own.

    Greedy matching suffices, since equality is transitive but for per cent and units.
    """
    # Of "x = 1, y = 2" the names matter, of "x = 1, x = 2" they don't.
    several = len({named(item)[0] for item in (*answers, *expected)} - {""}) > 1

    def fits(answer: str, other: str) -> bool:
        return (not several or named(answer)[0] == named(other)[0]) and _same(answer, other, problem, depth)

    left = list(expected)
    for answer in answers:
        partner = next((index for index, other in enumerate(left) if fits(answer, other)), None)
        if partner is None:
            return False
        del left[partner]
    return not left


def _single(answer: str, expected: str, problem: str) -> bool:
    if words(answer) is not None or words(expected) is not None:
        return (words(answer) or answer.lower()) == (words(expected) or expected.lower())
    left, right = quantity(answer), quantity(expected)
    if left.contradicts(right) or not left.value or not right.value:
        return False
    literal, wanted = number(left.value), number(right.value)
    if wanted is not None:
        same_worth = literal is not None and literal.finished and _same_worth(literal, left, wanted, right)
        return same_worth and number_fits(left.value, right.value, problem)
    if _CLOCK.fullmatch(right.value):
        return False
    return _formulas(left.value, right.value, problem)


def _same_worth(literal: Number, left: Quantity, wanted: Number, right: Quantity) -> bool:
    if left.percent == right.percent:
        return literal.value == wanted.value
    # The per cent sign is on one side only: 50% may be written 50 or 0.5.
    rescaled = literal.value / 100 if left.percent else literal.value * 100
    # 12/80 for 15% is a division that is left to do.
    return wanted.value == literal.value or (wanted.value == rescaled and not unreduced(left.value))


def _formulas(answer: str, expected: str, problem: str) -> bool:
    if any(labour.search(answer) and not labour.search(expected) for labour in _LABOUR):
        return False
    # The parser evaluates a quotient of two literal numbers.
    if has_even_quotient(answer) and not has_even_quotient(expected):
        return False
    try:
        left, right = read(answer), read(expected, any_length=True)
        if left.has(*_OPERATIONS) and not right.has(*_OPERATIONS):
            return False
        meant = _same_trees(with_imaginary(left), with_imaginary(right))
    except UnreadableLatex:
        return False
    return meant and (not problem or fits(answer, left, right, problem))


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
    """Return True if two expressions have the same value wherever both are real; None where no value can be found."""
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    pairs = [(value_at(left, point, _DIGITS), value_at(right, point, _DIGITS)) for point in _points(symbols)]
    defined = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(defined) < min(3, len(pairs)):
        return None
    # At a negative point a root may take another complex branch: real values decide where there are enough of them.
    real = [(a, b) for a, b in defined if a.is_real and b.is_real]
    close = all(_close(a, b) for a, b in (real if len(real) >= 3 else defined))
    return close and _exactly(left, right, next(_points(symbols)))


def _exactly(left: sympy.Expr, right: sympy.Expr, point: Point) -> bool:
    """Return True if two values that agree to 40 digits also agree to 900, without a number near 0 in the answer.

    Within 900 digits a decimal of an irrational number differs, and so does a difference quotient unless its step is
    minute; such a step is found among the parts of ``left``.
    """
    a, b = value_at(left, point, _MANY_DIGITS), value_at(right, point, _MANY_DIGITS)
    if a is None or b is None or abs(a - b) > _MANY_AGREE * max(abs(a), abs(b)):
        return False
    return _smallest(left, point) >= _NEAR_ZERO * _smallest(right, point) ** 2


def _smallest(tree: sympy.Expr, point: Point) -> float:
    """Return the least absolute value of any part of ``tree`` but zeros, and at most 1."""
    sizes = [abs(part.evalf(15, subs=point)) for part in sympy.preorder_traversal(tree) if isinstance(part, sympy.Expr)]
    return min((float(size) for size in sizes if size.is_Float and size), default=1.0)


def _same_equations(left: sympy.Eq, right: sympy.Eq) -> bool:
    """Return True if one is a multiple of the other, or both have the same solutions and at least one."""
    answer, expected = _difference(left), _difference(right)
    if answer is None or expected is None:
        return _verified(left, right)
    symbols = sorted(answer.free_symbols | expected.free_symbols, key=str)
    values = [(value_at(answer, point, _DIGITS), value_at(expected, point, _DIGITS)) for point in _points(symbols)]
    # A multiple has the same factor at every point.
    factors = [a / b for a, b in values if a is not None and b is not None and not a.is_zero and not b.is_zero]
    if len(factors) > 2 and all(_close(factor, factors[0]) for factor in factors):
        return True
    # Equations without a solution would all have the same (empty) set of solutions.
    return answer.free_symbols == expected.free_symbols and bool(sympy.solve(right)) and _verified(left, right)


def _difference(equation: sympy.Eq) -> sympy.Expr | None:
    """Return left minus right; None where a side is a set or the like."""
    left, right = equation.lhs, equation.rhs
    return left - right if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr) else None


def _verified(left: "Tree | list[Tree | str]", right: "Tree | list[Tree | str]") -> bool:
    from math_verify import verify

    return bool(verify(right, left, timeout_seconds=None, allow_set_relation_comp=True))


def _points(symbols: Sequence[sympy.Basic]) -> Iterator[Point]:
    """Yield values for ``symbols``, first all positive, then of either sign; one empty point where there is none."""
    # A fixed seed of its own: the same answer gets the same verdict in every grader.
    rng = random.Random(7)
    for number_ in range(_POINTS if symbols else 1):
        values = [rng.uniform(0.2, 3.0) * (rng.choice((1, -1)) if number_ >= _POINTS // 2 else 1) for _ in symbols]
        yield {symbol: sympy.Float(value, _DIGITS) for symbol, value in zip(symbols, values, strict=True)}


def _close(left: sympy.Expr, right: sympy.Expr) -> bool:
    largest = max(abs(left), abs(right))
    return bool(abs(left - right) <= _TOLERANCE * largest)
