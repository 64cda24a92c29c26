"""Running hidden tests: verdicts, limits, what a submission finds around it, and faults that are nobody's reward."""

import pytest

from agentrl.envs.code import grading
from agentrl.envs.code.asserts import call_of, read_asserts
from agentrl.envs.code.data import MAX_INPUT_CHARS
from agentrl.envs.code.grading import Problem, StreamCase, Verdict, grade
from agentrl.errors import InfrastructureError
from agentrl.sandboxes.host.profiles import profile_of
from agentrl.toolenv.tools.python import close_shared_sandbox, shared_sandbox

from .published import tables

ECHO = Problem(entry_point="echo", cases=tuple(call_of([n], {}, n) for n in range(4)))
PROGRAM = Problem(cases=(StreamCase(stdin="a\n", stdout="a\n"),))


def echo(body: str) -> str:
    return f"def echo(n):\n    {body}\n    return n\n"


TABLES = tables("code_graded")


@pytest.mark.parametrize(("body", "expected"), TABLES["verdicts"])
def test_verdicts(body: str, expected: str) -> None:
    verdicts = tuple(expected.split())
    # Touching a gigabyte takes seconds on a busy machine, and so does output until the host stops it.
    graded = grade(ECHO, echo(body), timeout=0.7 if "timeout" in verdicts else 30)
    assert graded.verdicts == verdicts
    assert graded.passed == verdicts.count("passed") / 4
    assert graded.correct == (set(verdicts) == {"passed"})


TRUTH = Problem(entry_point="find", cases=read_asserts("assert find('a1')\nassert not find('ab')", "find"))


@pytest.mark.parametrize(("body", "verdicts"), TABLES["truths"])
def test_an_assert_without_a_comparison_asks_for_truth(body: str, verdicts: str) -> None:
    assert grade(TRUTH, f"import re\ndef find(text):\n    {body}").verdicts == tuple(verdicts.split())


def test_equality_to_true_is_more_than_truth() -> None:
    exact = Problem(entry_point="echo", cases=read_asserts("assert echo(1) == True\nassert echo(0) is False", "echo"))
    assert grade(exact, "def echo(n): return n == 1").correct
    assert grade(exact, "def echo(n): return n").passed == 0


def test_a_problem_may_allow_more_time() -> None:
    patient = Problem(entry_point="echo", cases=ECHO.cases[:1], timeout=5.0)
    assert grade(patient, echo("for _ in range(10**7): pass"), timeout=0.05).correct


@pytest.mark.parametrize(("code", "verdict"), TABLES["programs"])
def test_programs(code: str, verdict: Verdict) -> None:
    assert grade(PROGRAM, code).verdicts == (verdict,)


@pytest.mark.parametrize("code", TABLES["honest"])
def test_honest_ways_to_write_a_function(code: str) -> None:
    assert grade(ECHO, code).correct


def test_methods_named_arguments_and_setup() -> None:
    cases = (call_of([[1, 2]], {"more": (3, {4})}, [1, 2, 3, {4}]),)
    problem = Problem(entry_point="Solution().add", setup="from typing import List", cases=cases)
    method = "def add(self, items: List[int], more) -> List[int]:\n        return items + list(more)"
    assert grade(problem, f"class Solution:\n    {method}\n").correct


@pytest.mark.parametrize("value", [None, True, -3, 2**64, -(2**200), 0.1, float("inf"), "é\ud800\n", [], (1, [2]), {1}])
def test_values_come_back_as_they_were(value: object) -> None:
    problem = Problem(entry_point="f", cases=(call_of([], {}, value),))
    assert grade(problem, f"inf = float('inf')\ndef f():\n    return {value!r}").correct


def test_arguments_arrive_as_they_were() -> None:
    value = (None, [True, -1.5], {"é\n": {1, 2}}, {3: ("\ud800",)}, 10**30)
    problem = Problem(entry_point="f", cases=(call_of([value], {}, repr(value)),))
    assert grade(problem, "f = repr").correct


def test_the_largest_input_arrives() -> None:
    text = "x" * (MAX_INPUT_CHARS - 1) + "é"
    problem = Problem(cases=(StreamCase(stdin=text, stdout=f"{MAX_INPUT_CHARS} é"),))
    assert grade(problem, "text = input()\nprint(len(text), text[-1])").correct


def test_nothing_of_the_tests_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "EXPECTED-VALUE-7f3a"
    problem = Problem(entry_point="f", cases=(call_of([1], {}, secret), call_of([2], {}, secret)))
    sent: list[str] = []
    run = shared_sandbox().run

    def watched(code: str, **options: object) -> object:
        sent.append(f"{code}{options}")
        return run(code, **options)  # pyright: ignore

    monkeypatch.setattr(shared_sandbox(), "run", watched)
    grade(problem, "def f(n): return n")
    assert secret not in "".join(sent)
    assert sorted(("((1,)" in text, "((2,)" in text) for text in sent) == [(False, True), (True, False)]


def test_what_is_sent_along_asks_for_no_large_interpreter() -> None:
    assert profile_of(grading._inside()) == "plain"


def test_a_broken_sandbox_is_never_a_grade() -> None:
    shared_sandbox().close()
    with pytest.raises(InfrastructureError, match="sandbox failed"):
        grade(ECHO, echo("pass"))
    close_shared_sandbox()
    assert grade(ECHO, echo("pass")).correct
