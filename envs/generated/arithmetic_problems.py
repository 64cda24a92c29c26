"""Generate arithmetic problems: five levels, made from (split, level, index), with disjoint splits.

A problem's split is the hash of its expression, whatever its wording and level. So a calculation that is a story in
training is in no test as digits, and ``a * b`` is the same problem as ``b * a``.
"""

import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentrl.envs.generated.base import draw

Expression = int | tuple[str, "Expression", "Expression"]
"""A number, or an operator (one of ``+ - *``) and its two operands."""

_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticProblem:
    """A problem of one step or several; all but the first stay hidden until the one before is solved."""

    expression: Expression
    """The complete calculation, which decides the split."""
    prompts: tuple[str, ...]
    """The user's message at each step [n]."""
    sums: tuple[str, ...]
    """The calculation of each step, which starts from the value of the step before [n]."""
    values: tuple[int, ...]
    """The value of each step; the last is the answer [n]."""


def make_problem(split: str, level: int, index: int) -> ArithmeticProblem:
    """Make problem number ``index`` of a level, the same one on every machine.

    Args:
        split: ``"train"`` or ``"test"``.
        level: 1 to 5.
        index: from 0, without end.
    """
    return draw(split, level, index, LEVELS[level], lambda problem: canonical(problem.expression))


def canonical(expression: Expression) -> str:
    """Return the text that an expression shares with its commutative variants and with nothing else."""
    if isinstance(expression, int):
        return str(expression)
    sign, left, right = expression[0], canonical(expression[1]), canonical(expression[2])
    if sign != "-" and left > right:
        left, right = right, left
    return f"({left}{sign}{right})"


def evaluate(expression: Expression) -> int:
    """Evaluate ``expression``."""
    if isinstance(expression, int):
        return expression
    return _OPERATIONS[expression[0]](evaluate(expression[1]), evaluate(expression[2]))


def write(expression: Expression, gap: str = "") -> str:
    """Write ``expression`` as Python, with ``gap`` around its operators and only the necessary parentheses."""
    if isinstance(expression, int):
        return str(expression)
    sign, left, right = expression
    # a - (b - c) needs its parentheses, (a - b) - c does not.
    return f"{_operand(left, '*' if sign == '*' else '', gap)}{gap}{sign}{gap}{_operand(right, sign, gap)}"


def _operand(expression: Expression, outer: str, gap: str) -> str:
    text = write(expression, gap)
    loose = not isinstance(expression, int) and expression[0] != "*"
    return f"({text})" if loose and outer in ("*", "-") else text


def _one_step(expression: Expression, prompt: str) -> ArithmeticProblem:
    return ArithmeticProblem(
        expression=expression, prompts=(prompt,), sums=(write(expression),), values=(evaluate(expression),)
    )


def _pair(rng: random.Random) -> Expression:
    if rng.random() < 0.5:
        return ("*", rng.randrange(100, 1000), rng.randrange(12, 1000))
    return ("+", rng.randrange(1000, 10000), rng.randrange(1000, 10000))


def _simple(rng: random.Random) -> ArithmeticProblem:
    expression = _pair(rng)
    return _one_step(expression, f"Compute {write(expression, ' ')}.")


def _nested(rng: random.Random) -> ArithmeticProblem:
    a, b, c = rng.randrange(100, 1000), rng.randrange(12, 1000), rng.randrange(12, 100)
    shapes: tuple[Expression, ...] = (
        ("*", ("+", a, b), c),
        ("*", c, ("+", a, b)),
        ("+", ("*", a, c), b),
        ("-", ("*", a, c), b),
    )
    expression = shapes[rng.randrange(len(shapes))]
    return _one_step(expression, f"Compute {write(expression, ' ')}.")


_Shape = Callable[[int, int, int], Expression]
_STORIES: tuple[tuple[str, _Shape], ...] = (
    ("A box holds {a} pens. How many pens are in {b} boxes?", lambda a, b, c: ("*", a, b)),
    ("A book has {a} pages with {b} words each. How many words?", lambda a, b, c: ("*", a, b)),
    ("Ann has {a} coins and finds {c} more. How many now?", lambda a, b, c: ("+", a, c)),
    (
        "A farm picks {a} apples on each of {b} days and eats {c}. How many are left?",
        lambda a, b, c: ("-", ("*", a, b), c),
    ),
    ("{b} buses bring {a} people each, and {c} walk. How many come?", lambda a, b, c: ("+", ("*", a, b), c)),
    (
        "A shop sells {a} red and {c} blue caps at {b} coins each. How many coins?",
        lambda a, b, c: ("*", ("+", a, c), b),
    ),
)


def _story(rng: random.Random) -> ArithmeticProblem:
    a, b, c = rng.randrange(112, 1000), rng.randrange(12, 100), rng.randrange(101, 1000)
    text, shape = _STORIES[rng.randrange(len(_STORIES))]
    return _one_step(shape(a, b, c), text.format(a=a, b=b, c=c))


_NEXT: tuple[tuple[str, str, int, int], ...] = (
    ("*", "multiply the result by {}.", 12, 100),
    ("-", "subtract {} from the result.", 1000, 5000),
    ("+", "add {} to the result.", 1000, 10000),
)
"""Operator, wording, and the range of the number, for every step but the first; no result falls below 0."""


def _staged(rng: random.Random, steps: int) -> ArithmeticProblem:
    expression: Expression = ("*", rng.randrange(100, 1000), rng.randrange(101, 1000))
    values = [evaluate(expression)]
    prompts = [f"Step 1: compute {write(expression, ' ')} with the tool."]
    sums = [write(expression)]
    for step in range(2, steps + 1):
        sign, wording, low, high = _NEXT[rng.randrange(len(_NEXT))]
        number = rng.randrange(low, high)
        prompts.append(f"{'Last step' if step == steps else f'Step {step}'}: {wording.format(number)}")
        sums.append(f"{values[-1]}{sign}{number}")
        expression = (sign, expression, number)
        values.append(_OPERATIONS[sign](values[-1], number))
    return ArithmeticProblem(expression=expression, prompts=tuple(prompts), sums=tuple(sums), values=tuple(values))


LEVELS: Mapping[int, Callable[[random.Random], ArithmeticProblem]] = {
    1: _simple,
    2: _nested,
    3: _story,
    4: lambda rng: _staged(rng, 2),
    5: lambda rng: _staged(rng, 3),
}
"""The function that draws a problem of each level."""
