"""Calculus-v0: answers that sympy agrees with, every form of them found right, and nothing else."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import sympy
from sympy.parsing.sympy_parser import implicit_multiplication_application, parse_expr, standard_transformations

from agentrl.envs.generated.calculus import equal
from agentrl.envs.generated.calculus_problems import AnswerKind, CalculusProblem, make_problem
from agentrl.grading.formulas import FUNCTIONS, MAX_CHARS, parse, write

from .published import tables

X = sympy.Symbol("x", positive=True)
make_problem = functools.cache(make_problem)


def of_sympy(latex: str) -> Any:
    """Our reading of LaTeX, given to sympy: what follows is its own work."""
    python = write(parse(latex, names=("x", "e", "pi"), functions=FUNCTIONS))
    rules = (*standard_transformations, implicit_multiplication_application)
    return parse_expr(python, local_dict={"x": X, "e": sympy.E, "pi": sympy.pi}, transformations=rules)


def asked(problem: CalculusProblem, before: str, after: str) -> Any:
    return of_sympy(problem.prompt.split(before)[1].split(after)[0])


def close(left: Any, right: Any) -> bool:
    return bool(abs(sympy.N(left - right, 30)) < 1e-20)


@pytest.mark.parametrize("level", [1, 2])
def test_sympy_differentiates_alike(level: int) -> None:
    for index in range(12):
        problem = make_problem("train", level, index)
        slope = asked(problem, "$f(x) = ", "$").diff(X)
        assert close(slope.subs(X, sympy.Rational(17, 13)), of_sympy(problem.answer).subs(X, sympy.Rational(17, 13)))


@pytest.mark.slow
def test_quadrature_finds_the_same_integrals() -> None:
    for index in range(12):
        problem = make_problem("train", 3, index)
        low, high = (of_sympy(bound) for bound in problem.prompt.split(r"\int_{")[1].split(r"} \left(")[0].split("}^{"))
        integral = sympy.Integral(asked(problem, r" \left(", r"\right) dx"), (X, low, high))
        assert abs(integral.evalf(20) - of_sympy(problem.answer)) < 1e-12


def test_limits_are_near_the_values_near_by() -> None:
    for index in range(40):
        problem = make_problem("train", 4, index)
        function = asked(problem, r"} \left(", r"\right)$")
        target = problem.prompt.split(r"\to ")[1].split("}")[0]
        with mpmath.workdps(80):
            near = mpmath.mpf(10) ** 12 if target == r"\infty" else int(target) + mpmath.mpf(10) ** -12
            ratio = sympy.lambdify(X, function, "mpmath")(near) / mpmath.mpf(sympy.N(of_sympy(problem.answer), 30))
        assert abs(ratio - 1) < 1e-6, problem


def test_points_are_all_the_roots_of_the_derivative() -> None:
    x = sympy.Symbol("x", real=True)
    for index in range(40):
        problem = make_problem("train", 5, index)
        slope = asked(problem, "$f(x) = ", "$").diff(X).subs(X, x)
        points = [of_sympy(point) for point in problem.answer.split(", ")]
        assert all(close(slope.subs(x, point), 0) for point in points)
        assert list(points) == sorted(set(points))
        if slope.is_polynomial(x):
            assert set(sympy.real_roots(slope)) == set(points)


def test_kinds_and_variety() -> None:
    for level, kind in {1: "expression", 2: "expression", 3: "number", 4: "number", 5: "points"}.items():
        problems = [make_problem("train", level, index) for index in range(40)]
        assert {problem.kind for problem in problems} == {kind}
        assert len({problem.prompt for problem in problems}) > 33
        assert len({problem.answer for problem in problems}) > 26


TABLES: dict[str, dict[str, dict[str, list[str]]]] = tables("calculus")
"""Answers to be found equal, and others to be found different, by the kind and by what is expected."""
JUDGED = [
    (answer, expected, kind, verdict == "equal")
    for verdict, kinds in TABLES.items()
    for kind, rows in kinds.items()
    for expected, answers in rows.items()
    for answer in answers
]


@pytest.mark.parametrize(("answer", "expected", "kind", "right"), JUDGED)
def test_what_is_equal(answer: str, expected: str, kind: AnswerKind, right: bool) -> None:
    assert equal(answer, expected, kind) is right
    assert equal(expected, expected, kind)


@pytest.mark.parametrize("rewrite", [sympy.factor, sympy.expand, sympy.together, sympy.powsimp])
def test_answers_as_sympy_prints_them_are_right(rewrite: Callable[[Any], Any]) -> None:
    for level, index in itertools.product((1, 2, 3, 4, 5), range(8)):
        problem = make_problem("test", level, index)
        rewritten = [rewrite(of_sympy(part)) for part in problem.answer.split(", ")]
        for text in (", ".join(map(str, rewritten)).replace("E", "e"), ", ".join(map(sympy.latex, rewritten))):
            assert len(text) > MAX_CHARS or equal(text, problem.answer, problem.kind), text


def put(function: str, target: str) -> str:
    """``function`` with ``target`` for its x."""
    return re.sub(r"(?<![A-Za-z])x", lambda _: f"({target})", function)


@pytest.mark.parametrize("step", [r"10^{-24}\pi", "10^{-30}", r"10^{-200}\pi", "e^{-60}", r"x\pi/10^{24}", "e^{-99x}"])
def test_no_difference_quotient_is_a_derivative(step: str) -> None:
    for level, index in itertools.product((1, 2), range(25)):
        problem = make_problem("train", level, index)
        function = problem.prompt.removeprefix("Differentiate $f(x) = ").removesuffix("$.")
        quotient = f"({put(function, f'x+{step}')}-({put(function, f'x-{step}')}))/(2({step}))"
        assert not equal(quotient, problem.answer, problem.kind), quotient


@pytest.mark.parametrize("step", [r"10^{-24}\pi", r"10^{-26}e", "10^{-60}", r"10^{-300}\pi"])
def test_no_value_near_by_is_a_limit(step: str) -> None:
    for index in range(40):
        problem = make_problem("train", 4, index)
        target, function = problem.prompt.removesuffix(r"\right)$.").split(r"\to ")[1].split(r"} \left(", 1)
        near = [f"1/({step})"] if target == r"\infty" else [f"{target}+{step}", f"{target}-{step}"]
        values = [f"({put(function, each)})" for each in near]
        for value_ in (values[0], f"({'+'.join(values)})/{len(values)}"):
            assert not equal(value_, problem.answer, problem.kind), value_
