"""What the graders' processes do: ``agentrl.processes.pool`` forks them, limits them and asks them."""

from agentrl.grading.latex.compare import same, verified

MAX_BYTES = 2 << 30
"""Address space of a grader; one that has loaded sympy holds half a gigabyte."""
CONTROL = {"answer": r"\sqrt{8}", "expected": r"2\sqrt{2}"}
"""Two answers that are the same, and that a working grader compares in no time."""
_WARMING = (
    (r"\frac{\sqrt{8}}{2}+x^2", r"\sqrt2+x^{2}"),
    (r"(1,\frac{\pi}{3})", r"(1,\pi/3)"),
    (r"x^2+y^2=1", r"y^2=1-x^2"),
    (r"(-\infty,1)\cup(2,3]", r"(-\infty,1)\cup(2,3]"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    (r"1<x\le 2", "(1,2]"),
    (r"\begin{pmatrix}1\\x\end{pmatrix}", r"\begin{pmatrix}1\\ x+0\end{pmatrix}"),
    (r"e^{2\pi i}+2^x", "2^x+1"),
)
"""Comparisons that warm the caches of the parser and sympy: every grader inherits them."""


def warm() -> None:
    """Fill the caches."""
    for answer, expected in _WARMING:
        same(answer, expected)


def reply(*, answer: str, expected: str, problem: str = "", second: bool = False) -> bool:
    """Return True if ``answer`` means the same as ``expected``; with ``second``, by math-verify alone."""
    return verified(answer, expected) if second else same(answer, expected, problem)
