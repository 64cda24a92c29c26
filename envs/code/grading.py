"""Run hidden tests on an untrusted program.

Each test is a one-shot run in a fresh sandbox session, so no test's program sees what another did. Inside are only the
submission and that test's input. Expected values and the comparison stay outside. Whatever the program prints, patches
or forges is a claim about its own result, which must be right to count.

Not covered: a program that recognises an input and answers it from memory, which looks the same as computing it; and a
program that escapes through a hole of the sandbox itself.
"""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from agentrl.envs.code.values import EXACTLY, Tolerance, read_claim, same_output, same_value
from agentrl.errors import InfrastructureError
from agentrl.sandboxes import Result, SandboxError
from agentrl.sandboxes.base import Files, Status
from agentrl.toolenv.tools.python import shared_sandbox

MAX_CODE_CHARS = 100_000
"""A longer submission is not run and passes nothing."""
Verdict = Literal["passed", "wrong", "skipped"] | Status
"""Outcome of one test: ``passed``; ``wrong`` value or output; ``skipped``; else how the program ended."""
_COSTLY: frozenset[Verdict] = frozenset({"timeout", "memory", "output_limit", "killed", "crash"})
"""Verdicts that end the grading: a program that hangs would cost its time limit in each of a hundred tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCase:
    """A hidden test of a function."""

    arguments: str
    """A Python literal: the tuple of a tuple of positional arguments and a dict of named ones."""
    accepted: tuple[object, ...]
    """Descriptions of the values that are right; nearly always one."""
    tolerance: Tolerance = EXACTLY
    """Largest error of the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCase:
    """A hidden test of a program."""

    stdin: str
    """The program's standard input."""
    stdout: str
    """The standard output it must write."""


Case: TypeAlias = CallCase | StreamCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The tests of a submission, and how to run them."""

    cases: tuple[Case, ...]
    """The hidden tests, all of one kind."""
    entry_point: str = ""
    """The callable under test: ``name`` or ``Class().method``; empty for a program."""
    setup: str = ""
    """Source that is put before the submission, such as imports."""
    solution: str = ""
    """A submission that passes; empty where none is known."""
    timeout: float | None = None
    """Seconds of CPU time for each test; None takes the environment's."""
    packages: tuple[str, ...] = ()
    """Packages that the submission may import beside the sandbox's usual ones."""
    sandbox: str = ""
    """The back end that runs the tests; empty for the process's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionGrade:
    """The outcome of a submission."""

    verdicts: tuple[Verdict, ...]
    """One for each test, in order."""

    @property
    def passed(self) -> float:
        """The share of tests that passed, 0 to 1; a skipped test did not pass."""
        return self.verdicts.count("passed") / len(self.verdicts)

    @property
    def correct(self) -> bool:
        """True if every test passed."""
        return set(self.verdicts) == {"passed"}


def grade(problem: Problem, code: str, *, timeout: float = 5.0) -> SubmissionGrade:
    """Run the hidden tests in parallel, as far as the machine has cores, and judge them in order.

    A test that ran out of time or memory, or was killed, ends the grading. Those after it count as skipped even if they
    have run, so that the grade does not depend on the machine.

    Args:
        problem: the tests.
        code: the submission.
        timeout: seconds of CPU time for each test where the problem does not say; three times as much wall time.

    Raises:
        InfrastructureError: the sandbox failed, which says nothing about the submission.
    """
    cases, verdicts = problem.cases, list[Verdict]()
    if len(code) > MAX_CODE_CHARS:
        # Refused before it is copied into every test's session.
        return SubmissionGrade(verdicts=("error",) * len(cases))

    width = min(len(cases), max(2, len(os.sched_getaffinity(0))))
    with ThreadPoolExecutor(width) as pool:
        judged = [pool.submit(_judge, problem, case, code, timeout) for case in cases]
        try:
            for future in judged:
                verdicts.append(future.result())
                if verdicts[-1] in _COSTLY:
                    break
        finally:
            # Tests that have not begun would only delay the pool's end.
            for future in judged:
                future.cancel()
    return SubmissionGrade(verdicts=(*verdicts, *["skipped" for _ in cases[len(verdicts) :]]))


def _judge(problem: Problem, case: Case, code: str, timeout: float) -> Verdict:
    limit = timeout if problem.timeout is None else problem.timeout
    source = f"{problem.setup}\n\n{code}" if problem.setup else code
    if isinstance(case, StreamCase):
        result = _run(problem, source, limit, stdin=case.stdin)
        # Many programs end with sys.exit().
        ended = result.status == "ok" or (result.status == "exit" and result.exit_code == 0)
        right = ended and same_output(case.stdout, result.stdout)
    else:
        # A lone surrogate is the submission's syntax error inside, and no encoding error here.
        files = {"solution.py": source.encode("utf-8", "surrogatepass"), "call.txt": case.arguments.encode()}
        code = f"{_inside()}\nreport({problem.entry_point!r}, {case.tolerance.truth})"
        result = _run(problem, code, limit, files=files)
        ended = result.status == "ok"
        claimed = read_claim(result.value)
        right = ended and any(same_value(expected, claimed, case.tolerance) for expected in case.accepted)
    if not ended:
        return result.status
    return "passed" if right else "wrong"


def _run(problem: Problem, code: str, timeout: float, *, stdin: str = "", files: Files | None = None) -> Result:
    try:
        return shared_sandbox(problem.packages, problem.sandbox).run(code, timeout=timeout, stdin=stdin, files=files)
    except SandboxError as error:
        raise InfrastructureError(f"sandbox failed: {error}") from error


@functools.cache
def _inside() -> str:
    return Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
