"""The table of mutants fits the code, and the script around it tells who is killed, in a copy, and by whom."""

import ast
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import load_script
from .forked import Server

script = load_script("mutants")
SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def test_every_mutant_fits_the_code() -> None:
    for mutant in script.load():
        (patch,) = mutant.patches
        text = (script.ROOT / patch.file).read_text(encoding="utf-8")
        assert text.count(patch.old) == 1, f"{mutant.name}: {patch.file} does not hold {patch.old!r} once"
        assert patch.old != patch.new, mutant.name
        if patch.file.endswith(".py"):
            ast.parse(text.replace(patch.old, patch.new))


def test_every_mutant_is_watched_by_tests_that_exist() -> None:
    names = Counter(mutant.name for mutant in script.load())
    assert set(names.values()) == {1}
    for mutant in script.load():
        for test in mutant.watch:
            file, _, function = test.partition("::")
            assert f"def {function}" in (script.ROOT / file).read_text(encoding="utf-8"), mutant.name


TREE = {
    "agentrl/__init__.py": "",
    "agentrl/sum.py": "def add(a, b):\n    return a + b\n",
    "tests/test_sum.py": """
import subprocess, sys
from agentrl.sum import add
def test_small():
    assert add(2, 2) == 4
def test_in_a_process():
    assert subprocess.check_output([sys.executable, "-c", "from agentrl.sum import add; print(add(0, 3))"]) == b"3\\n"
def test_nothing():
    assert add
""",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-ra --import-mode=importlib'\n",
    "scripts/mutants.toml": """
["agentrl/sum.py"]
tests = ["tests/test_sum.py"]
less = ["subtracts", 'a + b', 'a - b']
times = ["multiplies", 'a + b', 'a * b', "tests/test_sum.py::test_in_a_process"]
spared = ["subtracts, and nobody looks", 'a + b', 'a - b', "tests/test_sum.py::test_nothing"]
unfit = ["is not there", 'a + c', 'a - b']
untested = ["has no test", 'a + b', 'a - b', "tests/test_none.py"]
""",
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script on a small tree of its own."""
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for link in ("envs", "sandboxes"):
        (tmp_path / link).mkdir()
        (tmp_path / "agentrl" / link).symlink_to(f"../{link}")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they begin in half the time
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "TABLE", tmp_path / "scripts" / "mutants.toml")
    return script


@pytest.mark.slow
def test_who_is_killed_and_who_survives(small: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.main(["--only", "less", "--only", "times", "--only", "sp*"]) == 1
    out = capsys.readouterr().out
    assert "without any mutant ... all tests pass" in out and out.endswith("2 of 3 mutants are killed\n")
    assert "[1/3] less   subtracts -> killed by tests/test_sum.py::test_small (" in out
    assert "[2/3] times  multiplies -> killed by tests/test_sum.py::test_in_a_process (" in out, "a process sees it too"
    assert "[3/3] spared subtracts, and nobody looks -> SURVIVED" in out
    assert "a + b" in (small.ROOT / "agentrl" / "sum.py").read_text(), "the tree itself is never touched"


@pytest.mark.slow
def test_what_means_nothing_is_told(small: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.main(["--only", "unfit"]) == 2
    assert "unfit: agentrl/sum.py holds 0 times, not once: 'a + c'" in capsys.readouterr().out
    assert small.main(["--only", "untested"]) == 2
    assert "pytest can't run tests/test_none.py" in capsys.readouterr().out
    (small.ROOT / "agentrl" / "sum.py").write_text("def add(a, b):\n    return a + b + 1\n")
    assert small.main(["--only", "less"]) == 2
    assert "fails without a mutation: tests/test_sum.py::test_small: look at it first" in capsys.readouterr().out


def test_tests_that_never_end_kill(small: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "PATIENCE_S", 0.01)
    assert small.play(["tests/test_sum.py"]) == "(no end after 0 s)"


def test_help_and_list_and_an_unknown_name(server: Server, tmp_path: Path) -> None:
    run = partial(server.run, SCRIPTS / "mutants.py", cwd=tmp_path)
    shown = run("--help")
    assert shown.returncode == 0 and "--only 'T*' --only S01" in shown.stdout and "Exit status" in shown.stdout
    shown = run("--list", "--only", "T0*")
    assert shown.returncode == 0 and len(shown.stdout.splitlines()) == 9
    shown = run("--only", "nonesuch")
    assert (shown.returncode, shown.stdout) == (2, "no mutation has such a name\n")
