r"""``agentrl/Countdown-v0``: reach a target from a list of numbers, each used once, with ``+ - * /``."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, cast

from agentrl.envs.generated.base import GeneratedEnv, draw
from agentrl.grading.formulas import Formula, Unreadable, parse, parts, write
from agentrl.grading.values import value
from agentrl.types import Task

_LARGEST_NUMBER, _LARGEST_STEP = 99, 5000
_TARGETS = range(10, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle:
    """Numbers, a target, and one solution."""

    numbers: tuple[int, ...]
    """The numbers to use, each as often as it is listed [n]."""
    target: int
    """The value to reach."""
    solution: Formula
    """The solution that the puzzle was made from; often one of many."""


class Countdown(GeneratedEnv):
    r"""The numbers game in four levels, with 3, 4, 5 and 6 numbers.

    Every number must be used exactly once, in any order, with ``+ - * /`` and parentheses; values on the way may be
    fractions or negative. The reward is 1 where the last ``\boxed{}`` holds such an expression and it comes to exactly
    the target, whichever solution it is. ``= target`` behind it is ignored. A sign in front of a number, powers, and
    digits put together to a longer number are not allowed. At least one solution exists.

    Arguments and errors are those of :class:`agentrl.envs.generated.base.GeneratedEnv`.
    """

    levels: ClassVar[Sequence[int]] = (1, 2, 3, 4)
    instructions = r"Use every number once, with + - * / and (). Put the expression in \boxed{}."

    def make_task(self, split: str, level: int, index: int) -> Task:
        """Make a puzzle of ``level + 2`` numbers."""
        return task_of(make_puzzle(split, level, index))

    def is_right(self, task: Task, answer: str) -> bool:
        """Return True if ``answer`` uses the numbers and equals the target."""
        return solves(answer, cast(tuple[int, ...], task.data["numbers"]), cast(int, task.data["target"]))

    def working(self, task: Task) -> Sequence[str]:
        """Evaluate the expression."""
        return [f"print({task.answer})"]


def task_of(puzzle: Puzzle) -> Task:
    """Make the task of a puzzle."""
    numbers = ", ".join(map(str, puzzle.numbers))
    return Task(
        id="",
        prompt=f"Numbers: {numbers}. Target: {puzzle.target}.",
        answer=write(puzzle.solution)[1:-1],
        data={"numbers": puzzle.numbers, "target": puzzle.target},
    )


def solves(answer: str, numbers: Sequence[int], target: int) -> bool:
    """Return True if ``answer`` equals ``target`` and uses ``numbers``, each as often as listed. Never raises.

    Example:
        >>> solves("(3 + 5) * 2 = 16", [2, 3, 5], 16), solves("8 * 2", [2, 3, 5], 16)
        (True, False)
    """
    expression, equals, right = answer.partition("=")
    try:
        if equals and parse(right) != target:
            return False
        formula = parse(expression)
        used = [part for part in parts(formula) if isinstance(part, Fraction)]
        operators = {part[0] for part in parts(formula) if isinstance(part, tuple)}
        return operators <= set("+-*/") and sorted(used) == sorted(numbers) and value(formula) == target
    except Unreadable:
        return False


def make_puzzle(split: str, level: int, index: int) -> Puzzle:
    """Make puzzle number ``index`` of a level; two with the same numbers and target are one.

    Args:
        split: ``"train"`` or ``"test"``.
        level: 1 to 4.
        index: from 0, without end.
    """
    return draw(split, level, index, lambda rng: random_puzzle(rng, level + 2), key_of)


def key_of(puzzle: Puzzle) -> str:
    """Return the text that a puzzle shares with those that list its numbers in another order."""
    return f"countdown {sorted(puzzle.numbers)} {puzzle.target}"


def random_puzzle(rng: random.Random, count: int, largest: int = _LARGEST_NUMBER) -> Puzzle:
    """Draw a puzzle of ``count`` numbers up to ``largest``."""
    while True:
        numbers = tuple(rng.randrange(1, largest + 1) for _ in range(count))
        terms: list[tuple[int, Formula]] = [(number, Fraction(number)) for number in numbers]
        while len(terms) > 1:
            left = terms.pop(rng.randrange(len(terms)))
            right = terms.pop(rng.randrange(len(terms)))
            terms.append(_combined(rng, left, right))
        ((target, solution),) = terms
        # A target that is one of the numbers would look solved before the others are used.
        if target in _TARGETS and target not in numbers:
            return Puzzle(numbers=numbers, target=target, solution=solution)


def _combined(rng: random.Random, left: tuple[int, Formula], right: tuple[int, Formula]) -> tuple[int, Formula]:
    """Combine two values by an operation whose result is a positive integer and not too large."""
    (a, larger), (b, smaller) = (left, right) if left[0] >= right[0] else (right, left)
    results: list[tuple[int, Formula]] = [(a + b, ("+", larger, smaller))]
    if a > b:
        results.append((a - b, ("-", larger, smaller)))
    # A product with 1, or a quotient by it, would leave one number without effect.
    if b > 1 and a * b <= _LARGEST_STEP:
        results.append((a * b, ("*", larger, smaller)))
    if b > 1 and a % b == 0:
        results.append((a // b, ("/", larger, smaller)))
    return results[rng.randrange(len(results))]
