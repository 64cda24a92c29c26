r"""Generate calculus problems: five levels, made with sympy from (split, level, index), with disjoint splits.

Nothing is integrated and no limit is computed: an integrand is the derivative of a drawn function, and limits come from
a table of known values. So a problem takes milliseconds, and none hangs.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import sympy

from agentrl.envs.generated.base import draw

AnswerKind = Literal["expression", "number", "points"]
# Positive, so that the root of a square is the letter itself: every function here is meant for x > 0 at least.
x: Any = sympy.Symbol("x", positive=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalculusProblem:
    """A question about a function of x, and its exact answer."""

    prompt: str
    """The user's message, its formulas in LaTeX."""
    answer: str
    """The answer in LaTeX; several points with commas between them."""
    kind: AnswerKind
    """The kind of answer: an expression in x, a number, or a set of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A problem without prompt and answer, which are computed only if it belongs to the wanted split."""

    key: str
    """The question and its function; equal for equal problems."""
    finish: Callable[[], CalculusProblem]
    """Writes the prompt and computes the answer."""


def make_problem(split: str, level: int, index: int) -> CalculusProblem:
    """Make problem number ``index`` of a level, the same one on every machine.

    Args:
        split: ``"train"`` or ``"test"``.
        level: 1 to 5.
        index: from 0, without end.
    """
    return draw(split, level, index, LEVELS[level], lambda sketch: sketch.key).finish()


def _latex(expression: Any) -> str:
    return str(sympy.latex(expression))


def _factor(rng: random.Random) -> int:
    """Draw a number from -9 to 9 whose absolute value is at least 2."""
    return rng.choice((-1, 1)) * rng.randint(2, 9)


def _polynomial(rng: random.Random) -> Sketch:
    powers = rng.sample(range(1, 7), rng.randint(2, 4))
    function = sum((_factor(rng) * x**power for power in powers), rng.choice((0, _factor(rng) / x, _factor(rng))))
    return _derivative(function)


def _derivative(function: Any) -> Sketch:
    def finish() -> CalculusProblem:
        prompt = f"Differentiate $f(x) = {_latex(function)}$."
        return CalculusProblem(prompt=prompt, answer=_latex(function.diff(x)), kind="expression")

    return Sketch(key=f"derivative {function}", finish=finish)


def _simple(rng: random.Random) -> Any:
    """Draw a function to build others from."""
    a = rng.randint(2, 9)
    functions: tuple[Callable[[], Any], ...] = (
        lambda: x ** rng.randint(2, 5),
        lambda: _factor(rng) * x + _factor(rng),
        lambda: sympy.exp(rng.choice((-a, a)) * x),
        lambda: sympy.sin(a * x),
        lambda: sympy.cos(a * x),
        lambda: sympy.log(a * x + rng.randint(1, 9)),
        lambda: sympy.sqrt(a * x + rng.randint(1, 9)),
    )
    return rng.choice(functions)()


def _above_zero(rng: random.Random) -> Any:
    """Draw a function that is positive for positive x."""
    a, b = rng.randint(2, 9), rng.randint(1, 9)
    return rng.choice((a * x + b, sympy.exp(a * x) + b, _quadratic_above_zero(rng)))


def _quadratic_above_zero(rng: random.Random) -> Any:
    return rng.randint(1, 9) * x**2 + rng.randint(0, 9) * x + rng.randint(1, 9)


def _compound(rng: random.Random) -> Sketch:
    outer: tuple[Callable[[Any], Any], ...] = (
        sympy.exp,
        sympy.sin,
        sympy.cos,
        sympy.log,
        sympy.sqrt,
        lambda inner: inner ** rng.randint(3, 6),
    )
    shapes: tuple[Callable[[], Any], ...] = (
        lambda: _factor(rng) * _simple(rng) * _simple(rng),
        lambda: _factor(rng) * _simple(rng) / _above_zero(rng),
        lambda: _factor(rng) * rng.choice(outer)(_quadratic_above_zero(rng)),
        lambda: _simple(rng) * rng.choice(outer[1:5])(_quadratic_above_zero(rng)),
    )
    function = sympy.S.Zero
    # A product of simple functions may cancel to a constant.
    while not function.has(x):
        function = rng.choice(shapes)()
    return _derivative(function)


def _integral(rng: random.Random) -> Sketch:
    a, b = rng.randint(2, 5), _factor(rng)
    low = rng.randint(0, 2)
    ends: tuple[Any, Any] = (low, low + rng.randint(1, 3))
    turns: tuple[Any, ...] = tuple(sympy.pi / n for n in (1, 2, 3, 4, 6))
    # Functions, so that only the chosen family is drawn and computed.
    families: tuple[Callable[[], tuple[Any, Any, Any]], ...] = (
        lambda: (b * x ** rng.randint(3, 5) / a + _factor(rng) * x**2, *ends),
        lambda: (b * sympy.exp(rng.choice((-a, a)) * x) + _factor(rng) * x, *ends),
        lambda: (b * x * sympy.exp(rng.choice((-a, a)) * x), *ends),
        lambda: (b * sympy.sin(a * x) + _factor(rng) * x, 0, rng.choice(turns)),
        lambda: (b * x * sympy.cos(a * x), 0, rng.choice(turns)),
        lambda: (b * x**a * sympy.log(x), 1, ends[1] + 1),
        lambda: (b * sympy.log(a * x + rng.randint(1, 9)), *ends),
        lambda: (b * sympy.sqrt(a * x + rng.randint(1, 9)), *ends),
    )
    whole, start, end = rng.choice(families)()

    def finish() -> CalculusProblem:
        # Expanded, so that the integrand does not show the function that it is the derivative of.
        integrand = _latex(sympy.expand(whole.diff(x)))
        bounds = rf"_{{{_latex(start)}}}^{{{_latex(end)}}}"
        value = sympy.expand(whole.subs(x, end) - whole.subs(x, start))
        prompt = rf"Compute $\int{bounds} \left({integrand}\right) dx$."
        return CalculusProblem(prompt=prompt, answer=_latex(value), kind="number")

    return Sketch(key=f"integral {whole} from {start} to {end}", finish=finish)


