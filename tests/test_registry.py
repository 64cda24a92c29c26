"""Environments by id: Gymnasium's registry with errors that help."""

import importlib
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

import gymnasium
import pytest

import agentrl
from agentrl import registry
from agentrl.env import Episode, ToolEnv
from agentrl.errors import ConfigError, EnvContractError, UnknownNameError, UsageError
from agentrl.tasks import TaskList
from agentrl.types import Task


class Trivia(ToolEnv):
    def __init__(self, *, question: str = "2 + 2?", split: str = "train") -> None:
        super().__init__(split=split)
        self.question = question

    def tasks(self, split: str) -> TaskList:
        return TaskList([Task(id=split, prompt=self.question, answer="4")])

    def reward(self, episode: Episode) -> Mapping[str, float]:
        return {"correct": episode.final == episode.task.answer}


@pytest.fixture(autouse=True)
def clean_registry() -> Generator[None]:
    before = dict(gymnasium.registry)
    registry.load_plugins.cache_clear()
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)
    registry.load_plugins.cache_clear()


def test_register_and_make() -> None:
    agentrl.register("me/Trivia-v0", Trivia, kwargs={"question": "1 + 3?"})
    env = agentrl.make("me/Trivia-v0", split="test")
    assert type(env) is Trivia
    assert env.reset(seed=0)[0][-1]["content"] == "1 + 3?"
    assert env.split == "test"
    assert env.spec is not None
    assert env.spec.id == "me/Trivia-v0"
    assert isinstance(gymnasium.make("me/Trivia-v0").unwrapped, Trivia)


def test_only_environments_of_agentrl_and_its_users_are_listed() -> None:
    builtin = agentrl.list_envs()
    assert "agentrl/Arithmetic-v0" in builtin
    assert all(env_id.startswith("agentrl/") for env_id in builtin)
    agentrl.register("me/Trivia-v0", Trivia)
    assert agentrl.list_envs() == [*builtin, "me/Trivia-v0"]


def test_registering_the_built_in_ones_again_changes_nothing() -> None:
    spec = gymnasium.registry["agentrl/Arithmetic-v0"]
    registry.register_builtin()
    assert gymnasium.registry["agentrl/Arithmetic-v0"] is spec


@pytest.mark.parametrize("name", ["agentrl/Arithmetc-v0", "agentrl/Arithmetic-v7", "agnetrl/Arithmetic-v0"])
def test_a_wrong_id_names_the_nearest(name: str) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'agentrl/Arithmetic-v0'"):
        agentrl.make(name)


@pytest.mark.parametrize("name", ["", "no such id", "a/b/c-v0"])
def test_a_malformed_id_is_unknown(name: str) -> None:
    with pytest.raises(UnknownNameError, match="environment"):
        agentrl.make(name)


def test_a_wrong_argument_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="colour"):
        agentrl.make("agentrl/Arithmetic-v0", colour="red")


def test_another_kind_of_environment_is_refused() -> None:
    with pytest.raises(EnvContractError, match="CartPole"):
        agentrl.make("CartPole-v1")


PLUGIN = """
import agentrl
from agentrl.env import ToolEnv

class Quiz(ToolEnv):
    pass

def offer():
    agentrl.register("plug/Quiz-v0", "quiz_plugin:Quiz")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    (tmp_path / "quiz_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("quiz_plugin", "quiz_module"):
        sys.modules.pop(name, None)


def offer(folder: Path, name: str, value: str) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{name} = {value}\n")
    importlib.invalidate_caches()


def test_an_entry_point_offers_environments(plugin: Path) -> None:
    offer(plugin, "quiz", "quiz_plugin:offer")
    assert "plug/Quiz-v0" in agentrl.list_envs()
    assert isinstance(agentrl.make("plug/Quiz-v0"), ToolEnv)


def test_a_broken_plugin_breaks_nobody_else(plugin: Path) -> None:
    offer(plugin, "broken", "quiz_plugin:nothing")
    offer(plugin, "quiz", "quiz_plugin:offer")
    with pytest.warns(UserWarning, match=r"plugin 'broken' \(quiz_plugin:nothing\) can't be loaded"):
        names = agentrl.list_envs()
    assert "plug/Quiz-v0" in names


def test_an_id_may_name_its_module(plugin: Path) -> None:
    (plugin / "quiz_module.py").write_text("import quiz_plugin\nquiz_plugin.offer()\n")
    assert isinstance(agentrl.make("quiz_module:plug/Quiz-v0"), ToolEnv)


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="No module named 'quizz_plugin'"):
        agentrl.make("quizz_plugin:plug/Quiz-v0")


def test_what_an_environment_imports_in_vain_is_named(plugin: Path) -> None:
    (plugin / "quiz_module.py").write_text("import no_such_library\n")
    agentrl.register("plug/Lacking-v0", "quiz_module:Quiz")
    with pytest.raises(UsageError, match="no_such_library"):
        agentrl.make("plug/Lacking-v0")
