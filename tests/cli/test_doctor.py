"""The doctor: it looks without importing, believes no back end that lets something through, and names the way out."""

import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cli import doctor
from agentrl.cli.doctor import BackendReport, examine, summary
from agentrl.errors import UsageError
from agentrl.runs.progress import Display
from agentrl.sandboxes import Limits, Result, Sandbox, SandboxError, SandboxUnavailable, Session
from agentrl.sandboxes.base import Counters, Health

from ..conftest import ROOT, python
from .conftest import Command


class Naked(Sandbox):
    """Runs a program in a process of its own that nothing isolates: what the self-test must see through."""

    backend, limits, closed = "naked", Limits(), False

    def run(self, code: str, *, stdin: str = "", **_: Any) -> Result:
        if "while True" in code or "fork" in code:
            return Result(status="ok")
        done = subprocess.run([sys.executable, "-c", code], input=stdin, capture_output=True, text=True)
        return Result(status="ok" if done.returncode == 0 else "error", stdout=done.stdout)

    def session(self, seed: int = 0) -> Session:
        raise NotImplementedError

    def counters(self) -> Counters:
        return Counters()

    def health(self) -> Health:
        return Health(ok=True, backend="naked", sessions=0, ready=0, detail="")

    def close(self) -> None:
        self.closed = True


def test_what_is_named_with_its_version_is_what_one_can_install() -> None:
    offered = {re.split(r"[^\w-]", line)[0] for line in importlib.metadata.requires("agentrl") or ()}
    assert set(doctor.PACKAGES) <= {"agentrl", "numpy", *offered}, "numpy comes with gymnasium"


def test_self_test_sees_through_what_isolates_nothing() -> None:
    naked = Naked()
    report = examine("naked", {}, lambda: naked)
    assert naked.closed and not report.ok and not report.obstacle
    failed = {name: seen for name, seen in report.checks.items() if seen}
    # A machine without a network has no routes of its own.
    assert len(report.checks) == 6 and {*report.checks} - {*failed} <= {"runs a program", "no way into a network"}
    assert "CONNECTED" in failed["host's ports are out of reach"] and "S3CRET" in failed["host files are hidden"]
    assert "status ok" in failed["endless loop is a timeout"] and "status ok" in failed["memory is limited"]


@pytest.mark.parametrize(
    ("error", "obstacle", "remedy"),
    [
        (SandboxUnavailable("it is forbidden", remedy="sysctl -w it=1"), "it is forbidden", "sysctl -w it=1"),
        (SandboxError("no zygote"), "it opens, but fails: no zygote", ""),
    ],
)
def test_back_end_that_can_not_be_opened(error: Exception, obstacle: str, remedy: str) -> None:
    def fail() -> Sandbox:
        raise error

    report = BackendReport(name="local", facts={"kernel": "Linux"}, obstacle=obstacle, remedy=remedy)
    assert examine("local", {"kernel": "Linux"}, fail) == report and not report.ok


GOOD = BackendReport(name="local", facts={"kernel": "Linux 6"}, checks={"runs a program": ""})
BAD = BackendReport(name="docker", obstacle="no daemon answers", remedy="systemctl start docker")
LEAKY = replace(GOOD, checks={**GOOD.checks, "host files are hidden": "reached"})


@pytest.mark.parametrize(
    ("backends", "ok"),
    [((GOOD, BAD), True), ((BAD,), False), ((LEAKY, BAD), False), ((LEAKY, GOOD), True), ((), False)],
)
def test_one_back_end_that_passes_is_enough(backends: tuple[BackendReport, ...], ok: bool) -> None:
    row = json.loads(json.dumps(summary(backends)))
    assert row["ok"] is ok and row["auto"] == ("local" if GOOD in backends or LEAKY in backends else "")
    assert [report["checks"] for report in row["backends"]] == [report.checks for report in backends]


def test_show() -> None:
    def shown(*reports: BackendReport, **packages: str) -> str:
        doctor.show(summary(reports) | {"packages": packages, "decode_step": ""}, Display(out := io.StringIO()))
        return out.getvalue()

    bad = shown(LEAKY, BAD, torch="not installed")
    for text in ("versions", "torch", "sandbox: local", "kernel", "FAILED: reached", "no daemon answers", BAD.remedy):
        assert text in bad
    good = shown(GOOD)
    assert "no sandbox works here" in bad and "no sandbox" not in good
    assert "works" in good and "versions" not in good


def test_versions_import_nothing() -> None:
    code = "import sys\nfrom agentrl.cli.doctor import versions\nv = versions()\nprint(v['python'], v['gymnasium'])\n"
    loaded = "print(sorted({'torch', 'transformers', 'vllm', 'docker', 'rich', 'numpy', 'sympy'} & set(sys.modules)))"
    version, modules = python("-c", code + loaded).stdout.splitlines()
    assert version.startswith(f"{sys.version_info.major}.{sys.version_info.minor}.") and "not installed" not in version
    assert modules in ("[]", "['numpy']")  # gymnasium is made of numpy; nothing heavier may come


@pytest.mark.slow
def test_command_tells_what_works(sandbox: Sandbox, command: Command) -> None:
    out, err = command("doctor", "--json")
    report = json.loads(out)
    assert report["ok"] and report["packages"]["agentrl"] and "local" in err and report["auto"] == "local"
    local, docker, *_ = report["backends"]  # where Docker works, a third one is Docker with gVisor
    assert (local["name"], docker["name"]) == ("local", "docker")
    assert local["ok"] and local["facts"]["kernel"].startswith("Linux")
    assert len(local["checks"]) == 6
    assert docker["ok"] or docker["obstacle"] or any(docker["checks"].values())


def test_a_back_end_of_ones_own_is_tested_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda name, *_: replace(GOOD, name=name))
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(naked=Naked))
    diagnosis = doctor.diagnose(sandbox="mine:naked", say=lambda _: None)
    names = [report["name"] for report in diagnosis["backends"]]
    assert [name for name in names if "docker" not in name] == ["local", "mine:naked"]
    assert diagnosis["auto"] == "local" and not diagnosis["packages"]
    with pytest.raises(UsageError, match="'mine:nakd' is not in mine; did you mean 'naked'"):
        doctor.diagnose(sandbox="mine:nakd", say=lambda _: None)


def test_command_fails_where_nothing_works(sandbox: Sandbox, require: Callable[[bool, str], None]) -> None:
    require(shutil.which("unshare") is not None, "needs the unshare tool")
    code = "import sys\nfrom agentrl.cli import main\nsys.exit(main(['doctor', '--sandbox', '--json']))"
    shell = f'echo 0 > /proc/sys/user/max_user_namespaces && exec "{sys.executable}" -c "$CODE"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", shell]
    env = {**os.environ, "CODE": code, "DOCKER_HOST": "unix:///nowhere/docker.sock"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert not report["ok"] and not report["packages"]
    local, *_ = report["backends"]
    assert local["remedy"] == "sysctl -w user.max_user_namespaces=10000"
    assert local["facts"]["max_user_namespaces"] == "0"
