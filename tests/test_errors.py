"""The exception tree, and how an error names the nearest valid name."""

import inspect

import pytest

from agentrl import errors
from agentrl.errors import AgentRLError, InfrastructureError, TrajectoryError, UnknownNameError, UsageError, nearest


def test_every_exception_is_in_the_drawn_tree() -> None:
    drawn = errors.__doc__ or ""
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, AgentRLError):
            assert f" {name} " in f"{drawn} ".replace("\n", " \n"), name


def test_branches_do_not_mix() -> None:
    assert issubclass(UnknownNameError, UsageError)
    assert issubclass(TrajectoryError, ValueError)
    assert not issubclass(InfrastructureError, UsageError)


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("fense", ["fence", "hermes"], "did you mean 'fence'?"),
        ("zzz", ["b", "a"], "choose one of a, b"),
        ("zzz", [], "there are none yet"),
    ],
)
def test_nearest(name: str, known: list[str], hint: str) -> None:
    assert nearest(name, known) == hint
    assert str(UnknownNameError("dialect", name, known)) == f"no dialect is called {name!r}; {hint}"
