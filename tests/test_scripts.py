"""The scripts a newcomer runs first, and what makes them heal; and that CI can't pass by skipping."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from .forked import Server

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
Shell = Callable[..., subprocess.CompletedProcess[str]]


def bash(code: str, *, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run bash code as a script would: any failing command ends it."""
    command = ["bash", "-c", f"set -euo pipefail\n{code}"]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with nothing but the scripts and a package that installs without network; its name has a space."""
    root = tmp_path / "a clone"
    shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("benchmarks"))
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "constraints.txt").write_text("")
    return root


FAKE_PYTHON = """#!/bin/bash
# Stands in for python -m venv and pip, which need a network; everything else is the real Python's work.
case "$*" in
  "-m venv"*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" && echo "# ${@: -1}/bin/" >"${@: -1}/bin/pip" ;;
  "-m pip --version") ;;
  "-m pip install"*)
    echo "pip $PWD ${@: -1}" >>"$LOG"
    printf '%s\\n' "Collecting torch" "  Downloading https://a/b/torch-2.9-x.whl (899.8 MB)"
    echo "Installing collected packages: torch"
    [ -z "${FAIL:-}" ] || { echo "no network" >&2; exit 3; } ;;
  *sys.prefix*) dirname "$(dirname "$0")" ;;
  *find_spec*|*ensurepip*) ;;
  *sys.executable*) echo "$0" ;;
  *) exec REAL "$@" ;;
esac
"""


@pytest.fixture
def install(clone: Path, tmp_path: Path) -> Shell:
    """Run ``install_extra EXTRA`` in the clone from another folder; the attempts to install are in ``pip.log``."""
    fake = tmp_path / "python-fake"
    fake.write_text(FAKE_PYTHON.replace("REAL", sys.executable))
    fake.chmod(0o755)

    def run(extra: str, **env: str) -> subprocess.CompletedProcess[str]:
        code = f'source "{clone}/scripts/lib.sh"; install_extra {extra}; echo done'
        return bash(code, cwd=Path("/"), PYTHON=str(fake), LOG=str(tmp_path / "pip.log"), **env)

    return run


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh", "install_vllm_cpu.sh", "get_smollm2.sh"])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_says_what_the_script_does_and_does_nothing(clone: Path, name: str, flag: str) -> None:
    shown = subprocess.run([clone / "scripts" / name, flag], cwd="/", capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stdout.startswith(f"Usage: scripts/{name} [")
    assert not shown.stderr and not (clone / ".venv").exists()


@pytest.mark.parametrize("path", [*SCRIPTS.glob("*.sh"), ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_bash_can_read_the_script_and_it_may_be_run(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    assert os.access(path, os.X_OK) == (path.name not in {"lib.sh", "engine.sh"}), "what is only sourced is not run"


SHOWING = ["chaos_sandboxes", "estimator_report", "soak", "real_templates"]
SHOWING += [f"benchmarks/{name}" for name in ("head", "sandboxes", "viewer")]


@pytest.mark.parametrize("name", SHOWING)
def test_help_shows_examples(server: Server, name: str) -> None:
    shown = server.run(SCRIPTS / f"{name}.py", "--help", cwd=Path("/"))
    assert shown.returncode == 0 and re.search(rf"examples:\n  (python scripts/)?{Path(name).name}\.py", shown.stdout)


def test_root_does_not_depend_on_the_working_directory(tmp_path: Path) -> None:
    relative = os.path.relpath(SCRIPTS, tmp_path)
    shown = bash(f'source "{relative}/lib.sh"; cd /; echo "$ROOT|$VENV"', cwd=tmp_path)
    assert shown.stdout.strip() == f"{ROOT}|{ROOT}/.venv"


def without_python(folder: Path, scripts: Mapping[str, str]) -> str:
    """A PATH with bash's helpers and the given programs only."""
    folder.mkdir()
    for tool in ("bash", "dirname", "env", "cat", "sha256sum", "cut", "flock", "touch"):
        (folder / tool).symlink_to(str(shutil.which(tool)))
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("scripts", "wanted"),
    [
        ({}, "apt-get install python3 python3-venv"),
        ({"python3": "exit 127"}, "apt-get install python3 python3-venv"),
        ({"python3": "echo"}, "needs Python 3.11 or newer"),
        ({"python3": '[[ "$*" != *ensurepip* ]] && echo /usr/bin/env'}, "install the missing part with"),
    ],
    ids=["none", "a version manager's stand-in", "too old", "no venv module"],
)
@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh"])
def test_missing_python_is_said(clone: Path, tmp_path: Path, scripts: dict[str, str], wanted: str, name: str) -> None:
    path = without_python(tmp_path / "bin", scripts)
    shown = bash(f'"{clone}/scripts/{name}"', cwd=tmp_path, PATH=path, PYTHON="")
    assert shown.returncode != 0
    assert wanted in shown.stderr and len(shown.stderr.splitlines()) == 1


def test_missing_venv_module_names_the_package_of_that_python(clone: Path, tmp_path: Path) -> None:
    python = tmp_path / "python3.12"
    python.write_text('#!/bin/bash\n[[ "$*" != *ensurepip* ]] && echo "$0"\n')
    python.chmod(0o755)
    shown = bash(f'source "{clone}/scripts/lib.sh"; find_python', cwd=tmp_path, PYTHON=str(python))
    assert shown.stderr.strip().endswith("apt-get install python3.12-venv")


