"""Programs that want the reward without solving the task: none passes a single hidden test."""

import re
from pathlib import Path

import pytest

from agentrl.envs.code.asserts import call_of
from agentrl.envs.code.grading import MAX_CODE_CHARS, Problem, StreamCase, grade

FUNCTION = Problem(
    entry_point="double",
    cases=(call_of([1234567], {}, 2469134), call_of([-1700], {}, -3400), call_of([77], {}, 154)),
    solution="def double(n):\n    return 2 * n\n",
)
PROGRAM = Problem(
    cases=tuple(StreamCase(stdin=f"{n}\n", stdout=f"{2 * n}\n") for n in (1234567, -1700, 77)),
    solution="print(2 * int(input()))\n",
)


def read_cheats(section: str) -> dict[str, str]:
    text = Path(__file__).with_name("code_cheats.md").read_text(encoding="utf-8")
    part = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert part is not None
    return dict(re.findall(r"^### ([^\n]*)\n\n```python\n(.*?)^```$", part.group(1), re.MULTILINE | re.DOTALL))


FUNCTIONS, PROGRAMS = read_cheats("Functions"), read_cheats("Programs")
NO_CODE = {
    **{"is empty": "", "is no text": "\x00\ud800\u202e", "does not end": '"""', "is too deep": "(" * 5000},
    "is too long": "double = lambda n: 2 * n\nprint(2 * int(input()))\n" + "#" * MAX_CODE_CHARS,
}


def test_there_are_cheats() -> None:
    assert len(FUNCTIONS) >= 38
    assert len(PROGRAMS) >= 14


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        *(pytest.param(FUNCTION, code, id=f"function that {name}") for name, code in (FUNCTIONS | NO_CODE).items()),
        *(pytest.param(PROGRAM, code, id=f"program that {name}") for name, code in (PROGRAMS | NO_CODE).items()),
    ],
)
def test_no_cheat_passes(problem: Problem, code: str) -> None:
    graded = grade(problem, code, timeout=1.0)
    assert "passed" not in graded.verdicts, graded
    assert len(graded.verdicts) == 3
    assert not graded.correct


@pytest.mark.parametrize("problem", [FUNCTION, PROGRAM])
def test_an_honest_submission_passes_the_same_tests(problem: Problem) -> None:
    assert grade(problem, problem.solution).verdicts == ("passed",) * 3


def test_an_answer_from_memory_passes_its_own_test_only() -> None:
    graded = grade(FUNCTION, "def double(n): return {-1700: -3400}.get(n)")
    assert graded.verdicts == ("wrong", "passed", "wrong")
    assert graded.passed == pytest.approx(1 / 3)
    assert not graded.correct