def _limit(rng: random.Random) -> Sketch:
    a, b, c = rng.randint(2, 25), rng.randint(2, 25), rng.randint(1, 9)
    sign, oo = rng.choice((-1, 1)), sympy.oo
    ratio = sympy.Rational
    rules: tuple[Callable[[], tuple[Any, object, Any]], ...] = (
        lambda: (sympy.sin(a * x) / sympy.tan(sign * b * x), 0, ratio(a * sign, b)),
        lambda: ((sympy.exp(a * x) - 1) / sympy.sin(sign * b * x), 0, ratio(a * sign, b)),
        lambda: ((1 - sympy.cos(a * x)) / (sign * b * x**2), 0, ratio(a * a * sign, 2 * b)),
        lambda: ((sympy.sqrt(x + a * a) - a) / (sign * b * x), 0, ratio(sign, 2 * a * b)),
        lambda: (sympy.log(1 + a * x) / (sign * b * x), 0, ratio(a * sign, b)),
        lambda: ((sympy.sin(a * x) - a * x) / (sign * b * x**3), 0, ratio(-(a**3) * sign, 6 * b)),
        lambda: ((sympy.exp(a * x) - 1 - a * x) / (sign * b * x**2), 0, ratio(a * a * sign, 2 * b)),
        lambda: (_cancelled(a, b, c, sign), c, ratio(a * c + sign * b, c + b)),
        lambda: ((1 + ratio(sign * a) / x) ** (b * x), oo, sympy.exp(sign * a * b)),
        lambda: (sympy.sqrt(x**2 + sign * a * x + b) - x, oo, ratio(sign * a, 2)),
        lambda: ((sign * a * x**2 + b * x + c) / (c * x**2 + a), oo, ratio(sign * a, c)),
    )
    function, target, value = rng.choice(rules)()

    def finish() -> CalculusProblem:
        prompt = rf"Compute $\lim_{{x \to {_latex(target)}}} \left({_latex(function)}\right)$."
        return CalculusProblem(prompt=prompt, answer=_latex(value), kind="number")

    return Sketch(key=f"limit {function} at {target}", finish=finish)


def _cancelled(a: int, b: int, c: int, sign: int) -> Any:
    """Make a fraction that is 0/0 at c, and whose limit there is (a·c ± b) / (c + b)."""
    return sympy.expand((x - c) * (a * x + sign * b)) / sympy.expand((x - c) * (x + b))


def _critical(rng: random.Random) -> Sketch:
    a, b = rng.randint(2, 12), rng.choice((-1, 1)) * rng.randint(3, 40)
    roots = sorted(rng.sample(range(-9, 10), rng.randint(2, 3)))
    families: tuple[Callable[[], tuple[Any, list[Any]]], ...] = (
        lambda: (_with_critical_points(roots, b), roots),
        lambda: (b * x + sympy.Integer(b * a * a) / x, [-a, a]),
        lambda: (b * x * sympy.exp(-a * x), [sympy.Rational(1, a)]),
        lambda: (b * (sympy.log(x) - a * x), [sympy.Rational(1, a)]),
        lambda: (b * x**a * sympy.log(x), [sympy.exp(-sympy.Rational(1, a))]),
        lambda: ((x**2 + b * x) * sympy.exp(x), _quadratic(1, b + 2, b)),
    )
    function, points = rng.choice(families)()

    def finish() -> CalculusProblem:
        where = " for $x > 0$" if function.has(sympy.log) else ""
        prompt = f"Find every $x$ at which the derivative of $f(x) = {_latex(function)}${where} is 0."
        return CalculusProblem(prompt=prompt, answer=", ".join(map(_latex, points)), kind="points")

    return Sketch(key=f"points {function}", finish=finish)


def _with_critical_points(roots: list[int], factor: int) -> Any:
    """Make a polynomial with integer coefficients whose derivative is 0 exactly at ``roots``."""
    derivative = [1]  # coefficients, the highest power first
    for root in roots:
        derivative = [a - root * b for a, b in zip([*derivative, 0], [0, *derivative], strict=True)]
    degree = len(derivative)
    # Integration divides by each power: the common multiple keeps the coefficients whole.
    scale = math.lcm(*range(1, degree + 1)) * (1 if factor > 0 else -1)
    powers = range(degree, 0, -1)
    return sum(scale * number // power * x**power for power, number in zip(powers, derivative, strict=True))


def _quadratic(a: int, b: int, c: int) -> list[Any]:
    """Return the two real roots of a·x² + b·x + c."""
    root = sympy.sqrt(b * b - 4 * a * c)
    return [(-b - root) / (2 * a), (-b + root) / (2 * a)]


LEVELS: Mapping[int, Callable[[random.Random], Sketch]] = {
    1: _polynomial,
    2: _compound,
    3: _integral,
    4: _limit,
    5: _critical,
}
"""The function that draws a problem of each level."""
