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


@pytest.mark.parametrize(
    ("first", "loaded"), [("1", "[]"), ("import numpy", "['numpy']"), ("import sympy", "['numpy', 'sympy']")]
)
def test_sessions_have_imported_what_the_first_cell_names(sandbox: Sandbox, first: str, loaded: str) -> None:
    pytest.importorskip("sympy")
    with sandbox.session() as session:
        session.run(first)
        look = "import sys\nsorted(n for n in sys.modules if n in ('nump' + 'y', 'symp' + 'y'))"
        assert session.run(look).value == loaded


def test_a_later_cell_may_import_what_was_not_foreseen(sandbox: Sandbox) -> None:
    np = pytest.importorskip("numpy")
    drawn = np.random.RandomState(3).rand()
    with sandbox.session(seed=3) as session, sandbox.session(seed=3) as foreseen:
        session.run("x = 1")
        late = session.run("import numpy as np\n(x, int(np.arange(4).sum()), np.random.rand())", timeout=20)
        assert late.value == repr((1, 6, drawn))
        assert foreseen.run("import numpy as np\nnp.random.rand()").value == repr(drawn)
        # It is seeded once, and looks ordinary.
        session.run("np.random.seed(5)")
        assert session.run("import numpy.random\nnp.random.rand() == np.random.RandomState(5).rand()").value == "True"
        session.run("import sys\nspec = np.random.__spec__")
        code = "(type(spec.loader).__name__, spec.loader is np.random.__loader__, len(sys.meta_path))"
        assert session.run(code).value == "('SourceFileLoader', True, 3)"


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


def test_replay_chooses_the_same_interpreter_and_random_state(sandbox: Sandbox) -> None:
    pytest.importorskip("numpy")
    with sandbox.session(seed=11) as session:
        session.run("import random, numpy as np\na = random.random(), np.random.rand()")
        session.run("random.random(); np.random.rand()\nwhile True: pass", timeout=0.2)
        session.run("b = random.random(), np.random.rand()\n1 / 0")
        with session.replay() as again, again.replay() as thrice:
            values = [one.run("(a, b, random.random(), np.random.rand())").value for one in (session, again, thrice)]
            assert values[0] == values[1] == values[2]
