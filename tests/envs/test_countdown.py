"""Countdown-v0: puzzles that have a solution, every solution found right, and nothing else."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.envs.generated.countdown import key_of, make_puzzle, solves
from agentrl.grading.formulas import parts, write

from .published import tables


def reachable(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    """Everything that all of ``numbers`` can come to: each pair of values becomes one, in every way."""
    if len(numbers) == 1:
        return {numbers[0]}
    values: set[Fraction] = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = tuple(number for index, number in enumerate(numbers) if index not in (i, j))
        a, b = numbers[i], numbers[j]
        for value in (a + b, a - b, a * b, *([a / b] if b else [])):
            values |= reachable((*rest, value))
    return values


@pytest.mark.parametrize("level", [1, 2])
def test_a_search_of_everything_finds_a_solution_too(level: int) -> None:
    for index in range(15):
        puzzle = make_puzzle("train", level, index)
        assert puzzle.target in reachable(tuple(map(Fraction, puzzle.numbers)))


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_puzzles_have_the_level_s_numbers_and_a_solution(level: int) -> None:
    puzzles = [make_puzzle("train", level, index) for index in range(300)]
    assert puzzles == [make_puzzle("train", level, index) for index in range(300)]
    assert len({key_of(puzzle) for puzzle in puzzles}) == 300
    for puzzle in puzzles:
        assert len(puzzle.numbers) == level + 2
        assert 10 <= puzzle.target < 1000 and puzzle.target not in puzzle.numbers
        assert eval(write(puzzle.solution).replace("/", "//")) == puzzle.target
        assert sorted(part for part in parts(puzzle.solution) if isinstance(part, Fraction)) == sorted(puzzle.numbers)


TABLES = tables("countdown")


@pytest.mark.parametrize("answer", TABLES["right"])
def test_every_solution_is_right(answer: str) -> None:
    assert solves(answer, [2, 3, 5], 16)
    assert not solves(answer, [2, 3, 5], 17)
    assert not solves(answer, [2, 3, 5, 1], 16)
    assert not solves(answer, [2, 3, 4], 16)


@pytest.mark.parametrize(("answer", "numbers", "target"), TABLES["wrong"])
def test_what_does_not_solve(answer: str, numbers: list[int], target: int) -> None:
    assert not solves(answer, numbers, target)


@pytest.mark.parametrize(("answer", "numbers", "target"), TABLES["fractions"])
def test_fractions_on_the_way_are_exact(answer: str, numbers: list[int], target: int) -> None:
    assert solves(answer, numbers, target)


@given(st.lists(st.integers(1, 99), min_size=2, max_size=4), st.data())
def test_numbers_count_as_often_as_they_are_listed(numbers: list[int], data: st.DataObject) -> None:
    total = sum(numbers)
    order = data.draw(st.permutations(numbers))
    assert solves("+".join(map(str, order)), numbers, total)
    assert not solves("+".join(map(str, [*order, order[0]])), numbers, total + order[0])
    assert not solves("+".join(map(str, order[1:])), numbers, total - order[0])
