"""Environments by id: Gymnasium's registry with errors that help."""

import functools
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import agentrl
from agentrl.envs import register_builtin
from agentrl.errors import ConfigError, EnvContractError, UnknownNameError, UsageError
from agentrl.sandboxes import SandboxError
from agentrl.toolenv import registry
from agentrl.toolenv.base import ToolEnv

from .offers import offer
from .test_base import Shout

NEARLY = ("agentrl/Arithmetc-v0", "agentrl/Arithmetic-v7", "agnetrl/Arithmetic-v0")


@pytest.fixture(autouse=True)
def forgetful(clean_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plugin is loaded before a test, nor remembered after it."""
    monkeypatch.setattr(registry, "_found", [])
    registry._complain.cache_clear()


def test_register_and_make() -> None:
    agentrl.register("me/Shout-v0", Shout, kwargs={"max_turns": 3})
    env = agentrl.make("me/Shout-v0", split="test")
    assert type(env) is Shout and env.max_turns == 3
    assert env.split == "test"
    assert env.spec is not None and env.spec.id == "me/Shout-v0"
    assert isinstance(gymnasium.make("me/Shout-v0").unwrapped, Shout)


def test_only_environments_of_agentrl_and_its_users_are_listed() -> None:
    builtin = agentrl.list_envs()
    assert "agentrl/Arithmetic-v0" in builtin
    assert not [env_id for env_id in builtin if not env_id.startswith(("agentrl/", "reasoning-gym/"))]
    agentrl.register("me/Shout-v0", Shout)
    assert agentrl.list_envs() == sorted([*builtin, "me/Shout-v0"])


def test_registering_the_built_in_ones_again_changes_nothing() -> None:
    spec = gymnasium.registry["agentrl/Arithmetic-v0"]
    register_builtin()
    assert gymnasium.registry["agentrl/Arithmetic-v0"] is spec


@pytest.mark.parametrize(
    ("name", "options", "error", "reason"),
    [
        *((name, {}, UnknownNameError, "environment") for name in ("", "no such id", "a/b/c-v0")),
        *((name, {}, UnknownNameError, "did you mean 'agentrl/Arithmetic-v0'") for name in NEARLY),
        ("agentrl/Arithmetic-v0", {"lvl": 2}, ConfigError, "it has no argument 'lvl'; did you mean 'level'?"),
        ("CartPole-v1", {}, EnvContractError, "CartPole"),
        ("quizz_plugin:plug/Quiz-v0", {}, UsageError, "No module named 'quizz_plugin'"),
    ],
)
def test_what_can_not_be_made_is_named(name: str, options: dict[str, Any], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        agentrl.make(name, **options)


def test_a_class_that_raises_or_forgets_its_base_is_one_sentence() -> None:
    class Broken(ToolEnv):
        def __init__(self, error: Exception | None = None) -> None:
            if error is not None:
                raise error

    agentrl.register("test/Broken-v0", Broken)
    with pytest.raises(EnvContractError, match=r"Broken\.__init__ does not call super\(\)\.__init__"):
        agentrl.make("test/Broken-v0")
    with pytest.raises(EnvContractError, match="making 'test/Broken-v0' raised KeyError"):
        agentrl.make("test/Broken-v0", error=KeyError("data"))
    with pytest.raises(SandboxError, match="no room"):
        agentrl.make("test/Broken-v0", error=SandboxError("no room"))


PLUGIN = """
import agentrl
class Quiz(agentrl.ToolEnv):
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


def test_an_entry_point_offers_environments(plugin: Path) -> None:
    offer(plugin, "quiz", "quiz_plugin:offer")
    offer(plugin, "two", "quiz_plugin:offer")
    assert "plug/Quiz-v0" in agentrl.list_envs()
    assert isinstance(agentrl.make("plug/Quiz-v0"), ToolEnv)
    (quiz,) = [plugin for plugin in registry.plugins() if plugin.name == "quiz"]
    assert (quiz.distribution, quiz.ids) == ("quiz 1.0", ("plug/Quiz-v0",))
    assert not [quiz for quiz in registry.plugins() if quiz.problem], "registering the same twice is no theft"


def test_an_id_that_is_taken_stays_with_its_owner(plugin: Path) -> None:
    spec = gymnasium.registry["agentrl/Arithmetic-v0"]
    code = """
import agentrl, gymnasium
agentrl.register('agentrl/Arithmetic-v0', 'quiz_plugin:Quiz')
del gymnasium.registry['CartPole-v1']
agentrl.register('thief/Own-v0', 'quiz_plugin:Quiz')
"""
    offer(plugin, "thief", "quiz_module", code=code)
    with pytest.warns(UserWarning, match="'thief' .* ids that are taken.*'CartPole-v1', 'agentrl/Arithmetic-v0'"):
        names = agentrl.list_envs()
    assert gymnasium.registry["agentrl/Arithmetic-v0"] is spec and "CartPole-v1" in gymnasium.registry
    assert "thief/Own-v0" in names


@pytest.mark.parametrize(
    "point", ["\x1b[31mred\x1b[0m", "../../etc", "os:system", "a b; rm -rf", "漢字\u202e", "x" * 5000]
)
def test_a_plugin_may_have_any_name(plugin: Path, point: str) -> None:
    offer(plugin, "quiz", "quiz_plugin:offer", point)
    offer(plugin, "broken", "quiz_plugin:\x1bnothing", point)
    with pytest.warns(UserWarning, match="can't be loaded") as warned:
        assert "plug/Quiz-v0" in agentrl.list_envs()
    assert str(warned[0].message).isprintable()
    assert {loaded.name for loaded in registry.plugins()} >= {point}


def test_an_environment_without_an_entry_point_is_not_listed() -> None:
    gymnasium.register("plug/Vector-v0", vector_entry_point="quiz_plugin:Quiz")
    gymnasium.register("plug/Partial-v0", entry_point=functools.partial(Shout, max_turns=3))
    assert "plug/Vector-v0" not in agentrl.list_envs() and "plug/Partial-v0" in agentrl.list_envs()
    assert agentrl.make("plug/Partial-v0").max_turns == 3


@pytest.mark.parametrize(
    "name",
    [
        *("../../etc/passwd", "a" * 100_000, "agentrl/Arithmetic-v" + "9" * 5000, "x/\x1b[2J-v0", "a\nb-v0"),
        *("\ud800/A-v0", "os:system", "os.path:agentrl/X-v0", "antigravity:a/B-v0", ":a/B-v0", "a:", ":", "a:b:c/D-v0"),
        *("..os:a/B-v0", "a/b:c/D-v0", "a b:c/D-v0", "a\x00b:c/D-v0", "x;y:c/D-v0", "__main__.x:c/D-v0"),
        *("m" * 300 + ":c/D-v0", "agentrl/Arithmetic-v0:", "agentrl/Arithmetic-v-1", "-v0", "/", "//-v0", "agentrl/"),
        "agentrl//Arithmetic-v0",
    ],
)
def test_a_hostile_id_is_one_sentence(name: str) -> None:
    before = set(sys.modules)
    with pytest.raises(UsageError) as caught:
        agentrl.make(name)
    sentence = str(caught.value)
    assert sentence.isprintable() and len(sentence) < 800
    assert not {"antigravity", "this"} & (set(sys.modules) - before)


@pytest.mark.parametrize("code", ["raise ValueError('bug')", "import sys; sys.exit(3)", "x = = 1"])
def test_a_module_that_fails_is_one_sentence(plugin: Path, code: str) -> None:
    (plugin / "quiz_module.py").write_text(code)
    with pytest.raises(UsageError, match="the module of environment 'quiz_module:plug/Quiz-v0' can't be imported"):
        agentrl.make("quiz_module:plug/Quiz-v0")


def test_no_module_is_imported_for_an_id_that_is_there() -> None:
    assert isinstance(agentrl.make("no_such_module:agentrl/Arithmetic-v0"), ToolEnv)


def test_what_an_environment_imports_in_vain_is_named(plugin: Path) -> None:
    (plugin / "quiz_module.py").write_text("import no_such_library\n")
    agentrl.register("plug/Lacking-v0", "quiz_module:Quiz")
    with pytest.raises(UsageError, match="no_such_library"):
        agentrl.make("plug/Lacking-v0")
