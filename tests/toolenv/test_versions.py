"""Versions change with the code that plays and grades, and with nothing else."""

import platform
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.toolenv import versions
from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.tools.function import tool
from agentrl.toolenv.versions import PARTS, code_versions


def made_in(module: str, file: Path, base: type[ToolEnv] = ToolEnv) -> type[ToolEnv]:
    sys.modules[module] = ModuleType(module)
    sys.modules[module].__file__ = str(file)
    return type("Made", (base,), {"__module__": module})


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def test_an_environment_s_version_follows_its_code(tmp_path: Path) -> None:
    versions_seen: dict[str, str] = {}
    for folder in ("one", "moved", "other", "helped"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "env.py").write_text("x = 1" if folder != "other" else "x = 2")
        if folder == "helped":
            (tmp_path / folder / "helper.py").write_text("y = 1")
        versions_seen[folder] = code_versions(made_in(f"{folder}.env", tmp_path / folder / "env.py"))["environment"]
    assert versions_seen["one"] == versions_seen["moved"] and len(set(versions_seen.values())) == 3
    # A module of its own stands beside whatever the folder holds.
    alone = code_versions(made_in("env", tmp_path / "helped" / "env.py"))["environment"]
    assert alone == versions_seen["one"]
    # What a base class does, its subclass does.
    base = made_in("base.env", tmp_path / "other" / "env.py")
    assert code_versions(made_in("sub.env", tmp_path / "one" / "env.py", base))["environment"] != versions_seen["one"]


def test_all_that_plays_and_grades_has_a_version() -> None:
    versions_seen = code_versions(ToolEnv)
    assert list(versions_seen) == ["agentrl", "python", *PARTS, "environment"] and all(versions_seen.values())
    assert versions_seen["python"] == platform.python_version() and " sympy 1." in versions_seen["grader"]
    hashes = [versions_seen[part].split()[0] for part in (*PARTS, "environment")]
    assert len({*hashes}) == len(hashes)


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("tools", "toolenv/tools/python.py"),
        ("tools", "toolenv/base.py"),
        ("dialects", "toolenv/dialects/pairs.py"),
        ("renderer", "render/template.py"),
        ("player", "rollout/collector.py"),
        ("grader", "grading/latex/form.py"),
        ("sandbox", "sandboxes/inside/runner.py"),
        ("sandbox", "sandboxes/image/Dockerfile"),
    ],
)
def test_what_is_changed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, changed: str) -> None:
    before, ours = code_versions(ToolEnv), tmp_path / "agentrl"
    for folder in {name for names in PARTS.values() for name in names}:
        (ours / folder).mkdir(parents=True, exist_ok=True)
        for path in (path for path in (versions._OURS / folder).iterdir() if path.is_file()):
            shutil.copy(path, ours / folder)
    monkeypatch.setattr(versions, "_OURS", ours)
    versions._versions.cache_clear()
    assert code_versions(ToolEnv) == before
    with (ours / changed).open("a") as file:
        file.write("\n# another line")
    versions._versions.cache_clear()
    after = code_versions(ToolEnv)
    assert [name for name in before if before[name] != after[name]] == [part]
    versions._versions.cache_clear()


@tool
def shout(text: str) -> str:
    """Write it in capitals."""
    return text.upper()


def test_a_tool_and_the_tables_beside_an_environment_belong_to_it(tmp_path: Path) -> None:
    kind = made_in("mine.env", tmp_path / "env.py")
    (tmp_path / "env.py").write_text("x = 1")
    seen = [code_versions(kind), code_versions(kind, [shout])]
    assert seen[0]["tools"] != seen[1]["tools"] and seen[0]["environment"] == seen[1]["environment"]
    (tmp_path / "words.toml").write_text("a = 1")
    versions._versions.cache_clear()
    assert code_versions(kind)["environment"] != seen[0]["environment"]
