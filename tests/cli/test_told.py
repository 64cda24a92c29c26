"""A command that needs a sandbox says at once that there is none: before PyTorch is loaded, and in one sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import ROOT

QUICK = ("--preset", "quickstart")
SERVER = ("--engine", "openai", "--base-url", "http://127.0.0.1:9", "--model", "none")
EXAMPLE = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]


def without_a_sandbox(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS`` where neither namespaces nor Docker are to be had."""
    command = [sys.executable, ROOT / "tests" / "no_namespaces.py", *words]
    env = os.environ | {"DOCKER_HOST": "unix:///none", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ("train", *QUICK),
        ("sweep", *QUICK, "--vary", "optim.lr=1e-3,2e-3"),
        ("eval", *QUICK, *SERVER),
        ("play", "agentrl/Arithmetic-v0"),
        ("check-env", "agentrl/Arithmetic-v0"),
    ],
    ids=lambda argv: argv[0],
)
def test_no_sandbox_is_told_before_pytorch_is_loaded(tmp_path: Path, argv: tuple[str, ...]) -> None:
    done = without_a_sandbox(tmp_path, "-X", "importtime", "-m", "agentrl", *argv)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 1 and done.stdout == "" and len(lines) == 1, lines
    assert lines[0].startswith("agentrl: no sandbox can be opened here. local: ") and "--security-opt" in lines[0]
    assert ("--set env.id=agentrl/Countdown-v0" in lines[0]) == (argv[0] == "train")
    assert "| torch\n" not in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_example_of_the_readme_says_it_too(tmp_path: Path) -> None:
    done = without_a_sandbox(tmp_path, "-c", EXAMPLE)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "InfrastructureError: sandbox failed: no sandbox can be opened here" in last
    assert "| torch\n" not in done.stderr


@pytest.mark.slow
def test_what_runs_no_programs_needs_no_sandbox(tmp_path: Path) -> None:
    settings = ("env.id=agentrl/Countdown-v0", "env.args={level=1,tool=false}")
    words = [word for setting in settings for word in ("--set", setting)]
    done = without_a_sandbox(tmp_path, "-m", "agentrl", "train", *QUICK, *words, "--set", "optim.lr=oops")
    assert "setting 'optim.lr'" in done.stderr
    code = "import agentrl; env = agentrl.make('agentrl/Countdown-v0', tool=False); env.reset(seed=0); print('played')"
    assert without_a_sandbox(tmp_path, "-c", code).stdout == "played\n"
