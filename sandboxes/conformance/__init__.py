"""Shows whether a sandbox keeps its promises: hostile programs, honest programs, state, time and what others fell into.

For anyone who writes a back end. Three lines tell what it lacks::

    from agentrl.sandboxes import open_sandbox
    from agentrl.sandboxes.conformance import check
    with open_sandbox() as sandbox:
        print(check(sandbox, only=["transactions", "forge_*"]))

With pytest, each case is a test of its own, given a fixture ``sandbox``::

    @pytest.mark.parametrize("case", cases(), ids=str)
    def test_conformance(sandbox, case):
        outcome = case.run(sandbox)
        assert outcome.passed, outcome

The suite takes about a minute. It needs limits with room for honest programs: ``Limits()`` or more memory.

What it can't show: that no other way out exists, that the machine's kernel is sound, or what happens when the host's
own process is killed.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from agentrl.sandboxes.base import Sandbox
from agentrl.sandboxes.conformance import outside, programs
from agentrl.sandboxes.conformance.model import Case, Outcome, Report, Violation

__all__ = ["Case", "Outcome", "Report", "Violation", "cases", "check"]


def cases(only: Sequence[str] | None = None) -> tuple[Case, ...]:
    """Return the cases.

    Args:
        only: Names or groups of cases, with ``*`` and ``?``; ``None`` for all.

    Raises:
        ValueError: A pattern fits no case, or two cases have one name.
    """
    found = (*programs.load(), *outside.load())
    if len({case.name for case in found}) < len(found):
        raise ValueError("two cases have one name")
    if only is None:
        return found
    for pattern in only:
        if not any(_fits(case, pattern) for case in found):
            groups = ", ".join(sorted({case.group for case in found}))
            raise ValueError(f"no case is called {pattern!r}; the groups are {groups}")
    return tuple(case for case in found if any(_fits(case, pattern) for pattern in only))


def _fits(case: Case, pattern: str) -> bool:
    return fnmatchcase(case.name, pattern) or fnmatchcase(case.group, pattern)


def check(
    sandbox: Sandbox, *, only: Sequence[str] | None = None, progress: Callable[[Outcome], None] | None = None
) -> Report:
    """Run the cases one after the other; ``print`` of the report names what did not hold, and why it matters.

    Args:
        sandbox: An open sandbox of any back end.
        only: Names or groups of cases, with ``*`` and ``?``; ``None`` for all.
        progress: Called with each outcome as it comes.

    Raises:
        ValueError: A pattern of ``only`` fits no case.
    """
    outcomes: list[Outcome] = []
    for case in cases(only):
        outcomes.append(case.run(sandbox))
        if progress is not None:
            progress(outcomes[-1])
    return Report(outcomes=tuple(outcomes))
