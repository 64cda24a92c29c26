"""A diagnosis of this machine: installed versions, and a self-test of every sandbox back end.

Installed parts do not prove that a back end works: it runs programs that try what is forbidden.
"""

import platform
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing, redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from agentrl.runs.folder import versions_of
from agentrl.runs.progress import Display
from agentrl.sandboxes import Limits, Sandbox, SandboxError, SandboxUnavailable, open_sandbox
from agentrl.sandboxes.docker import engine as docker_engine
from agentrl.sandboxes.docker.image import IMAGE
from agentrl.sandboxes.host import requirements
from agentrl.toolenv.registry import plugins

PACKAGES: Final = ("agentrl", "gymnasium", "torch", "transformers", "docker", "rich", "numpy", "sympy")
"""Distributions whose versions are reported; none of them is imported."""
_LIMITS: Final = Limits(cpu_s=2.0, memory_bytes=256 << 20)
_SOON: Final = 0.3
_GVISOR: Final = "runsc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One requirement of a sandbox, and the test's result."""

    name: str
    """The requirement."""
    passed: bool
    """True if the sandbox met it."""
    detail: str = ""
    """The observation where it did not; else empty."""


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
    checks: tuple[Check, ...] = ()
    """The self-test; empty where it can't be opened."""

    @property
    def ok(self) -> bool:
        """True if it can be opened and passed every check."""
        return bool(self.checks) and all(check.passed for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of ``agentrl doctor``."""

    packages: Mapping[str, str]
    """Versions of Python and of the packages that agentrl can use; ``not installed`` for a missing one."""
    backends: tuple[BackendReport, ...]
    """One report for each sandbox back end."""
    plugins: Mapping[str, str] = field(default_factory=dict[str, str])
    """The environments' ids of each plugin, or its problem."""

    @property
    def ok(self) -> bool:
        """True if at least one back end isolates programs here."""
        return any(backend.ok for backend in self.backends)

    def row(self) -> dict[str, object]:
        """Return plain data for JSON."""
        backends = [{**asdict(backend), "facts": dict(backend.facts), "ok": backend.ok} for backend in self.backends]
        return {"ok": self.ok, "packages": dict(self.packages), "plugins": dict(self.plugins), "backends": backends}


def versions() -> dict[str, str]:
    """Look up the installed versions, without importing the packages."""
    return {"python": f"{platform.python_version()} ({sys.executable})"} | versions_of(PACKAGES)


def diagnose(*, sandbox_only: bool, say: Callable[[str], None]) -> Diagnosis:
    """Look at this machine and test every back end.

    Args:
        sandbox_only: leave out the versions of packages and the plugins.
        say: receives the progress, one line at a time.
    """
    say("local: looking and testing")
    reports = [examine("local", requirements.facts(), lambda: open_sandbox("local", limits=_LIMITS, ready=1))]
    say("docker: looking and testing")
    facts, runtimes = docker_facts()
    # Docker with gVisor isolates differently, so it has a report of its own.
    for runtime in (None, *sorted(runtimes & {_GVISOR})):
        name = "docker" if runtime is None else f"docker, runtime {runtime}"
        opened = partial(open_sandbox, "docker", runtime=runtime, limits=_LIMITS, ready=1)
        reports.append(examine(name, facts, opened))
    if sandbox_only:
        return Diagnosis(packages={}, backends=tuple(reports))
    return Diagnosis(packages=versions(), backends=tuple(reports), plugins=offers())


def offers() -> dict[str, str]:
    """Load every plugin, and map each to its ids or its problem."""
    with redirect_stdout(sys.stderr):  # a plugin's prints must not mix with our JSON
        return {
            f"{plugin.name} of {plugin.distribution}": plugin.problem or ", ".join(plugin.ids) for plugin in plugins()
        }


def docker_facts() -> tuple[dict[str, str], set[str]]:
    """Look at the Docker engine.

    Returns:
        Facts about SDK, engine, image and gVisor, as far as each can be asked, and the engine's runtimes.
    """
    facts = {"docker SDK": versions_of(["docker"])["docker"]}
    runtimes: set[str] = set()
    try:
        with docker_engine.connect() as engine:
            runtimes = set(engine.info().runtimes)
            facts |= {"engine": "answers", "gVisor (runsc)": "registered" if _GVISOR in runtimes else "not registered"}
            facts["image"] = f"{IMAGE} {engine.image(IMAGE).id[:19]}"
    except SandboxError as error:
        # Not fatal here: opening the back end reports it as the obstacle. As a fact it shows how far one gets.
        facts["image" if "engine" in facts else "engine"] = str(error)
    return facts, runtimes


def examine(name: str, facts: Mapping[str, str], opened: Callable[[], Sandbox]) -> BackendReport:
    """Open a back end and run the self-test in it.

    Args:
        name: its name in the report.
        facts: facts that are known already.
        opened: opens it.
    """
    try:
        with opened() as sandbox:
            checks = tuple(_checked(what, check, sandbox) for what, check in CHECKS.items())
    except SandboxUnavailable as error:
        return BackendReport(name=name, facts=facts, obstacle=str(error), remedy=error.remedy)
    except SandboxError as error:
        return BackendReport(name=name, facts=facts, obstacle=f"it opens, but fails: {error}")
    return BackendReport(name=name, facts=facts, checks=checks)


def _checked(name: str, check: Callable[[Sandbox], str], sandbox: Sandbox) -> Check:
    try:
        detail = check(sandbox)
    except SandboxError as error:
        detail = f"the sandbox failed: {error}"
    return Check(name=name, passed=not detail, detail=detail)


def _runs(sandbox: Sandbox) -> str:
    result = sandbox.run("print(input())\n6 * 7", stdin="hello\n")
    found = (result.status, result.stdout, result.value)
    return "" if found == ("ok", "hello\n", "42") else f"expected ok, hello, 42; found {found}"


def _network_is_blocked(sandbox: Sandbox) -> str:
    # 192.0.2.1 is reserved for documentation, and a datagram socket sends nothing on connect: the test needs no
    # network, and fails only where the sandbox has a route.
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        code = (
            "import socket\n"
            "def reaches(kind, address):\n"
            "    try: socket.socket(socket.AF_INET, kind).connect(address)\n"
            "    except OSError: return False\n"
            "    return True\n"
            f"[reaches(socket.SOCK_STREAM, {server.getsockname()!r}), reaches(socket.SOCK_DGRAM, ('192.0.2.1', 9))]"
        )
        result = sandbox.run(code)
    if (result.status, result.value) == ("ok", "[False, False]"):
        return ""
    return f"[host's own loopback, other networks] reached: {result.value} ({result.status})"


def _host_files_are_hidden(sandbox: Sandbox) -> str:
    with tempfile.NamedTemporaryFile(prefix="agentrl-doctor-") as secret:
        # Readable for all, so that only the sandbox can hide it, not its permissions.
        Path(secret.name).chmod(0o644)
        result = sandbox.run(f"open({secret.name!r})")
    return "" if result.exc_type == "FileNotFoundError" else f"a file of the host could be looked at: {result.status}"


def _status(sandbox: Sandbox, code: str, wanted: str) -> str:
    # Filling the memory may take longer than _SOON.
    found = sandbox.run(code, timeout=_SOON if wanted == "timeout" else None).status
    return "" if found == wanted else f"expected {wanted}, found {found}"


def _state_is_rolled_back(sandbox: Sandbox) -> str:
    with sandbox.session() as session:
        session.run("x = 1")
        ended = session.run("x = 2\nwhile True: pass", timeout=_SOON)
        after = session.run("x")
    found = (ended.status, ended.state, after.value)
    return "" if found == ("timeout", "rolled_back", "1") else f"expected timeout, rolled_back, 1; found {found}"


CHECKS: Final[Mapping[str, Callable[[Sandbox], str]]] = {
    "runs a program": _runs,
    "network is blocked": _network_is_blocked,
    "host files are hidden": _host_files_are_hidden,
    "endless loop is a timeout": partial(_status, code="while True: pass", wanted="timeout"),
    "too much memory is told": partial(
        _status, code="kept = []\nwhile True: kept.append(b'x' * (8 << 20))", wanted="memory"
    ),
    "state is rolled back": _state_is_rolled_back,
}
"""The self-test: each check returns an empty text, or the observation that was not expected."""


def show(diagnosis: Diagnosis, display: Display) -> None:
    """Print the diagnosis, a line for each fact."""
    tables = {"versions": [(name, found) for name, found in diagnosis.packages.items()]} if diagnosis.packages else {}
    tables |= {"plugins": [*diagnosis.plugins.items()]} if diagnosis.plugins else {}
    tables |= {f"sandbox: {report.name}": _rows(report) for report in diagnosis.backends}
    for title, rows in tables.items():
        display.say(title, "bold")
        width = max(len(name) for name, _ in rows)
        for name, found in rows:
            good, bad = found in ("passed", "works"), found.startswith(("FAILED", "does not work"))
            display.say(f"  {name:{width}}  {found}", "green" if good else "red" if bad else "")
    if not diagnosis.ok:
        display.say("no sandbox works here: environments that run programs can't be played", "bold red")


def _rows(report: BackendReport) -> list[tuple[str, str]]:
    rows = [*report.facts.items()]
    if report.obstacle:
        rows.append(("obstacle", report.obstacle))
    if report.remedy:
        rows.append(("way out", report.remedy))
    rows += [(check.name, "passed" if check.passed else f"FAILED: {check.detail}") for check in report.checks]
    return [*rows, ("verdict", "works" if report.ok else "does not work")]