def test_second_run_installs_nothing(clone: Path, install: Shell, tmp_path: Path) -> None:
    run_1, run_2 = install("train"), install("train")
    assert run_1.stdout == run_2.stdout == "done\n"
    assert run_1.stderr.splitlines()[1].endswith("minutes)"), "then what it does, while it does it"
    assert run_1.stderr.splitlines()[2:] == ["    downloading torch-2.9-x.whl, 899.8 MB", "    unpacking all of them"]
    assert not run_2.stderr
    assert (tmp_path / "pip.log").read_text() == f"pip {clone} .[train]\n"


def test_ci_contains_dev_and_dev_train_but_not_the_reverse(install: Shell, tmp_path: Path) -> None:
    for extra in ("train", "dev", "train", "ci", "dev", "train", "ci"):
        install(extra)
    installed = [line.split()[-1] for line in (tmp_path / "pip.log").read_text().splitlines()]
    assert installed == [".[train]", ".[dev]", ".[ci]"]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_change_of_what_is_wanted_installs_again(clone: Path, install: Shell, tmp_path: Path, name: str) -> None:
    install("train")
    (clone / name).write_text("changed\n")
    install("train")
    assert len((tmp_path / "pip.log").read_text().splitlines()) == 2


def test_failed_installation_is_an_error_and_is_begun_anew(clone: Path, install: Shell) -> None:
    failed = install("train", FAIL="1")
    assert failed.returncode != 0 and "done" not in failed.stdout
    assert "no network" in failed.stderr and "Run this again" in failed.stderr
    again = install("train")
    assert again.stdout == "done\n" and "Making a virtual environment" in again.stderr
    assert not (clone / ".venv" / ".agentrl-installing").exists()


@pytest.mark.parametrize("broken", ["bin/python", "bin/pip", ".agentrl-installing"])
def test_broken_environment_heals(clone: Path, install: Shell, broken: str) -> None:
    install("train")
    (clone / ".venv" / broken).write_text("")
    again = install("train")
    assert again.stdout == "done\n" and "Making a virtual environment" in again.stderr
    assert not install("train").stderr


def test_moved_repository_gets_a_new_environment(clone: Path, install: Shell) -> None:
    install("train")
    moved = clone.rename(clone.with_name("moved"))
    clone.mkdir()
    shutil.move(moved / ".venv", clone / ".venv-old")
    shutil.copytree(moved, clone, dirs_exist_ok=True)
    (clone / ".venv-old" / "bin" / "pip").write_text("# elsewhere/.venv/bin/python")
    (clone / ".venv-old").rename(clone / ".venv")
    assert "Making a virtual environment" in install("train").stderr


@pytest.mark.slow
@pytest.mark.ci
def test_real_environment_is_sound_and_a_hollow_one_is_not(clone: Path) -> None:
    sourced = f'source "{clone}/scripts/lib.sh"'
    check = f"{sourced}; make_venv; sound >/dev/null && echo sound; sound >/dev/null && echo again"
    assert bash(check, cwd=Path("/"), PYTHON=sys.executable).stdout.split() == ["sound", "again"]
    (clone / ".venv" / ".agentrl-train").write_text("a stamp of packages that are not there")
    assert bash(f"{sourced}; sound >/dev/null 2>&1 || echo hollow", cwd=Path("/")).stdout.strip() == "hollow"


SKIPS = {
    "fixture": "def test(require):\n    require(False, 'needs a piece')",
    "call": "import pytest\ndef test():\n    pytest.skip('needs a piece')",
    "module": "import pytest\npytest.importorskip('no_such_module')\ndef test(): pass",
    "mark": "import pytest\n@pytest.mark.skipif(True, reason='needs a piece')\ndef test(): pass",
}


@pytest.fixture
def pytest_of(server: Server, tmp_path: Path) -> Shell:
    """Run pytest on files of the given texts, beside this folder's conftest."""

    def run(*texts: str, ci: str = "0", **env: str) -> subprocess.CompletedProcess[str]:
        (folder := tmp_path / "tests").mkdir(exist_ok=True)
        for name in ("conftest.py", "deadlines.py", "seconds.toml"):
            shutil.copy(ROOT / "tests" / name, folder)
        for number, text in enumerate(texts):
            (folder / f"test_{number}.py").write_text(text)
        words = ["-qs", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", os.devnull, "--rootdir", tmp_path]
        env = {**os.environ, "AGENTRL_CI": ci, **env}
        return server.run("-m", "pytest", *words, "--continue-on-collection-errors", ".", cwd=tmp_path, env=env)

    return run


@pytest.mark.slow
@pytest.mark.ci
def test_skips_fail_in_ci_only(pytest_of: Shell) -> None:
    assert "4 skipped" in pytest_of(*SKIPS.values()).stdout
    shown = pytest_of(*SKIPS.values(), ci="1")
    assert "2 failed, 1 warning, 2 errors in" in shown.stdout
    assert shown.stdout.count("\nAGENTRL_CI=1 allows no skips: ") == 4


@pytest.mark.slow
@pytest.mark.ci
def test_expected_failures_and_present_pieces_pass_in_ci(pytest_of: Shell) -> None:
    text = "import pytest\n@pytest.mark.xfail\ndef test_a():\n    assert 0\ndef test_b(require):\n    require(True, '')"
    shown = pytest_of(text, ci="1")
    assert shown.returncode == 0 and "1 passed, 1 xfailed" in shown.stdout
