r"""Compare an answer in LaTeX with the expected one: ``same_answer``. ``compare`` defines what counts as the same.

The answer was written by the agent under training, so it is hostile. It is compared in separate processes, whose CPU
time and memory are limited, and never evaluated as Python. Needs math-verify: ``pip install 'agentrl[math]'``.
"""

import importlib.util
import os

from agentrl.errors import InfrastructureError, UsageError
from agentrl.grading.latex.shape import blankless
from agentrl.grading.numbers import last_boxed, plain_number
from agentrl.processes.per_process import PerProcess
from agentrl.processes.pool import WorkerPool

MAX_CHARS = 1000
"""A longer answer is wrong, whatever it says."""
SECONDS = 2.0
"""CPU time for one comparison; a usual one takes a hundredth of it."""


def require_math() -> None:
    """Check that grading can work.

    Raises:
        UsageError: math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise UsageError("grading mathematics needs math-verify: pip install 'agentrl[math]'")


def final_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{}`` after the model's thoughts; None where there is none.

    Text before the last ``</think>``, or after a ``<think>`` that is never closed, is no answer.
    """
    return last_boxed(text.rpartition("</think>")[2].partition("<think>")[0])


def readable(answer: str) -> bool:
    r"""Return True if ``answer`` can be an expected answer: not empty, not too long, unbroken inside ``\boxed{}``."""
    if len(answer) > MAX_CHARS or last_boxed(rf"\boxed{{{answer}}}") != answer.strip():
        return False
    return any(map(str.isalnum, answer)) or blankless(answer) == r"\{\}"


def same_answer(answer: str | None, expected: str, *, problem: str = "", seconds: float = SECONDS) -> bool:
    r"""Return True if ``answer`` means the same as ``expected``, as ``agentrl.grading.latex.compare`` defines it.

    Args:
        answer: what the agent put into the box; None stands for no answer and is never right.
        expected: the right answer.
        problem: the problem's text. Unless it is empty, the answer must also be evaluated, must not restate the
            problem, and must have the form that it asks for. ``agentrl.grading.latex.form`` defines these.
        seconds: CPU time after which the answer is wrong.

    Example:
        >>> same_answer(r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"), same_answer("(1, 2)", r"\{1, 2\}")
        (True, False)

    Raises:
        UsageError: math-verify is not installed.
        InfrastructureError: the grading processes do not work.
    """
    if answer is None or len(answer) > MAX_CHARS or not answer.strip():
        return False
    if (wanted := plain_number(expected)) is not None and (number := plain_number(answer)) is not None:
        # Most answers are numbers, which need no round trip to a process. Fractions do: only the graders know
        # whether one may be unreduced, or a decimal.
        fractions = ["/" in text or "frac" in text for text in (answer, expected)]
        if number != wanted or not any(fractions if problem else fractions[:1]):
            return number == wanted
    elif blankless(answer) == blankless(expected):
        return True
    return _ask(answer, expected, problem, seconds=seconds)


def verified(answer: str, expected: str, *, seconds: float = SECONDS) -> bool:
    """Return math-verify's own verdict of an answer: a second opinion, more lenient than ``same_answer``.

    Raises:
        UsageError: math-verify is not installed.
        InfrastructureError: the grading processes do not work.
    """
    return len(answer) <= MAX_CHARS and _ask(answer, expected, seconds=seconds, second=True)


def _ask(answer: str, expected: str, problem: str = "", *, seconds: float, second: bool = False) -> bool:
    # A lone surrogate is part of no answer, and no parser takes it.
    answer, problem = (text.encode(errors="replace").decode() for text in (answer, problem))
    request = {"answer": answer, "expected": expected, "problem": problem, "second": second}
    # An answer that no grader survives, or that takes too long, is wrong.
    return bool(_graders.get().ask(request, seconds=seconds))


def _make_pool() -> WorkerPool:
    require_math()
    size = min(8, len(os.sched_getaffinity(0)))
    return WorkerPool("agentrl.grading.latex.worker", size, name="grading", failure=InfrastructureError)


_graders = PerProcess(_make_pool, close=WorkerPool.close, forget=WorkerPool.forget)
close_graders = _graders.close
"""End the grading processes; the next answer starts new ones."""
