"""Running hidden tests: verdicts, limits, what a submission finds around it, and faults that are nobody's reward."""

import pytest

from agentrl.envs.code import grading
from agentrl.envs.code.asserts import call_of, read_asserts
from agentrl.envs.code.data import MAX_INPUT_CHARS
from agentrl.envs.code.grading import Problem, Stream, Verdict, grade
from agentrl.errors import InfrastructureError
from agentrl.sandboxes.host.profiles import profile_of
from agentrl.toolenv.tools.python import close_shared_sandbox, shared_sandbox

ECHO = Problem(entry_point="echo", cases=tuple(call_of([n], {}, n) for n in range(4)))
PROGRAM = Problem(cases=(Stream(stdin="a\n", stdout="a\n"),))


def echo(body: str) -> str:
    return f"def echo(n):\n    {body}\n    return n\n"


@pytest.mark.parametrize(
    ("body", "verdicts"),
    [
        ("pass", ("passed",) * 4),
        ("n = n or 7", ("wrong", "passed", "passed", "passed")),
        ("1 / n", ("error", "passed", "passed", "passed")),
        ("if n == 1: raise SystemExit", ("passed", "exit", "passed", "passed")),
        ("while n == 1: pass", ("passed", "timeout", "skipped", "skipped")),
        ("import time; time.sleep(60 * (n == 2))", ("passed", "passed", "timeout", "skipped")),
        ("if n == 0: x = [bytearray(2**27) for _ in range(9)]", ("memory", "skipped", "skipped", "skipped")),
        ("while n == 3: print('x' * 10000)", ("passed", "passed", "passed", "output_limit")),
    ],
)
def test_verdicts(body: str, verdicts: tuple[Verdict, ...]) -> None:
    # Output is stopped by the host, which needs time for that.
    graded = grade(ECHO, echo(body), timeout=30 if "output_limit" in verdicts else 0.7)
    assert graded.verdicts == verdicts
    assert graded.passed == verdicts.count("passed") / 4
    assert graded.correct == (set(verdicts) == {"passed"})


TRUTH = Problem(entry_point="find", cases=read_asserts("assert find('a1')\nassert not find('ab')", "find"))


@pytest.mark.parametrize(
    ("body", "verdicts"),
    [
        *(("return re.search('[0-9]', text)", ("passed", "passed")), ("return '1' in text", ("passed", "passed"))),
        *(("return [1] * ('1' in text)", ("passed", "passed")), ("return 7", ("passed", "wrong"))),
        *(("return None", ("wrong", "passed")), ("return 'False'", ("passed", "wrong"))),
        ("return not re.search('[0-9]', text)", ("wrong", "wrong")),
        ("return type('X', (), {'__bool__': lambda self: 1 / 0})()", ("error", "error")),
    ],
)
def test_an_assert_without_a_comparison_asks_for_truth(body: str, verdicts: tuple[Verdict, ...]) -> None:
    assert grade(TRUTH, f"import re\ndef find(text):\n    {body}").verdicts == verdicts


def test_equality_to_true_is_more_than_truth() -> None:
    exact = Problem(entry_point="echo", cases=read_asserts("assert echo(1) == True\nassert echo(0) is False", "echo"))
    assert grade(exact, "def echo(n): return n == 1").correct
    assert grade(exact, "def echo(n): return n").passed == 0


def test_the_first_failure_can_end_it() -> None:
    graded = grade(ECHO, echo("n += n == 1"), stop_at_failure=True)
    assert graded.verdicts == ("passed", "wrong", "skipped", "skipped")


def test_a_problem_may_allow_more_time() -> None:
    patient = Problem(entry_point="echo", cases=ECHO.cases[:1], timeout=5.0)
    assert grade(patient, echo("for _ in range(10**7): pass"), timeout=0.05).correct


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        *(("print(input())", "passed"), ("import sys\nsys.stdout.write(sys.stdin.read())\nsys.exit()", "passed")),
        *(("import os\nos.write(1, b'a')\nos._exit(0)", "passed"), ("print('a')\nraise SystemExit(2)", "exit")),
        ("if __name__ == '__main__':\n    print('a   ')\n    print()", "passed"),
        *(("print(input().upper())", "wrong"), ("from __future__ import annotations\nprint('a')", "passed")),
        *(("input()\ninput()", "error"), ("print('a')\nimport sys\nprint('x' * 10**6, file=sys.stderr)", "passed")),
    ],
)
def test_programs(code: str, verdict: Verdict) -> None:
    assert grade(PROGRAM, code).verdicts == (verdict,)


@pytest.mark.parametrize(
    "code",
    [
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    n: int\ndef echo(n):\n    return P(n).n",
        "print('noise')\ndef echo(n):\n    print(n)\n    return n",
        "def echo(n):\n    return n\nif __name__ == '__main__':\n    echo(input())",
        "from __future__ import annotations\ndef echo(n: int) -> int:\n    return n",
        "import numpy\ndef echo(n):\n    return numpy.int64(n)",
        "echo = lambda n: float(n)",
        "class _Echo:\n    def __call__(self, n):\n        return n\necho = _Echo()",
    ],
)
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
    problem = Problem(cases=(Stream(stdin=text, stdout=f"{MAX_INPUT_CHARS} é"),))
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
