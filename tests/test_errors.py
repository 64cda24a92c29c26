"""The exception tree, and how an error names the nearest valid name."""

import inspect
import pickle

import pytest

from agentrl import errors
from agentrl.errors import AgentRLError, UnknownNameError, nearest


def test_every_exception_is_in_the_drawn_tree() -> None:
    drawn = errors.__doc__ or ""
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, AgentRLError):
            assert f" {name} " in f"{drawn} ".replace("\n", " \n"), name


@pytest.mark.parametrize(
    ("name", "names", "hint"),
    [
        ("fense", ["fence", "hermes"], "did you mean 'fence'?"),
        ("ppo", ["cppo", "ppo_clip"], "did you mean 'ppo_clip'?"),
        ("zzz", ["b", "a"], "choose one of a, b"),
        ("zzz", [], "there are none yet"),
        ("zzz", [*"abcdefghijklmnopqrstu"], f"choose one of {', '.join('abcdefghijklmnopqrst')} … (21 in all)"),
    ],
)
def test_nearest(name: str, names: list[str], hint: str) -> None:
    assert nearest(name, names) == hint
    listed = f" There are {', '.join(names)}" if hint.endswith("?") else ""
    assert str(UnknownNameError("dialect", name, names)) == f"no dialect is called {name!r}; {hint}{listed}"


def test_it_comes_from_another_process_as_it_is() -> None:
    error = UnknownNameError("dialect", "fense", ["fence"])
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (UnknownNameError, str(error))


def test_many_names_are_not_listed_beside_the_nearest() -> None:
    names = [f"task-{number}" for number in range(11)]
    assert str(UnknownNameError("task", "taks-3", names)) == "no task is called 'taks-3'; did you mean 'task-3'?"


def test_what_is_no_text_is_no_name() -> None:
    assert str(UnknownNameError("split", 1, ["train", "test"])).startswith("no split is called 1; choose one of")  # type: ignore[arg-type]
