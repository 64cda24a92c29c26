"""The programs of the conformance suite hold where an ordinary user opens the sandbox."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from .conformance import cases

ROOT = Path(__file__).parents[2]
AS_USER = """
import sys, types, os
from concurrent.futures import ThreadPoolExecutor
# Only what stands in our folder is read: an ordinary user may not read the packages beside it.
package = types.ModuleType("agentrl"); package.__path__ = [sys.argv[1]]; sys.modules["agentrl"] = package
sys.path += sys.argv[2:4]
os.chdir("/")
from agentrl.sandboxes import Limits, open_sandbox
from conformance import cases
with open_sandbox(limits=Limits(wall_factor=2.0)) as sandbox, ThreadPoolExecutor(4) as pool:
    print(os.getuid() == 0, sandbox.run("import os; print(os.getuid(), os.path.exists('/etc/passwd'))").stdout, end="")
    outcomes = list(pool.map(lambda case: case.run(sandbox), cases(sys.argv[4:] or None)))
print(len(outcomes))
print(*(outcome for outcome in outcomes if not outcome.passed), sep="\\n", end="")
"""


def user_command() -> tuple[list[str], dict[str, Any]]:
    """A Python that an ordinary user may run, with the version of this one, and who that is for ``subprocess.run``."""
    if os.geteuid() != 0:
        return [sys.executable], {}
    as_nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
    probe = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            done = subprocess.run([python, "-c", probe], **as_nobody, cwd="/", env={}, capture_output=True)
        except OSError:
            continue
        if done.returncode == 0:
            return [python], as_nobody
    pytest.skip("no Python of this version that an ordinary user may run")


@pytest.mark.slow
@pytest.mark.parametrize("only", [["fs", "net", "priv", "state"], pytest.param([], marks=pytest.mark.ci)])
def test_conforms_for_an_ordinary_user(only: list[str]) -> None:
    command, user = user_command()
    folders = [ROOT / "agentrl", sysconfig.get_path("purelib"), ROOT / "tests" / "sandboxes"]
    done = subprocess.run([*command, "-c", AS_USER, *folders, *only], **user, capture_output=True, text=True, cwd="/")
    assert done.stdout.splitlines() == ["False 1000 False", str(len(cases(only or None)))], done.stderr
