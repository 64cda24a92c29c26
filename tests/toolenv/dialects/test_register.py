"""A dialect of one's own: named, played, recorded, and refused where it is none."""

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import agentrl
from agentrl.cli import main
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.runs.assemble import task_source
from agentrl.toolenv.dialects import DIALECTS, THINKING, Block, Dialect, Fence, get_dialect, register_dialect

from .conftest import Slash, documented


@pytest.fixture(autouse=True)
def clean(clean_registry: None) -> Generator[None]:
    with patch.dict(DIALECTS):
        yield


def test_it_is_played_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    env = agentrl.make("agentrl/Arithmetic-v0", dialect="slash")
    observation, _ = env.reset(seed=0)
    assert "/python {" in observation[0]["content"]
    for turn in env.gold(env.episode.task):
        env.step(turn)
    assert env.episode.parts == {"correct": 1.0} and env.episode.tool_runs[0].ok
    env.close()
    config = load_config(preset="quickstart", overrides=["env.args.dialect=slash"])
    recorded = task_source(config, "train").dialect.label
    assert re.fullmatch("slash [0-9a-f]{16}", recorded) and recorded == env.dialect.label
    monkeypatch.setattr(Slash, "form", 2)
    assert task_source(config, "train").dialect.label != recorded


def test_a_package_brings_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_dialects.py").write_text(
        "import agentrl.toolenv.dialects\n"
        "class Loud(agentrl.toolenv.dialects.Xml): pass\n"
        "agentrl.register_dialect('loud', Loud)\n"
        "agentrl.register('me/Loud-v0', 'agentrl.envs.generated.arithmetic:Arithmetic')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check-env", "my_dialects:me/Loud-v0", "--dialect", "loud", "--tasks", "1"]) == 0
    assert get_dialect("loud").name == "loud" and get_dialect("xml").name == "xml"


def test_registering_it_again_replaces_it() -> None:
    again: Any = documented()["Slash"]
    assert DIALECTS["slash"] is again is not Slash
    register_dialect("slash", again)


class Careless(Fence):
    """Would read what is thought."""

    def __init__(self, tools: Any = ()) -> None:
        super().__init__(tools)
        self.opening = re.compile("/")


@pytest.mark.parametrize(
    ("name", "dialect", "message"),
    [
        ("fence", Careless, "the dialect 'fence' is there already"),
        ("slash", Careless, "the dialect 'slash' is there already"),
        ("native", Slash, "the dialect 'native' is there already"),
        ("other", Slash, "Slash is registered as 'slash': subclass it"),
        ("two words", Slash, "can't be called 'two words'"),
        ("", Slash, "can't be called ''"),
        ("mine", type("Bare", (Dialect,), {}), "lacks read_block, write_call"),
        ("mine", Careless, "has no opening"),
        ("mine", Slash(), "register a subclass of agentrl.toolenv.dialects.Dialect"),
        ("mine", dict, "register a subclass of agentrl.toolenv.dialects.Dialect"),
    ],
)
def test_what_can_not_be_registered(name: str, dialect: Any, message: str) -> None:
    before = dict(DIALECTS)
    with pytest.raises(ConfigError, match=message):
        register_dialect(name, dialect)
    assert before == DIALECTS


def test_reading_comes_to_an_end_whatever_a_block_says() -> None:
    class Standing(Fence):
        opening = re.compile(f"{THINKING}|/")

        def __init__(self) -> None:
            self.tools = {}

        def read_block(self, text: str, opening: re.Match[str]) -> Block:
            return Block(end=opening.start())

    assert Standing().parse("/ and /") == ()
