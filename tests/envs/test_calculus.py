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
from agentrl.envs.generated.calculus_problems import CalculusProblem, Kind, make_problem
from agentrl.grading.formulas import FUNCTIONS, MAX_CHARS, parse, write
from agentrl.grading.values import same_number, value

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
        place = problem.prompt.split(r"\to ")[1].split("}")[0]
        with mpmath.workdps(80):
            near = mpmath.mpf(10) ** 12 if place == r"\infty" else int(place) + mpmath.mpf(10) ** -12
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


EQUAL: dict[tuple[str, Kind], tuple[str, ...]] = {
    ("2 x + 3", "expression"): (
        *("2*x + 3", "3+2x", "f'(x) = 2x+3", r"f^{\prime}(x) = 2x+3", "y' = 2x + 3", "(4x^2+12x+9)/(2x+3)"),
    ),
    (r"\sin{\left(2 x \right)}", "expression"): (r"2\sin x\cos x",),
    (r"\frac{1}{\sqrt{x}}", "expression"): (r"x^{-1/2}", r"\frac{\sqrt{x}}{x}"),
    ("2^{x}", "expression"): (r"e^{x\ln 2}",),
    ("x e^{x} + e^{x}", "expression"): (r"e^x(x+1)",),
    ("0.5", "number"): (r"\frac{1}{2}",),
    (r"\log{\left(4 \right)}", "number"): (r"2\ln 2",),
    (r"\frac{1}{\sqrt{2}}", "number"): (r"\frac{\sqrt{2}}{2}",),
    (r"\frac{e-1}{e}", "number"): (r"1 - e^{-1}",),
    ("-1, 2", "points"): ("2, -1", "x = -1, x = 2", r"x = -1 \text{ and } x = 2", r"\{-1, 2\}"),
    (r"\frac{1}{\sqrt{e}}", "points"): (r"x = e^{-1/2}",),
}
LOG_2 = "0.69314718055994530941723212145817656807550013436026"
DIFFERENT: dict[tuple[str, Kind], tuple[str, ...]] = {
    ("2 x + 3", "expression"): (
        *("2x + 3 + C", "2x", "2x + 3.000001", "2x + 3 + 10^{-30}", "2y + 3", "2x + 3, 2x + 4", "2x + 3 = 2x + 4"),
        *(r"\frac{d}{dx}(x^2+3x)", "diff(x**2 + 3*x, x)", "5"),
    ),
    (r"\log{\left(x \right)}", "expression"): (r"\log(-x)",),
    ("e^{x}", "expression"): ("(8(e^{x+h}-e^{x-h})-e^{x+2h}+e^{x-2h})/(12h)".replace("h", r"(\pi/10^{12})"),),
    (r"\log{\left(2 \right)}", "number"): (LOG_2, rf"{LOG_2}+\pi-\pi"),
    (r"\pi", "number"): ("22/7",),
    ("1", "number"): ("x", "1, 2"),
    ("0.5", "number"): (r"\int_0^1 x dx",),
    ("0", "number"): (r"\lim_{x \to 0} x", r"\infty"),
    ("-1, 2", "points"): ("-1", "-1, 2, 3", "-1, -1", "-1, 2, 2", "", ",".join(map(str, range(-50, 50)))),
}
"""Answers to be found equal, and others to be found different, by what is expected and its kind."""


@pytest.mark.parametrize(
    ("answer", "expected", "kind"), [(one, *key) for key, answers in EQUAL.items() for one in answers]
)
def test_what_is_equal(answer: str, expected: str, kind: Kind) -> None:
    assert equal(answer, expected, kind)
    assert equal(expected, expected, kind)


@pytest.mark.parametrize(
    ("answer", "expected", "kind"), [(one, *key) for key, answers in DIFFERENT.items() for one in answers]
)
def test_what_is_not_equal(answer: str, expected: str, kind: Kind) -> None:
    assert not equal(answer, expected, kind)


def test_every_answer_differs_from_the_next() -> None:
    for level in (1, 2, 3, 4, 5):
        problems = [make_problem("train", level, index) for index in range(20)]
        for one, other in itertools.pairwise(problems):
            assert equal(one.answer, other.answer, one.kind) is (one.answer == other.answer)


@pytest.mark.parametrize("rewrite", [sympy.factor, sympy.expand, sympy.together, sympy.powsimp])
def test_answers_as_sympy_prints_them_are_right(rewrite: Callable[[Any], Any]) -> None:
    for level, index in itertools.product((1, 2, 3, 4, 5), range(8)):
        problem = make_problem("test", level, index)
        rewritten = [rewrite(of_sympy(part)) for part in problem.answer.split(", ")]
        for text in (", ".join(map(str, rewritten)).replace("E", "e"), ", ".join(map(sympy.latex, rewritten))):
            assert len(text) > MAX_CHARS or equal(text, problem.answer, problem.kind), text


def put(function: str, place: str) -> str:
    """``function`` with ``place`` for its x."""
    return re.sub(r"(?<![A-Za-z])x", lambda _: f"({place})", function)


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
        place, function = problem.prompt.removesuffix(r"\right)$.").split(r"\to ")[1].split(r"} \left(", 1)
        near = [f"1/({step})"] if place == r"\infty" else [f"{place}+{step}", f"{place}-{step}"]
        values = [f"({put(function, each)})" for each in near]
        for value_ in (values[0], f"({'+'.join(values)})/{len(values)}"):
            assert not equal(value_, problem.answer, problem.kind), value_


def test_a_value_of_ours_is_sympys() -> None:
    text = r"\frac{\sin^2(3)\sqrt{5}}{e^{2}+\ln 7}"
    assert abs(float(value(parse(text, names=["e"], functions=FUNCTIONS))) - float(of_sympy(text))) < 1e-14
    assert same_number(value(parse("e", names=["e"])), value(parse("e^{2/2}", names=["e"])))
