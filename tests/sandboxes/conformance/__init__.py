"""Attacks a sandbox: hostile programs, honest programs, state, time, and what other sandboxes fell into.

For anyone who writes a back end. Each case is a test of its own, given a fixture ``sandbox`` that opens that back end::

    @pytest.mark.parametrize("case", cases(), ids=str)
    def test_conformance(sandbox, case):
        outcome = case.run(sandbox)
        assert outcome.passed, outcome

All cases together take about a minute. They need limits with room for honest programs: ``Limits()`` or more memory.

They can't show that no other way out exists, that the machine's kernel is sound, or what happens when the host's own
process is killed.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from . import outside, programs
from .model import Case, Outcome, Violation

__all__ = ["Case", "Outcome", "Violation", "cases"]


def cases(only: Sequence[str] | None = None) -> tuple[Case, ...]:
    """Return the cases.

    Args:
        only: Names or groups of cases, with ``*`` and ``?``; ``None`` for all.

    Raises:
        ValueError: A pattern fits no case, or two cases have one name.
    """
    available = (*programs.load(), *outside.load())
    if len({case.name for case in available}) < len(available):
        raise ValueError("two cases have one name")
    if only is None:
        return available
    for pattern in only:
        if not any(_fits(case, pattern) for case in available):
            groups = ", ".join(sorted({case.group for case in available}))
            raise ValueError(f"no case is called {pattern!r}; the groups are {groups}")
    return tuple(case for case in available if any(_fits(case, pattern) for pattern in only))


def _fits(case: Case, pattern: str) -> bool:
    return fnmatchcase(case.name, pattern) or fnmatchcase(case.group, pattern)
