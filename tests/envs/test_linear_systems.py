"""LinearSystems-v0: systems whose solutions sympy agrees with, every way to write them, and nothing else."""

import itertools
from fractions import Fraction

import pytest
import sympy

from agentrl.envs.generated.linear_systems import System, key_of, make_system, solves, write_system

from .published import tables

ONE = System(rows=((2, 3), (1, -1)), right=(4, -3), kind="one", solution=(Fraction(-1), Fraction(2)))
HALVES = System(rows=((2, 0), (0, 4)), right=(-1, 3), kind="one", solution=(Fraction(-1, 2), Fraction(3, 4)))
NONE = System(rows=((1, 1), (2, 2)), right=(1, 3), kind="none", solution=())
MANY = System(rows=((1, 1), (2, 2)), right=(1, 2), kind="many", solution=())


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_sympy_finds_the_same_solutions(level: int) -> None:
    kinds: set[str] = set()
    for index in range(25):
        system = make_system("train", level, index)
        unknowns = sympy.symbols(" ".join(system.unknowns))
        solutions = sympy.linsolve((sympy.Matrix(system.rows), sympy.Matrix(system.right)), *unknowns)
        expected = {"one": "one", "none": "none"}.get(system.kind, "many")
        if solutions is sympy.S.EmptySet:
            assert expected == "none"
        else:
            (values,) = solutions
            assert (expected == "one") is not any(value.free_symbols for value in values)
            if expected == "one":
                assert [Fraction(int(value.p), int(value.q)) for value in values] == list(system.solution)
        kinds.add(system.kind)
    assert kinds == ({"one", "none", "many"} if level == 5 else {"one"})


def test_levels_differ_in_unknowns_and_fractions() -> None:
    sizes = {level: {len(make_system("train", level, i).rows) for i in range(60)} for level in (1, 2, 3, 4, 5)}
    assert sizes == {1: {2}, 2: {3}, 3: {2, 3}, 4: {4, 5}, 5: {2, 3}}
    for level, index in itertools.product((1, 2, 3, 4), range(60)):
        solution = make_system("train", level, index).solution
        assert any(number.denominator > 1 for number in solution) is (level > 2)


def test_text_of_a_system() -> None:
    system = System(rows=((-1, 0, 2), (1, -12, 1), (0, 0, -1)), right=(3, 0, -5), kind="one", solution=())
    assert write_system(system) == "-x + 2z = 3\nx - 12y + z = 0\n-z = -5"


def test_equations_in_another_order_are_the_same_problem() -> None:
    other = System(rows=ONE.rows[::-1], right=ONE.right[::-1], kind="one", solution=ONE.solution)
    assert key_of(other) == key_of(ONE) != key_of(HALVES)


SYSTEMS = {"one": ONE, "halves": HALVES, "none": NONE, "many": MANY}
TABLES: dict[str, dict[str, list[str]]] = tables("linear_systems")


@pytest.mark.parametrize(("name", "answer"), [(name, text) for name in SYSTEMS for text in TABLES["right"][name]])
def test_what_solves(name: str, answer: str) -> None:
    assert [other for other, system in SYSTEMS.items() if solves(answer, system)] == [name]


@pytest.mark.parametrize(("name", "answer"), [(name, text) for name, rows in TABLES["wrong"].items() for text in rows])
def test_what_does_not_solve(name: str, answer: str) -> None:
    assert not solves(answer, SYSTEMS[name])
