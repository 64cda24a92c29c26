r"""Check the form of an answer whose value is right; runs in the graders' processes only.

- It is evaluated: it leaves nothing to be worked out, as ``undone`` defines it, and no division by a polynomial. What
  the expected answer leaves, it may leave too.
- Relations are solved, ``2 < x < 3`` or ``x \ge 1``, where the expected answer is an interval or a solved relation.
- It is no expression or relation of the problem's text, reordered or moved to the other side.
- It has the form that the problem's words ask for: a fraction, in lowest terms, a mixed number, a decimal, a simplified
  radical, a factored or expanded polynomial.

Not covered: problems that ask for a form in other words, and an interval that is asked for: ``2 < x < 3`` will do.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, cast

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from agentrl.grading.latex.shape import blankless, collection, number, tidy
from agentrl.grading.latex.trees import LETTER_I, Tree, UnreadableLatex, read
from agentrl.grading.latex.undone import flat, left_undone
from agentrl.grading.numbers import plain_number

_FRACTION = re.compile(r"(?i)\b(?:as|to|into) an? (?:[a-z]+ ){0,3}fraction|common fraction")
_LOWEST = re.compile(r"(?i)lowest terms|(?:simplest|reduced|simplified) (?:form|fraction)|\b(?:simplify|reduced?)\b")
_MIXED = re.compile(r"(?i)mixed (?:number|fraction)")
_DECIMAL = re.compile(r"(?i)\b(?:as|to|into|in) an? (?:[a-z]+ )?decimal|decimal (?:form|notation)")
_RADICAL = re.compile(r"(?i)radical form|rationali[sz]|\bsimplif|simplest form")
_FACTORED = re.compile(
    r"(?i)(?:^|[.:;,?!$] *|\band |\bcompletely )factor(?:i[sz]e)?\b(?! (?:of|by|in)\b)|factored|factori[sz]ation of"
)
_EXPANDED = re.compile(
    r"(?i)\bexpand|multipl(?:y|ied) out|slope-intercept|y *= *m *x *\+|standard form of (?:the|a) (?:line|polynomial)"
)
_BOUNDS = re.compile(r"\$+|\\[()\[\]]|\\(?:begin|end)\{[a-z*]+\}")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}(?:[ ,.?!;:]+[A-Za-z]{2,})*")
_SIDES = re.compile(r"[=<>]|\\(?:le|ge|leq|geq|ne|neq|lt|gt|approx|equiv)(?![a-z])")
_ATOM = re.compile(r"\\[A-Za-z]+|[A-Za-z]|[0-9]+")
_IDLE = frozenset(["0", "1", "2", r"\frac", r"\sqrt", r"\cdot", r"\times", r"\div", r"\text"])
_SOLVE = re.compile(r"(?i)\b(?:solve|isolate)\b")
_MAX_READ = 12
"""Limit of the problem's expressions that are parsed: those that hold the same letters and numbers as the answer."""


def number_fits(answer: str, expected: str, problem: str) -> bool:
    """Return True if a number is written as ``problem`` asks, and is not merely copied from ``problem``."""
    written_out = plain_number(answer) is not None and not unreduced(answer)
    # A calculation that is copied from the problem is what was to be evaluated.
    if not written_out and blankless(answer).replace(r"\cdot", r"\times") in blankless(problem).replace(
        r"\cdot", r"\times"
    ):
        return False
    if _MIXED.search(problem) and re.match(r"-?[0-9]+ ?\\frac|-?[0-9]+ [0-9]", expected):
        return bool(re.match(r"[+-]?[0-9]+ ?\\frac|[+-]?[0-9]+ [0-9]", answer))
    if _is_fraction(expected) and (_FRACTION.search(problem) or _LOWEST.search(problem)):
        return _is_fraction(answer) and not (_LOWEST.search(problem) and unreduced(answer))
    return not (_DECIMAL.search(problem) and "." in expected and _is_fraction(answer))


def unreduced(answer: str) -> bool:
    """Return True if the literal number ``answer`` has a fraction that is not in lowest terms."""
    if not _is_fraction(answer) or (literal := number(answer)) is None:
        return False
    return str(literal.value.denominator) != re.findall("[0-9]+", answer)[-1]


def _is_fraction(text: str) -> bool:
    return "/" in text or r"\frac" in text


def fits(text: str, answer: Tree, expected: Tree, problem: str) -> bool:
    """Return True if an answer of the right value is evaluated, no restatement, and in the form that is asked for.

    Args:
        text: the answer as it is written.
        answer: the same as a tree.
        expected: the right answer as a tree.
        problem: the problem's text.
    """
    if not set(left_undone(answer)) <= set(left_undone(expected)) or (_solved(expected) and not _solved(answer)):
        return False
    # is_polynomial is true for whatever has no letters.
    polynomials = [
        isinstance(tree, sympy.Expr) and tree.is_polynomial(*(tree.free_symbols - {LETTER_I}))
        for tree in (expected, answer)
    ]
    if _SOLVE.search(problem) and isinstance(answer, sympy.Eq) and not _isolated(expected) <= _isolated(answer):
        return False
    # Where a polynomial is expected, anything else leaves an operation to do, such as a division.
    if polynomials == [True, False] or _restates(text, answer, expected, problem):
        return False
    if _RADICAL.search(problem) and _complicated(answer) and not _complicated(expected):
        return False
    if _FACTORED.search(problem) and _factors(expected) > 1 and _factors(answer) < _factors(expected):
        return False
    return not (_EXPANDED.search(problem) and _expanded(expected) and not _expanded(answer))


