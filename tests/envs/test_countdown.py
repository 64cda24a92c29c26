"""Countdown-v0: puzzles that have a solution, every solution found right, and nothing else."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.envs.generated.countdown import key_of, make_puzzle, solves
from agentrl.grading.formulas import parts, write


def reachable(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    """Everything that all of ``numbers`` can come to: each pair of values becomes one, in every way."""
    if len(numbers) == 1:
        return {numbers[0]}
    found: set[Fraction] = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = tuple(number for place, number in enumerate(numbers) if place not in (i, j))
        a, b = numbers[i], numbers[j]
        for value in (a + b, a - b, a * b, *([a / b] if b else [])):
            found |= reachable((*rest, value))
    return found


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


@pytest.mark.parametrize(
    "answer",
    [
        *("(3 + 5) * 2", "2*(5+3)", "(3+5)*2=16", r"(3 + 5) \times 2 = 16", r"2 \cdot (3+5)", "2(3+5)", "$(3+5)*2$"),
        *(r"\left(3+5\right) \times 2", "((((3)))+5)*2", "(3 + 5) \N{MULTIPLICATION SIGN} 2", r"2\left(3+5\right)"),
    ],
)
def test_every_solution_is_right(answer: str) -> None:
    assert solves(answer, [2, 3, 5], 16)
    assert not solves(answer, [2, 3, 5], 17)
    assert not solves(answer, [2, 3, 5, 1], 16)
    assert not solves(answer, [2, 3, 4], 16)


@pytest.mark.parametrize(
    ("answer", "numbers", "target"),
    [
        *(
            (wrong, [6, 4], 24)
            for wrong in ("6*4.0001", "6*4=25", "6*4=24=24", "6*4 or 3*8", "6*4, 3*8", "6*4 #", "6*_4")
        ),
        *(
            ("3*7+3*1", [1, 3, 7], 24),
            ("21+3", [2, 1, 3], 24),
            ("4!", [4], 24),
            ("24", [4, 6], 24),
            ("49/2", [49, 2], 24),
        ),
        *(("5^2-1", [5, 2, 1], 24), ("-4+28", [4, 28], 24), ("28+-4", [4, 28], 24), ("sqrt(576)", [576], 24)),
        *(("25=6*4", [6, 4], 25), ("6/(4-4)", [6, 4, 4], 24), ("6**4", [6, 4], 1296), (r"\sqrt[4]{6}", [4, 6], 24)),
    ],
)
def test_what_does_not_solve(answer: str, numbers: list[int], target: int) -> None:
    assert not solves(answer, numbers, target)


def test_fractions_on_the_way_are_exact() -> None:
    assert solves("8/(3-8/3)", [3, 3, 8, 8], 24)
    assert solves("(1/3+1/7)*21", [1, 1, 3, 7, 21], 10)
    assert solves("1-2+25", [1, 2, 25], 24)


@given(st.lists(st.integers(1, 99), min_size=2, max_size=4), st.data())
def test_numbers_count_as_often_as_they_are_listed(numbers: list[int], data: st.DataObject) -> None:
    total = sum(numbers)
    order = data.draw(st.permutations(numbers))
    assert solves("+".join(map(str, order)), numbers, total)
    assert not solves("+".join(map(str, [*order, order[0]])), numbers, total + order[0])
    assert not solves("+".join(map(str, order[1:])), numbers, total - order[0])
