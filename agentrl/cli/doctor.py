"""A diagnosis of this machine: installed versions, and a self-test of every sandbox back end.

Installed parts do not prove that a back end works: it runs programs that try what is forbidden.
"""

import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of ``agentrl doctor``."""

    packages: Mapping[str, str]
    """Versions of Python and of the packages that agentrl can use; ``not installed`` for a missing one."""
    backends: tuple[BackendReport, ...]
    """One report for each sandbox back end."""
    decode_step: str = ""
    """Whether C or PyTorch computes the embedded engine's steps here; empty where it was not tested."""

    @property
    def ok(self) -> bool:
        """True if at least one back end isolates programs here."""
        return any(backend.ok for backend in self.backends)

    @property
    def auto(self) -> str:
        """The back end that ``auto`` takes here, the first that can be opened; empty where none can."""
        return next(
            (backend.name for backend in self.backends if backend.name in BACKENDS and not backend.obstacle), ""
        )

    def row(self) -> dict[str, object]:
        """Return plain data for JSON."""
        backends = [
            asdict(backend)
            | {"checks": [{"name": name, "passed": not seen, "detail": seen} for name, seen in backend.checks.items()]}
            | {"ok": backend.ok}
            for backend in self.backends
        ]
        versions = {"packages": dict(self.packages), "decode_step": self.decode_step}
        return {"ok": self.ok, "auto": self.auto, **versions, "backends": backends}


def versions() -> dict[str, str]:
    """Look up the installed versions, without importing the packages."""
    return {"python": f"{platform.python_version()} ({sys.executable})"} | versions_of(PACKAGES)


def diagnose(*, sandbox: str | None, say: Callable[[str], None]) -> Diagnosis:
    """Look at this machine and test every back end.

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
    if sandbox is not None:
        return Diagnosis(packages={}, backends=tuple(reports))
    return Diagnosis(packages=versions(), backends=tuple(reports), decode_step=decode_step())


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


def show(diagnosis: Diagnosis, display: Display) -> None:
    """Print the diagnosis, a line for each fact."""
    tables = {"versions": [*diagnosis.packages.items()]} if diagnosis.packages else {}
    tables |= {"engine": [("decode step", diagnosis.decode_step)]} if diagnosis.decode_step else {}
    tables |= {"sandbox": [("auto", diagnosis.auto)]} if diagnosis.auto else {}
    tables |= {f"sandbox: {report.name}": _rows(report) for report in diagnosis.backends}
    for title, rows in tables.items():
        display.say(title, "bold")
        width = max(len(name) for name, _ in rows)
        for name, state in rows:
            good, bad = state in ("passed", "works"), state.startswith(("FAILED", "does not work"))
            display.say(f"  {name:{width}}  {state}", "green" if good else "red" if bad else "")
    if not diagnosis.ok:
        display.say("no sandbox works here: environments that run programs can't be played", "bold red")


def _rows(report: BackendReport) -> list[tuple[str, str]]:
    rows = [*report.facts.items()]
    if report.obstacle:
        rows.append(("obstacle", report.obstacle))
    if report.remedy:
        rows.append(("way out", report.remedy))
    rows += [(name, f"FAILED: {seen}" if seen else "passed") for name, seen in report.checks.items()]
    return [*rows, ("verdict", "works" if report.ok else "does not work")]
