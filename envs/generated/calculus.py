r"""``agentrl/Calculus-v0``: derivatives, definite integrals, limits and critical points, answered exactly."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar, cast

from agentrl.envs.generated.base import GeneratedEnv
from agentrl.envs.generated.calculus_problems import LEVELS, AnswerKind, make_problem
from agentrl.grading.formulas import FUNCTIONS, MAX_CHARS, Formula, Unreadable, parse
from agentrl.grading.values import agree, same_number, value
from agentrl.toolenv.tasks import stable_hash
from agentrl.types import Task

POINTS = 8
"""Number of points at which two expressions are compared."""
_LEFT_SIDE = re.compile(r"\s*\$?\s*(?:f|y|x)?(?:'|\^\{?\\prime\}?)?\s*(?:\(x\))?\s*=(?!=)")
_SEPARATOR = re.compile(r",|;|\\(?:text|mathrm)\{\s*and\s*\}|\band\b")
_MAX_ANSWERS = 10


class Calculus(GeneratedEnv):
    r"""Calculus in one variable, in five levels.

    1. The derivative of a polynomial, perhaps with a term 1/x.
    2. The derivative of products, quotients and compositions of exp, log, sin, cos, roots and polynomials.
    3. A definite integral.
    4. A limit that can't be found by putting the number in.
    5. All points where a derivative is 0.

    The reward is 1 where the last ``\boxed{}`` holds the exact answer in whatever form. This is an expression equal to
    the derivative, an exact number, or exactly the points, with commas between them. A decimal of an irrational number
    is wrong. Python and LaTeX are read.

    Two expressions are equal when they agree at 9 points that the task fixes: exactly where both are rational there,
    else to 40 digits. At the last point so many digits must agree that no approximation does
    (``agentrl.grading.values.agree``): a difference quotient is wrong, however small its step. So is a limit's function
    near the limit. That is no proof, but only an expression that was made from the answer agrees and differs.

    Arguments and errors are those of :class:`agentrl.envs.generated.base.GeneratedEnv`.
    """

    levels: ClassVar[Sequence[int]] = tuple(LEVELS)
    instructions = r"Answer exactly, without decimals, in \boxed{}."

    def make_task(self, split: str, level: int, index: int) -> Task:
        """Make a problem of the level."""
        problem = make_problem(split, level, index)
        return Task(id="", prompt=problem.prompt, answer=problem.answer, data={"kind": problem.kind})

    def is_right(self, task: Task, answer: str) -> bool:
        """Return True if ``answer`` equals the task's."""
        return equal(answer, task.answer, cast(AnswerKind, task.data["kind"]))


def equal(answer: str, expected: str, kind: AnswerKind) -> bool:
    r"""Return True if two texts write the same expression in x, number, or set of numbers. Never raises.

    Example:
        >>> equal(r"f'(x) = 2\sin x \cos x", r"\sin(2x)", "expression"), equal("x = 2, 1/2", "0.5, 2", "points")
        (True, True)
    """
    if len(answer) > MAX_CHARS:
        return False
    try:
        if kind == "points":
            return _same_points(_numbers(answer), _numbers(expected))
        if kind == "number":
            return agree(_read(answer), _read(expected))
        return _same_function(_read(answer, "x"), _read(expected, "x"), stable_hash(expected))
    except Unreadable:
        return False


def _read(text: str, *letters: str) -> Formula:
    return parse(_LEFT_SIDE.sub("", text, count=1), names=("e", "pi", *letters), functions=FUNCTIONS)


def _numbers(text: str) -> list[Formula]:
    pieces = _SEPARATOR.split(text.strip().removeprefix(r"\{").removesuffix(r"\}"), maxsplit=_MAX_ANSWERS)
    return [_read(piece) for piece in pieces]


def _same_points(answers: list[Formula], expected: list[Formula]) -> bool:
    return len(answers) == len(expected) and all(any(agree(answer, point) for answer in answers) for point in expected)


def _same_function(left: Formula, right: Formula, seed: int) -> bool:
    """Return True if the two agree at points between 1/2 and 3, where every expected derivative is defined."""
    for number in range(POINTS):
        # A prime denominator avoids the points where roots and fractions have special values.
        point = {"x": Fraction(1, 2) + Fraction((seed >> (6 * number)) % 2000 + number + 1, 811)}
        if not same_number(value(left, point), value(right, point)):
            return False
    # Below 1, where powers and exponentials are smallest: smaller intermediate values need fewer digits to agree.
    return agree(left, right, {"x": Fraction(1, 2) + Fraction(seed % 400, 811)})
