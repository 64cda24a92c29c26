"""Versions change with the code that plays and grades, and with nothing else."""

import platform
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.toolenv.base import ToolEnv
from agentrl.toolenv.versions import versions_of


def made_in(module: str, file: Path, base: type[ToolEnv] = ToolEnv) -> type[ToolEnv]:
    sys.modules[module] = ModuleType(module)
    sys.modules[module].__file__ = str(file)
    return type("Made", (base,), {"__module__": module})


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def test_an_environment_s_version_follows_its_code(tmp_path: Path) -> None:
    for folder in ("one", "moved", "other", "helped"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "env.py").write_text("x = 1" if folder != "other" else "x = 2")
    (tmp_path / "helped" / "helper.py").write_text("y = 1")
    found = {
        folder: versions_of(made_in(f"{folder}.env", tmp_path / folder / "env.py"))["environment"]
        for folder in ("one", "moved", "other", "helped")
    }
    assert found["one"] == found["moved"] and len(set(found.values())) == 3
    # A module of its own stands beside whatever the folder holds.
    alone = versions_of(made_in("env", tmp_path / "helped" / "env.py"))["environment"]
    assert alone == found["one"]
    # What a base class does, its subclass does.
    base = made_in("base.env", tmp_path / "other" / "env.py")
    assert versions_of(made_in("sub.env", tmp_path / "one" / "env.py", base))["environment"] != found["one"]


def test_all_that_plays_and_grades_has_a_version() -> None:
    found = versions_of(ToolEnv)
    assert list(found) == ["agentrl", "python", "environment", "grader", "sandbox"] and all(found.values())
    assert found["python"] == platform.python_version() and " sympy 1." in found["grader"]
    assert len({found["environment"], found["grader"].split()[0], found["sandbox"]}) == 3
