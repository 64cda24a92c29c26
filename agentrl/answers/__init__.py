r"""Whether an answer in LaTeX means the expected one: ``same_answer``. ``compare`` says what counts as the same.

The answer was written by the agent under training and is hostile: it is compared in processes of their own, under a
limit of CPU time and memory, and never evaluated as Python. Needs math-verify: ``pip install 'agentrl[math]'``.
"""

import atexit
import importlib.util
import os
import threading

from agentrl.answers.pool import GradeCounters, GraderPool
from agentrl.answers.shape import blankless
from agentrl.errors import UsageError
from agentrl.grading import last_boxed, plain_number

MAX_CHARS = 1000
"""A longer answer is wrong, whatever it says."""
SECONDS = 2.0
"""CPU time for one comparison; a usual one takes a hundredth of it."""

__all__ = ["MAX_CHARS", "GradeCounters", "close_graders", "final_box", "grade_counters", "readable", "same_answer"]


def require_math() -> None:
    """Make sure that grading can work.

    Raises:
        UsageError: math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise UsageError("grading mathematics needs math-verify: pip install 'agentrl[math]'")


def final_box(text: str) -> str | None:
    r"""What the last ``\boxed{}`` behind the model's thoughts holds; None where there is none.

    What stands before the last ``</think>`` or behind a ``<think>`` that is never closed is no answer.
    """
    return last_boxed(text.rpartition("</think>")[2].partition("<think>")[0])


def readable(answer: str) -> bool:
    r"""Whether ``answer`` can be an expected answer: not empty, not too long, and whole inside ``\boxed{}``."""
    if len(answer) > MAX_CHARS or last_boxed(rf"\boxed{{{answer}}}") != answer.strip():
        return False
    return any(map(str.isalnum, answer)) or blankless(answer) == r"\{\}"


def same_answer(answer: str | None, expected: str, *, problem: str = "", seconds: float = SECONDS) -> bool:
    r"""Whether ``answer`` means what ``expected`` means; ``agentrl.answers.compare`` defines it.

    Args:
        answer: what the agent put into the box; None stands for no answer and is never right.
        expected: the right answer.
        problem: what was asked. Where it is given the answer has to be worked out as well, and no restatement of the
            problem, and of the form that it asks for; ``agentrl.answers.form`` says what that means.
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
    if (wanted := plain_number(expected)) is not None and (given := plain_number(answer)) is not None:
        # Most answers are numbers; whether a fraction will do, or a decimal for one, is for the graders to say.
        fractions = ["/" in text or "frac" in text for text in (answer, expected)]
        if given != wanted or not any(fractions if problem else fractions[:1]):
            return given == wanted
    elif blankless(answer) == blankless(expected):
        return True
    # A lone surrogate is part of no answer and can't be sent.
    sent = [text.encode(errors="replace").decode() for text in (answer, problem)]
    return _pool().same(sent[0], expected, problem=sent[1], seconds=seconds)


def grade_counters() -> GradeCounters:
    """What the graders of this process did so far."""
    with _lock:
        return GradeCounters() if _shared is None else _shared.counters


def close_graders() -> None:
    """End the grading processes; the next answer starts new ones."""
    global _shared
    with _lock:
        pool, _shared = _shared, None
    if pool is not None:
        pool.close()


_lock = threading.Lock()
_shared: GraderPool | None = None


def _pool() -> GraderPool:
    global _shared
    with _lock:
        if _shared is None:
            require_math()
            _shared = GraderPool(max(1, min(8, len(os.sched_getaffinity(0)))))
        return _shared


def _after_fork() -> None:
    """A forked child gets graders of its own; its parent's lock may have been held when it was forked."""
    global _lock, _shared
    pool, _shared, _lock = _shared, None, threading.Lock()
    if pool is not None:
        pool.forget()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(close_graders)
