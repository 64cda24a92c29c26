r"""``agentrl/LinearSystems-v0``: systems of linear equations, the values of all unknowns in one ``\boxed{}``."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, cast

import numpy

from agentrl.envs.generated.base import GeneratedEnv, draw
from agentrl.grading.formulas import Formula, Unreadable, parse
from agentrl.grading.values import value
from agentrl.types import Task

SolutionCount = Literal["one", "none", "many"]
UNKNOWNS = "xyzuv"
WORDS: Mapping[SolutionCount, str] = {"none": "no solution", "many": "infinitely many"}
"""Answers to systems that do not have exactly one solution."""
_MAX_CHARS = 500
_NOISE = re.compile(r"\\(?:text|mathrm|left|right|quad|qquad|[,;:! ])|[{}()$]")
_SEPARATOR = re.compile(r"[,;]|\band\b|\\\\")
_WORDED = {
    **dict.fromkeys(("no solution", "no solutions"), "none"),
    **dict.fromkeys(("infinitely many", "infinitely many solutions"), "many"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """``rows · unknowns = right``, with as many equations as unknowns."""

    rows: tuple[tuple[int, ...], ...]
    """The coefficients, one row per equation [n, n]."""
    right: tuple[int, ...]
    """The right-hand sides [n]."""
    kind: SolutionCount
    """The number of solutions."""
    solution: tuple[Fraction, ...]
    """The only solution; empty where there is none or more than one [n or 0]."""

    @property
    def unknowns(self) -> str:
        """The letters, in their order."""
        return UNKNOWNS[: len(self.rows)]


class LinearSystems(GeneratedEnv):
    r"""Systems of as many equations as unknowns, in five levels.

    1. Two unknowns, whole numbers.
    2. Three unknowns, whole numbers.
    3. Two or three unknowns, fractions.
    4. Four or five unknowns, fractions.
    5. Two or three unknowns; half of the systems have one solution, the others none or infinitely many.

    The reward is 1 where the last ``\boxed{}`` has the exact value of every unknown. ``x=1, y=-2/3`` may be in any
    order, ``(1, -2/3)`` must be in the order x, y, z, u, v. Values must be written out: calculations and rounded
    decimals are wrong. On level 5 ``no solution`` and ``infinitely many`` are answers too; either alone is right a
    quarter of the time.

    Arguments and errors are those of :class:`agentrl.envs.generated.base.GeneratedEnv`.
    """

    levels: ClassVar[Sequence[int]] = (1, 2, 3, 4, 5)
    instructions = (
        r"Solve the system. Answer in \boxed{} with exact values, such as x=1/2, y=3, "
        "or with the words: no solution, infinitely many."
    )

    def make_task(self, split: str, level: int, index: int) -> Task:
        """Make a system, one equation per line."""
        system = make_system(split, level, index)
        answer = WORDS.get(system.kind, "")
        if system.kind == "one":
            answer = ", ".join(f"{name}={value}" for name, value in zip(system.unknowns, system.solution, strict=True))
        return Task(id="", prompt=write_system(system), answer=answer, data={"system": system})

    def is_right(self, task: Task, answer: str) -> bool:
        """Return True if ``answer`` solves the system."""
        return solves(answer, system_of(task))

    def working(self, task: Task) -> Sequence[str]:
        """Check the values, where the system has one solution."""
        system = system_of(task)
        if system.kind != "one":
            return ()
        values = ", ".join(f"Fraction({value.numerator}, {value.denominator})" for value in system.solution)
        names = ", ".join(system.unknowns)
        sides = ", ".join(_sum(row, system.unknowns, "*") for row in system.rows)
        return [f"from fractions import Fraction\n{names} = {values}\nprint(({sides}) == {system.right})"]


def system_of(task: Task) -> System:
    """Return the system that ``task`` was made of."""
    return cast(System, task.data["system"])


def solves(answer: str, system: System) -> bool:
    r"""Return True if ``answer`` is the solution of ``system``, by inserting its values. Never raises.

    Example:
        >>> twice = System(rows=((1, 1), (1, -1)), right=(3, 1), kind="one", solution=(Fraction(2), Fraction(1)))
        >>> solves("y = 1, x = 2", twice), solves(r"\left(2, 1\right)", twice), solves("(1, 2)", twice)
        (True, True, False)
    """
    if len(answer) > _MAX_CHARS:
        return False
    if system.kind != "one":
        return _WORDED.get(" ".join(_NOISE.sub(" ", answer).lower().rstrip(". ").split())) == system.kind
    values = _values(answer, system.unknowns)
    return values is not None and all(
        sum(factor * number for factor, number in zip(row, values, strict=True)) == right
        for row, right in zip(system.rows, system.right, strict=True)
    )


def _values(answer: str, unknowns: str) -> list[Fraction] | None:
    """Parse the value of each unknown, in order; None where one is missing, repeated or no literal number."""
    pieces = _SEPARATOR.split(_unwrapped(answer))
    if len(pieces) != len(unknowns):
        return None
    values: dict[str, Fraction] = {}
    for unknown, piece in zip(unknowns, pieces, strict=True):
        name, equals, text = piece.partition("=")
        number = _number(text if equals else name)
        if number is None:
            return None
        values[name.strip() if equals else unknown] = number
    return [values[name] for name in unknowns] if set(values) == set(unknowns) else None


def _unwrapped(answer: str) -> str:
    """Remove spacing and the parentheses of a tuple."""
    text = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}|\\(?:left|right|quad|qquad|[,;:! ])(?![A-Za-z])", r" \1 ", answer)
    text = text.strip().strip("$").strip()
    return text[1:-1] if text[:1] == "(" and text[-1:] == ")" and text.count("(") == 1 else text


def _number(text: str) -> Fraction | None:
    try:
        return _written_out(parse(text))
    except Unreadable:
        return None


def _written_out(formula: Formula) -> Fraction | None:
    """Return the literal number that ``formula`` is, perhaps signed or a fraction; None for any other calculation."""
    match formula:
        case Fraction():
            return formula
        case ("neg", inner):
            number = _written_out(inner)
            return None if number is None else -number
        case ("/", Fraction() | ("neg", Fraction()), Fraction() | ("neg", Fraction())):
            return value(formula)
        case _:
            return None


def make_system(split: str, level: int, index: int) -> System:
    """Make system number ``index`` of a level, the same one on every machine.

    Args:
        split: ``"train"`` or ``"test"``.
        level: 1 to 5.
        index: from 0, without end.
    """
    return draw(split, level, index, lambda rng: _drawn(rng, level), key_of)


def key_of(system: System) -> str:
    """Return the text that a system shares with those that list its equations in another order."""
    return f"linear {sorted(zip(system.rows, system.right, strict=True))}"


def write_system(system: System) -> str:
    """Write ``system`` as text, an equation per line."""
    lines = (
        f"{_sum(row, system.unknowns, '')} = {right}" for row, right in zip(system.rows, system.right, strict=True)
    )
    return "\n".join(lines)


def _sum(row: Sequence[int], unknowns: str, times: str) -> str:
    text = ""
    for factor, unknown in zip(row, unknowns, strict=True):
        if factor:
            sign = ("-" if factor < 0 else "") if not text else (" - " if factor < 0 else " + ")
            text += sign + (unknown if abs(factor) == 1 else f"{abs(factor)}{times}{unknown}")
    return text


def _drawn(rng: random.Random, level: int) -> System:
    size = {1: (2, 2), 2: (3, 3), 3: (2, 3), 4: (4, 5), 5: (2, 3)}[level]
    count = rng.randint(*size)
    if level == 5 and rng.random() < 0.5:
        return _singular(rng, count)
    return _regular(rng, count, 6 if level in (3, 4) else 1)


def _rows(rng: random.Random, count: int, columns: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(rng.randint(-9, 9) for _ in range(columns)) for _ in range(count))


def _regular(rng: random.Random, count: int, denominators: int) -> System:
    """Draw a system with one solution, whose denominators are at most ``denominators``."""
    rows = _rows(rng, count, count)
    # Rounded, the determinant of so few and so small integers is exact.
    while not round(numpy.linalg.det(rows)):
        rows = _rows(rng, count, count)
    solution = [Fraction(rng.randint(-12, 12), rng.randint(1, denominators)) for _ in range(count)]
    # A level of fractions must have one.
    if denominators > 1 and all(number.denominator == 1 for number in solution):
        solution[0] += Fraction(1, 2)
    right = [sum((a * b for a, b in zip(row, solution, strict=True)), Fraction(0)) for row in rows]
    return System(
        # Each equation is multiplied by its right side's denominator, so that all its numbers are integers.
        rows=tuple(tuple(a * side.denominator for a in row) for row, side in zip(rows, right, strict=True)),
        right=tuple(side.numerator for side in right),
        kind="one",
        solution=tuple(solution),
    )


def _singular(rng: random.Random, count: int) -> System:
    """Draw a system with an equation whose left side combines the others'; its right side fits theirs or not."""
    rows, right = [(0,) * count], list[int]()
    # An equation 0 = 0 would be no equation, and 0 = 3 would show the answer.
    while not all(any(row) for row in rows):
        rows = list(_rows(rng, count - 1, count))
        right = [rng.randint(-12, 12) for _ in rows]
        factors = [rng.choice((-3, -2, 2, 3)) for _ in rows]
        rows.append(
            tuple(sum(f * row[column] for f, row in zip(factors, rows, strict=True)) for column in range(count))
        )
        right.append(sum(f * side for f, side in zip(factors, right, strict=True)))
    kind: SolutionCount = "many" if rng.random() < 0.5 else "none"
    if kind == "none":
        right[-1] += rng.choice((-1, 1)) * rng.randint(1, 9)
    # Always last, the dependent equation would show the answer.
    order = rng.sample(range(count), count)
    return System(
        rows=tuple(rows[index] for index in order), right=tuple(right[index] for index in order), kind=kind, solution=()
    )
