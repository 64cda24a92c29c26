"""``agentrl list``: every environment in a line, what is broken by its name, and nothing started."""

import json
from collections.abc import Mapping
from typing import ClassVar

import pytest

import agentrl
from agentrl.toolenv.tools.function import tool
from agentrl.types import Task

from ..conftest import python
from .conftest import Command


@tool
def look(where: str, how: int = 1) -> str:
    """Look somewhere.\x1b[2J"""
    return where * how


class Seek(agentrl.ToolEnv):
    """Seek, and ye shall find.

    More of it.
    """

    splits: ClassVar[tuple[str, ...]] = ("train", "exam")
    reward_weights: ClassVar[Mapping[str, float]] = {"found": 1.0, "slow": -0.25}

    def __init__(self, *, split: str = "train", depth: int = 2) -> None:
        print("hello from a constructor")
        super().__init__(split=split)
        self.tools = (look,)

    def tasks(self, split: str) -> agentrl.TaskList:
        raise AssertionError("nobody plays")

    def gold(self, task: Task) -> list[str]:
        return []


def fails(error: BaseException) -> type[agentrl.ToolEnv]:
    """An environment that can't be made."""

    def init(self: agentrl.ToolEnv) -> None:
        raise error

    return type("Fails", (agentrl.ToolEnv,), {"__init__": init})


@pytest.fixture(autouse=True)
def registered(clean_registry: None) -> None:
    agentrl.register("test/Seek-v0", Seek, kwargs={"depth": 3})
    agentrl.register("test/Broken-v0", fails(RuntimeError("no \x1b[31mway")))
    agentrl.register("test/Leaves-v0", fails(SystemExit(3)))
    agentrl.register("Lacking-v0", "no_such_module:Lacking")


def test_every_environment_is_in_a_line(command: Command) -> None:
    shown = command("list").out.splitlines()
    assert [line for line in shown if line.startswith("environments test (from ")]
    lines = {line.split()[0]: line for line in shown}
    # What its constructor prints is not here.
    assert lines["test/Seek-v0"].endswith("tools look; splits train, exam; reward found: 1, slow: -0.25; gold")
    assert r"broken: RuntimeError('no \x1b[31mway')" in lines["test/Broken-v0"]
    assert "broken: SystemExit(3)" in lines["test/Leaves-v0"]
    assert "not available: environment 'Lacking-v0' needs a module" in lines["Lacking-v0"]
    assert "environments without a namespace (from no_such_module)" in shown
    assert "tools python; splits train, test; reward correct: 1; gold" in lines["agentrl/Arithmetic-v0"]
    assert "  quickstart" in shown and all(line.isprintable() for line in shown)


def test_the_same_as_json(command: Command) -> None:
    listed = json.loads(command("list", "--json").out)
    assert set(listed) == {"environments", "broken_plugins", "presets"}
    assert (seek := listed["environments"]["test/Seek-v0"]).pop("distribution")
    facts = {"tools": ["look"], "splits": ["train", "exam"], "reward": {"found": 1.0, "slow": -0.25}, "gold": True}
    assert seek == {"id": "test/Seek-v0", "problem": "", **facts}
    assert listed["environments"]["test/Broken-v0"]["problem"].startswith("broken: ")


def test_details_of_one(command: Command) -> None:
    lines = dict(line.split(maxsplit=1) for line in command("list", "test/Seek-v0").out.splitlines())
    assert lines["id"] == "test/Seek-v0" and lines["description"] == "Seek, and ye shall find."
    assert lines["arguments"] == "split='train', depth=2" and "depth=3" in lines["set"]
    assert lines["splits"] == "train, exam" and lines["reward"] == "found: 1, slow: -0.25" and lines["gold"] == "yes"
    assert lines["tools"] == r"look(where, how): Look somewhere.\x1b[2J"
    facts = json.loads(command("list", "test/Seek-v0", "--json").out)
    assert facts["reward"] == {"found": 1.0, "slow": -0.25} and facts["max_turns"] == 8


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("test/Sek-v0", "did you mean 'test/Seek-v0'?"),
        ("test/Broken-v0", r"the environment 'test/Broken-v0' is broken: RuntimeError('no \x1b[31mway')"),
        ("test/Leaves-v0", "is broken: SystemExit(3)"),
        ("Lacking-v0", "needs a module that can't be imported"),
        ("\x1b[2J" * 5000, "no environment is called"),
    ],
)
def test_details_of_what_is_not_there(env_id: str, message: str, command: Command) -> None:
    out, err = command("list", env_id, code=2)
    assert out == "" and message in err and err.count("\n") == 1 and err.strip().isprintable()


@pytest.mark.slow
def test_nothing_is_started() -> None:
    code = (
        "import sys\nfrom agentrl.cli import main\nassert main(['list']) == 0\n"
        "from agentrl.toolenv.tools.python import sandbox_counters\nassert sandbox_counters() is None\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules), 'a heavy library was imported'\n"
    )
    assert python("-c", code).stderr == ""
