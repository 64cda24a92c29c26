"""Which interpreter a program gets, and that it never matters but for time."""

import tomllib
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from agentrl.sandboxes import Limits, Sandbox, SandboxError, SandboxUnavailable, open_sandbox
from agentrl.sandboxes.host.local import LocalSandbox
from agentrl.sandboxes.host.profiles import profile_of

WORDS: list[list[str]] = tomllib.loads(Path(__file__).with_name("profiles.toml").read_text())["words"]


@pytest.mark.parametrize(("code", "profile"), WORDS)
def test_words_decide(code: str, profile: str) -> None:
    assert profile_of(code) == profile


def test_files_that_come_along_count() -> None:
    assert profile_of("import helper", ["import numpy", b"\xff"]) == "numpy"
    assert profile_of("import helper", [b"\xff import sympy"]) == "sympy"


def test_a_source_made_to_break_a_parser_is_only_text() -> None:
    assert profile_of("(" * 500_000 + "numpy") == "numpy"
    assert profile_of("-" * 1_000_000) == "plain"
    assert profile_of("\x00\udcff") == "plain"


def test_further_packages_are_there_where_they_are_named(sandbox: Sandbox) -> None:
    assert sandbox.run("import sortedcontainers").exc_type == "ModuleNotFoundError"
    with open_sandbox("local", ready=1, packages=["sortedcontainers"]) as own:
        assert own.run("import sortedcontainers as s\n[*s.SortedSet('ba')]").value == "['a', 'b']"
        largest = "import sortedcontainers as s, numpy\nnumpy.max(s.SortedList([1, 2])) == 2"
        assert own.run(largest, timeout=20).status == "ok"
        assert own.run("import hypothesis").exc_type == "ModuleNotFoundError"
        assert own.run("import sortedcontainers as s\nopen(s.__file__, 'w')").exc_type in ("PermissionError", "OSError")


@pytest.mark.parametrize(
    "names", [["no_such_package"], ["six", "no_such_package"], ["a b"], ["..x"], [""], ["numpy.x"]]
)
def test_packages_that_are_not_there_are_said(sandbox: Sandbox, names: list[str]) -> None:
    children = len(psutil.Process().children())
    with pytest.raises(SandboxUnavailable, match=r"can't import .* \(.*Error: .*\): install and name whatever"):
        open_sandbox("local", packages=names)
    assert len(psutil.Process().children()) == children


@pytest.mark.parametrize("error", [SandboxError("its processes ended"), KeyboardInterrupt()])
def test_a_sandbox_that_fails_at_its_first_import_is_closed(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(LocalSandbox, "run", Mock(side_effect=error))
    children = len(psutil.Process().children())
    with pytest.raises(type(error)):
        open_sandbox("local", packages=["six"])
    assert len(psutil.Process().children()) == children


def test_zygotes_start_when_they_are_needed() -> None:
    with LocalSandbox(Limits(), ready=0) as own:
        assert "plain zygote running, numpy zygote waiting, sympy zygote waiting" in own.health().detail
        own.run("1")
        assert "sympy zygote waiting" in own.health().detail
        own.run("import sympy")
        assert "numpy zygote waiting, sympy zygote running" in own.health().detail
