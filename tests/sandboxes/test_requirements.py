"""Where a machine forbids namespaces, the message names what stands in the way and the way out."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.sandboxes import Sandbox

ROOT = Path(__file__).parents[2]
OPEN = """
from agentrl.sandboxes import SandboxUnavailable, open_sandbox
try:
    open_sandbox("local")
except SandboxUnavailable as error:
    print(error)
else:
    print("opened")
"""
FILTERED = f"""
import os
from agentrl.sandboxes.inside import kernel, seccomp
filter = seccomp.assemble(kernel.MACHINE, 128)
kernel.drop_privileges()
seccomp.install(filter)
{OPEN}
"""


def say(code: str, before: str = ":") -> str:
    """Run Python after shell commands, in a user and mount namespace where the user is root."""
    shell = f'{before} && exec "{sys.executable}" -c "$CODE"'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", shell],
        **{"capture_output": True, "text": True, "cwd": ROOT, "env": {**os.environ, "CODE": code}},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def needs_unshare(require: Callable[[bool, str], None], sandbox: Sandbox) -> None:
    require(shutil.which("unshare") is not None, "needs the unshare tool")


def test_no_more_user_namespaces(tmp_path: Path) -> None:
    message = say(OPEN, f"export TMPDIR={tmp_path} && echo 0 > /proc/sys/user/max_user_namespaces")
    assert "max_user_namespaces is 0" in message and "sysctl -w user.max_user_namespaces=10000" in message
    assert list(tmp_path.iterdir()) == [], "a start that failed leaves nothing behind"


def test_an_outer_filter() -> None:
    message = say(FILTERED)
    assert "seccomp" in message and "--security-opt seccomp=unconfined" in message