def _solved(tree: Any) -> bool:
    """Return True if each side of every relation is a single letter, or f(x), or a number; or there is no relation."""
    sides = [side for part in sympy.preorder_traversal(tree) if isinstance(part, Relational) for side in part.args]
    return all(side.is_Symbol or isinstance(side, AppliedUndef) or not side.free_symbols for side in sides)


def _isolated(tree: Tree) -> set[Any]:
    """Return the letters that the equation ``tree`` is solved for."""
    sides: tuple[Any, ...] = tree.args if isinstance(tree, sympy.Eq) else ()
    pairs = zip(sides, sides[::-1], strict=True)
    return {side for side, other in pairs if side.is_Symbol and side not in other.free_symbols}


def _restates(text: str, answer: Tree, expected: Tree, problem: str) -> bool:
    if not isinstance(answer, sympy.Basic) or not isinstance(expected, sympy.Basic) or not answer.args:
        return False
    # The expected answer may stand in the problem too: "Is x^2-1 or x^2+1 reducible?"
    if _plain(answer) == _plain(expected) and _expanded(answer) == _expanded(expected):
        return False
    # Parsing is slow: only pieces with the answer's own letters and numbers can be restated by it.
    plain, atoms = _plain(answer, moved=True), _atoms(text)
    for piece in [piece for piece in _pieces(problem) if _atoms(piece) == atoms][:_MAX_READ]:
        with contextlib.suppress(UnreadableLatex):
            if _plain(read(piece), moved=True) == plain:
                return True
    return False


def _pieces(problem: str) -> Iterator[str]:
    """Yield each candidate formula of ``problem`` once: between dollar signs, between words, sides of relations."""
    parts: list[str] = _BOUNDS.split(problem)
    parts += [piece for part in parts for piece in _PROSE.split(part)]
    parts += [side for part in parts for side in _SIDES.split(part)]
    parts = [tidy(part.strip(" \n\t,;:.?!")) for part in parts]
    yield from dict.fromkeys(parts + [item for part in parts for item in collection(part)[1]])


def _atoms(text: str) -> frozenset[str]:
    return frozenset(_ATOM.findall(_SIDES.sub(" ", blankless(text)))) - _IDLE


def _key(tree: Any) -> tuple[Any, str]:
    """Split off a rational factor; the rest has its sums and products sorted and is otherwise as written."""
    if tree.is_Rational:
        return tree, ""
    if isinstance(tree, sympy.Mul):
        keys = [_key(factor) for factor in flat(tree)]
        return sympy.prod(number_ for number_, _ in keys), "*".join(sorted(rest for _, rest in keys if rest))
    if isinstance(tree, sympy.Add):
        terms = sorted((rest, number_) for number_, rest in map(_key, flat(tree)) if number_ != 0)
        lead = terms[0][1] if terms else sympy.S.Zero
        return lead, f"({'+'.join(f'{number_ / lead}{rest}' for rest, number_ in terms)})"
    if isinstance(tree, sympy.Pow) and tree.exp.is_Rational and tree.exp < 0:
        number_, rest = _key(tree.base if tree.exp == -1 else sympy.Pow(tree.base, -tree.exp, evaluate=False))
        return 1 / number_, rest and f"1/{rest}"
    return sympy.S.One, f"{tree.func.__name__}{[_key(arg) for arg in tree.args]}" if tree.args else str(tree)


def _plain(tree: Tree, *, moved: bool = False) -> object:
    """Return a canonical form of ``tree`` up to order; with ``moved``, also up to terms moved across a relation."""
    if not isinstance(tree, Relational) or not all(isinstance(side, sympy.Expr) for side in tree.args):
        return _key(tree)
    sign, (left, right) = str(cast(Any, tree).rel_op), cast(Any, tree).args
    # a > b is b < a: every relation is brought to one direction, or its sides are sorted where it has none.
    kind = sign.replace(">", "<")
    if not moved:
        sides = [_key(left), _key(right)]
        return kind, sides[::-1] if kind != sign else sides if "<" in sign else sorted(sides, key=str)
    terms = [*_flat_sum(left), *(sympy.Mul(-1, term, evaluate=False) for term in _flat_sum(right))]
    lead, rest = _key(sympy.Add(*terms, evaluate=False))
    return kind, rest, bool(lead > 0) != (kind != sign) if "<" in sign else None


def _flat_sum(tree: Any) -> list[Any]:
    return flat(tree) if isinstance(tree, sympy.Add) else [tree]


def _complicated(tree: Any) -> bool:
    """Return True if a root holds a factor that can be taken out, or another root, or stands in a denominator."""
    powers = [part for part in sympy.preorder_traversal(tree) if isinstance(part, sympy.Pow) and part.exp.is_Rational]
    roots = [part for part in powers if part.base.is_Rational and not part.exp.is_Integer]
    below = [part for part in powers if part.exp.is_negative and (part in roots or part.base.has(*roots))]
    nested = roots and any(not power.exp.is_Integer and power.base.has(*roots) for power in powers)
    return bool(nested or (roots and below)) or any(not root.doit().is_Pow for root in roots)


def _factors(tree: Any) -> int:
    """Count the factors of a product that have letters."""
    if not tree.free_symbols:
        return 0
    if isinstance(tree, sympy.Mul):
        return sum(map(_factors, tree.args))
    if isinstance(tree, sympy.Pow) and tree.exp.is_Integer:
        return max(0, int(tree.exp)) * _factors(tree.base)
    return 1


def _expanded(tree: Any) -> bool:
    """Return True if no sum with letters is a factor or the base of a power."""
    return not any(
        isinstance(arg, sympy.Add) and arg.free_symbols
        for part in sympy.preorder_traversal(tree)
        if isinstance(part, sympy.Mul) or (isinstance(part, sympy.Pow) and part.exp.is_positive)
        for arg in part.args
    )
