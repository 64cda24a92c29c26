import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from agentrl.sandboxes import Sandbox
from agentrl.sandboxes.conformance import cases

HOST_FILES = ["/etc/passwd", "/etc/shadow", "/etc/hostname", "/root", "/home", "/sys", "/var", "/run", "/mnt", __file__]


@pytest.mark.parametrize("path", HOST_FILES)
def test_host_files_are_not_there(sandbox: Sandbox, path: str) -> None:
    assert sandbox.run(f"import os\nos.path.lexists({path!r})").value == "False"


def test_a_secret_beside_the_sandbox_is_not_readable(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s")
    result = sandbox.run(f"open({str(secret)!r}).read()")
    assert result.exc_type == "FileNotFoundError"


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


def test_system_and_packages_are_read_only(sandbox: Sandbox) -> None:
    code = "import os, sys, sympy\nfor p in ('/usr', os.path.dirname(os.__file__), os.path.dirname(sympy.__file__)):\n"
    code += "    try: open(p + '/probe', 'w')\n    except OSError as e: print(e.errno)"
    result = sandbox.run(code)
    assert set(result.stdout.split()) <= {"30", "13"} and len(result.stdout.split()) == 3


def test_other_installed_packages_are_not_visible(sandbox: Sandbox) -> None:
    for name in ("pytest", "agentrl", "torch", "pip"):
        assert sandbox.run(f"import {name}").exc_type == "ModuleNotFoundError", name


def test_our_own_source_is_not_visible(sandbox: Sandbox) -> None:
    assert sandbox.run("import os, sys\n(os.listdir('/opt/agentrl'), 'agentrl' in sys.modules)").value == "([], False)"


def test_environment_and_arguments_tell_nothing_of_the_host(sandbox: Sandbox) -> None:
    os.environ["AGENTRL_TEST_SECRET"] = "s3cret"
    try:
        result = sandbox.run("import os\nprint(dict(os.environ), open('/proc/self/cmdline').read())")
    finally:
        del os.environ["AGENTRL_TEST_SECRET"]
    assert "s3cret" not in result.stdout and str(Path(__file__).parents[2]) not in result.stdout


def test_no_network(sandbox: Sandbox) -> None:
    code = """
import socket
for address in (("127.0.0.1", 80), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, 1)
    except OSError as error:
        print(error.errno)
try:
    socket.getaddrinfo("example.org", 80)
except OSError as error:
    print("no name")
"""
    assert sandbox.run(code).stdout == "101\n101\nno name\n"


def test_no_rights_are_left(sandbox: Sandbox) -> None:
    code = "print(open('/proc/self/status').read())"
    status = dict(line.split(":\t") for line in sandbox.run(code).stdout.splitlines() if ":\t" in line)
    assert {status[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"1000"}


def test_only_the_programs_own_processes_are_visible(sandbox: Sandbox) -> None:
    pids = sandbox.run("import os\nsorted(int(p) for p in os.listdir('/proc') if p.isdigit())").value
    assert pids == "[1, 2]"


def test_descriptors_are_the_expected_six(sandbox: Sandbox) -> None:
    code = "import os\nsum(os.path.lexists(f'/proc/self/fd/{n}') for n in range(1024))"
    assert sandbox.run(code).value == "6"


def test_double_fork_and_setsid_do_not_outlive_the_session(sandbox: Sandbox) -> None:
    marker = f"sleep 98{os.getpid()}"
    code = f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sh", ["sh", "-c", "{marker}; :"])
    os._exit(0)
import time
while True: time.sleep(1)
"""
    assert sandbox.run(code, timeout=0.3).status == "timeout"
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert marker not in found


def test_fork_bomb_leaves_room_for_others(sandbox: Sandbox) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    with sandbox.session() as other:
        other.run("x = 1")
        assert sandbox.run(bomb, timeout=0.5).status == "timeout"
        assert (
            other.run("import subprocess\nsubprocess.run(['/bin/echo', 'x'], capture_output=True).stdout").status
            == "ok"
        )


def test_tmp_and_shm_are_bounded(sandbox: Sandbox) -> None:
    code = """
import errno
for folder in ("/tmp", "/dev/shm"):
    written = 0
    try:
        for n in range(20):
            with open(f"{folder}/f{n}", "wb") as f:
                written += f.write(b"x" * (8 << 20))
    except OSError as error:
        print(folder, error.errno == errno.ENOSPC, written <= 64 << 20)
"""
    assert sandbox.run(code).stdout == "/tmp True True\n/dev/shm True True\n"


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
    outcomes = list(pool.map(lambda case: case.run(sandbox), cases()))
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
def test_conforms_for_an_ordinary_user() -> None:
    command, user = user_command()
    folders = [str(Path(__file__).parents[2] / "agentrl"), sysconfig.get_path("purelib")]
    done = subprocess.run([*command, "-c", AS_USER, *folders], **user, capture_output=True, text=True, cwd="/")
    assert done.stdout.splitlines() == ["False 1000 False", str(len(cases()))], done.stderr
