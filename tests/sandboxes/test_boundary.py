import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from agentrl.sandboxes import Sandbox
from agentrl.sandboxes.conformance import cases


def test_only_scratch_folders_can_be_written(sandbox: Sandbox) -> None:
    code = """
import os
good = []
for top, folders, names in os.walk("/"):
    folders[:] = [f for f in folders if os.path.join(top, f) not in ("/proc", "/usr", "/opt/python", "/opt/site")]
    try:
        open(os.path.join(top, "probe"), "w").close()
        good.append(top)
    except OSError:
        pass
print(sorted(good))
"""
    assert sandbox.run(code).stdout == "['/dev/shm', '/tmp']\n"


AS_USER = """
import sys, types, os
from concurrent.futures import ThreadPoolExecutor
# Only what stands in our folder is read: an ordinary user may not read the packages beside it.
package = types.ModuleType("agentrl"); package.__path__ = [sys.argv[1]]; sys.modules["agentrl"] = package
sys.path.append(sys.argv[2])
os.chdir("/")
from agentrl.sandboxes import Limits, open_sandbox
from agentrl.sandboxes.conformance import cases
with open_sandbox(limits=Limits(wall_factor=2.0)) as sandbox, ThreadPoolExecutor(4) as pool:
    print(os.getuid() == 0, sandbox.run("import os; print(os.getuid(), os.path.exists('/etc/passwd'))").stdout, end="")
    outcomes = list(pool.map(lambda case: case.run(sandbox), cases(sys.argv[3:] or None)))
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
    folders = [str(Path(__file__).parents[2] / "agentrl"), sysconfig.get_path("purelib")]
    done = subprocess.run([*command, "-c", AS_USER, *folders, *only], **user, capture_output=True, text=True, cwd="/")
    assert done.stdout.splitlines() == ["False 1000 False", str(len(cases(only or None)))], done.stderr
