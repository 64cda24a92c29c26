"""A diagnosis of this machine: installed versions, and a self-test of every sandbox back end.

Installed parts do not prove that a back end works: it runs programs that try what is forbidden.
"""

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Final

from agentrl.cli.selftest import self_test
from agentrl.native import Unavailable
from agentrl.native.build import library
from agentrl.runs.progress import Display
from agentrl.runs.settings import versions_of
from agentrl.sandboxes import BACKENDS, Limits, Sandbox, SandboxError, SandboxUnavailable, open_sandbox
from agentrl.sandboxes.host import requirements
from agentrl.sandboxes.remote.address import PREFIX
from agentrl.toolenv.tools.python import checked_backend

PACKAGES: Final = ("agentrl", "gymnasium", "torch", "transformers", "docker", "rich", "numpy", "sympy")
"""Distributions whose versions are reported; none of them is imported."""
_LIMITS: Final = Limits(cpu_s=2.0, memory_bytes=256 << 20)
_GVISOR: Final = "runsc"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendReport:
    """The state of one back end on this machine."""

    name: str
    """Its name, with the container runtime where one was asked for."""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """The facts that decide if it can run here."""
    obstacle: str = ""
    """The reason why it can't be opened; empty where it can."""
    remedy: str = ""
    """The command that removes the obstacle, where there is one."""
    checks: Mapping[str, str] = field(default_factory=dict[str, str])
    """The fault that each check of the self-test saw, empty where it passed; none where it can't be opened."""

    @property
    def ok(self) -> bool:
        """True if it can be opened and passed every check."""
        return bool(self.checks) and not any(self.checks.values())


def versions() -> dict[str, str]:
    """Look up the installed versions, without importing the packages."""
    return {"python": f"{platform.python_version()} ({sys.executable})"} | versions_of(PACKAGES)


def diagnose(*, sandbox: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Look at this machine and test every back end; return plain data for JSON.

    Args:
        sandbox: a text leaves out the versions of packages; a name is a further back end to test.
        say: receives the progress, one line at a time.

    Raises:
        UsageError: there is no such back end.
    """
    checked_backend(sandbox or "")
    say("local: looking and testing")
    reports = [examine("local", requirements.facts(), lambda: open_sandbox("local", limits=_LIMITS, ready=1))]
    say("docker: looking and testing")
    facts = {"docker SDK": versions_of(["docker"])["docker"]}
    reports.append(examine("docker", facts, lambda: open_sandbox("docker", limits=_LIMITS, ready=1)))
    if reports[-1].checks:
        # Docker with gVisor isolates differently, so it has a report of its own.
        opened = partial(open_sandbox, "docker", runtime=_GVISOR, limits=_LIMITS, ready=1)
        reports.append(examine(f"docker, runtime {_GVISOR}", facts, opened))
    if sandbox:
        # Servers have limits of their own.
        options: dict[str, Any] = {} if sandbox.startswith(PREFIX) else {"limits": _LIMITS, "ready": 1}
        reports.append(examine(sandbox, {}, partial(open_sandbox, sandbox, **options)))
    about = {"packages": versions(), "decode_step": decode_step()} if sandbox is None else {}
    return summary(reports) | {"packages": {}, "decode_step": "", **about}


def summary(reports: Sequence[BackendReport]) -> dict[str, Any]:
    """Return what holds for all back ends, and the report of each, as plain data.

    The machine is ``ok`` if at least one of them isolates programs. ``auto`` is the first that can be opened, which the
    back end of that name takes.
    """
    opened = (report.name for report in reports if report.name in BACKENDS and not report.obstacle)
    rows = [{**asdict(report), "ok": report.ok} for report in reports]
    return {"ok": any(report.ok for report in reports), "auto": next(opened, ""), "backends": rows}


def decode_step() -> str:
    """Compile the embedded engine's step, or return why PyTorch has to compute it."""
    try:
        return f"in C, {library().digest}"
    except Unavailable as why:
        return f"by PyTorch, several times as slow: {why}"


def examine(name: str, facts: Mapping[str, str], opened: Callable[[], Sandbox]) -> BackendReport:
    """Open a back end and run the self-test in it.

    Args:
        name: its name in the report.
        facts: facts that are known already; its state joins them.
        opened: opens it.
    """
    try:
        with opened() as sandbox:
            checks = self_test(sandbox)
            facts = {**facts, "state": sandbox.health().detail}
    except SandboxUnavailable as error:
        return BackendReport(name=name, facts=facts, obstacle=str(error), remedy=error.remedy)
    except SandboxError as error:
        return BackendReport(name=name, facts=facts, obstacle=f"it opens, but fails: {error}")
    return BackendReport(name=name, facts=facts, checks=checks)


def show(diagnosis: Mapping[str, Any], display: Display) -> None:
    """Print the result of ``diagnose``, a line for each fact."""
    tables: dict[str, list[tuple[str, str]]] = {
        "versions": [*diagnosis["packages"].items()],
        "engine": [("decode step", diagnosis["decode_step"])],
        "sandbox": [("auto", diagnosis["auto"])],
        **{f"sandbox: {report['name']}": _rows(report) for report in diagnosis["backends"]},
    }
    for title, rows in tables.items():
        if not any(state for _, state in rows):
            continue
        display.say(title, "bold")
        width = max(len(name) for name, _ in rows)
        for name, state in rows:
            good, bad = state in ("passed", "works"), state.startswith(("FAILED", "does not work"))
            display.say(f"  {name:{width}}  {state}", "green" if good else "red" if bad else "")
    if not diagnosis["ok"]:
        display.say("no sandbox works here: environments that run programs can't be played", "bold red")


def _rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [*report["facts"].items(), ("obstacle", report["obstacle"]), ("way out", report["remedy"])]
    rows += [(name, f"FAILED: {seen}" if seen else "passed") for name, seen in report["checks"].items()]
    return [*filter(itemgetter(1), rows), ("verdict", "works" if report["ok"] else "does not work")]
