"""Runs hidden tests on a program that nobody has read.

Each test is a one-shot run in a fresh sandbox session: what one test's program sees or does, the next one does not.
Inside are the submission and the input of that one test. Expected values stay outside, and so does the comparison:
whatever the program prints, patches or forges is a claim about its own result, which must be right to count.

Not covered: a program that recognises an input and answers it from memory, as nobody can tell that from computing it;
and a program that leaves through a hole of the sandbox itself.
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from agentrl.envs.code_values import EXACTLY, Tolerance, read_claim, same, same_output
from agentrl.errors import InfrastructureError
from agentrl.python_tool import shared_sandbox
from agentrl.sandboxes import Result, SandboxError
from agentrl.sandboxes.base import Files, Status

MAX_CODE_CHARS = 100_000
"""A longer submission is not run and passes nothing."""
Verdict = Literal["passed", "wrong", "skipped"] | Status
"""What became of one test: ``passed``; ``wrong`` value or output; ``skipped``; else how the program ended."""
_COSTLY: frozenset[Verdict] = frozenset({"timeout", "memory", "output_limit", "killed", "crash"})
"""What ends the grading: a program that hangs would cost its time limit in each of a hundred tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A hidden test of a function."""

    arguments: str
    """A Python literal: the tuple of a tuple of positional arguments and a dict of named ones."""
    accepted: tuple[object, ...]
    """Descriptions of the values that are right; nearly always one."""
    tolerance: Tolerance = EXACTLY
    """How far the value may be off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A hidden test of a program."""

    stdin: str
    """What the program reads."""
    stdout: str
    """What it must write."""


Case: TypeAlias = Call | Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a submission is tested with."""

    cases: tuple[Case, ...]
    """The hidden tests, all of one kind."""
    entry_point: str = ""
    """What is called: ``name`` or ``Class().method``; empty for a program."""
    setup: str = ""
    """Source that stands before the submission, such as imports."""
    solution: str = ""
    """A submission that passes; empty where none is known."""
    timeout: float | None = None
    """Seconds of CPU time for each test; None takes the environment's."""
    packages: tuple[str, ...] = ()
    """Packages that the submission may import beside the sandbox's usual ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What became of a submission."""

    verdicts: tuple[Verdict, ...]
    """One for each test, in order."""

    @property
    def passed(self) -> float:
        """The share of tests that passed, 0 to 1; one that was skipped did not."""
        return self.verdicts.count("passed") / len(self.verdicts)

    @property
    def correct(self) -> bool:
        """Whether every test passed."""
        return set(self.verdicts) == {"passed"}


def grade(problem: Problem, code: str, *, timeout: float = 5.0, stop_at_failure: bool = False) -> Grade:
    """Run the hidden tests, side by side as far as the machine has cores, and judge them in order.

    A test that ran out of time or memory, or was killed, ends the grading; those after it count as skipped, whether or
    not one of them had begun, so that the grade does not depend on the machine.

    Args:
        problem: the tests.
        code: the submission.
        timeout: seconds of CPU time for each test where the problem does not say; three times as much on the clock.
        stop_at_failure: let the first failure of any kind end the grading.

    Raises:
        InfrastructureError: the sandbox failed, which says nothing about the submission.
    """
    cases, verdicts = problem.cases, list[Verdict]()
    if len(code) > MAX_CODE_CHARS:
        return Grade(verdicts=("error",) * len(cases))
    width = min(len(cases), max(2, len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(width) as pool:
        judged = [pool.submit(_judge, problem, case, code, timeout) for case in cases]
        try:
            for future in judged:
                verdicts.append(future.result())
                if verdicts[-1] in _COSTLY or (stop_at_failure and verdicts[-1] != "passed"):
                    break
        finally:
            for future in judged:
                future.cancel()
    return Grade(verdicts=(*verdicts, *["skipped" for _ in cases[len(verdicts) :]]))


def _judge(problem: Problem, case: Case, code: str, timeout: float) -> Verdict:
    limit = timeout if problem.timeout is None else problem.timeout
    source = f"{problem.setup}\n\n{code}" if problem.setup else code
    if isinstance(case, Stream):
        result = _run(problem, source, limit, stdin=case.stdin)
        ended = result.status == "ok" or (result.status == "exit" and result.exit_code == 0)
        right = ended and same_output(case.stdout, result.stdout)
    else:
        files = {"solution.py": source.encode("utf-8", "surrogatepass"), "call.txt": case.arguments.encode()}
        code = f"{_inside()}\nreport({problem.entry_point!r}, {case.tolerance.truth})"
        result = _run(problem, code, limit, files=files)
        ended = result.status == "ok"
        claimed = read_claim(result.value)
        right = ended and any(same(expected, claimed, case.tolerance) for expected in case.accepted)
    if not ended:
        return result.status
    return "passed" if right else "wrong"


def _run(problem: Problem, code: str, timeout: float, *, stdin: str = "", files: Files | None = None) -> Result:
    try:
        return shared_sandbox(problem.packages).run(code, timeout=timeout, stdin=stdin, files=files)
    except SandboxError as error:
        raise InfrastructureError(f"sandbox failed: {error}") from error


@functools.cache
def _inside() -> str:
    return Path(__file__).with_name("code_inside.py").read_text(encoding="utf-8")
