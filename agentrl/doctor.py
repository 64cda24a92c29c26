"""What this machine can do for agentrl: which versions are there, and which sandboxes really hold.

A back end is not believed to work because its parts are installed: it runs programs that try what they must not.
"""

import platform
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing, redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from agentrl.registry import plugins
from agentrl.sandboxes import Limits, Sandbox, SandboxError, SandboxUnavailable, docker_engine, obstacles, open_sandbox
from agentrl.sandboxes.docker_image import IMAGE
from agentrl.terminal import visible

PACKAGES: Final = ("agentrl", "gymnasium", "torch", "transformers", "docker", "rich", "numpy", "sympy")
"""Distributions that are named with their versions; none of them is imported."""
_LIMITS: Final = Limits(cpu_s=2.0, memory_bytes=256 << 20)
_SOON: Final = 0.3
_GVISOR: Final = "runsc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that a sandbox must do, and whether it did."""

    name: str
    """What it must do."""
    passed: bool
    """Whether it did."""
    detail: str = ""
    """What came instead, where it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendReport:
    """What there is to know about one back end on this machine."""

    name: str
    """Its name, with the container runtime where one was asked for."""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What decides whether it can run here."""
    obstacle: str = ""
    """What stands in the way; empty where it can be opened."""
    remedy: str = ""
    """The command that removes the obstacle, where there is one."""
    checks: tuple[Check, ...] = ()
    """The self-test; empty where it can't be opened."""

    @property
    def ok(self) -> bool:
        """Whether it can be opened and passed every check."""
        return bool(self.checks) and all(check.passed for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that the doctor found."""

    packages: Mapping[str, str]
    """Versions of Python and of what agentrl can use, ``not installed`` where it is missing."""
    backends: tuple[BackendReport, ...]
    """One report for each sandbox back end."""
    plugins: Mapping[str, str] = field(default_factory=dict[str, str])
    """What offers environments: the ids, or what is wrong."""

    @property
    def ok(self) -> bool:
        """Whether at least one back end isolates programs here."""
        return any(backend.ok for backend in self.backends)

    def row(self) -> dict[str, object]:
        """Give plain data for JSON."""
        backends = [{**asdict(backend), "facts": dict(backend.facts), "ok": backend.ok} for backend in self.backends]
        return {"ok": self.ok, "packages": dict(self.packages), "plugins": dict(self.plugins), "backends": backends}


def versions() -> dict[str, str]:
    """Look up which versions are installed, importing none of them."""
    found = {"python": f"{platform.python_version()} ({sys.executable})"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def diagnose(*, sandbox_only: bool, say: Callable[[str], None]) -> Diagnosis:
    """Look at this machine and test every back end.

    Args:
        sandbox_only: Leave the versions of packages and the plugins out.
        say: Told what goes on, one line at a time.
    """
    say("local: looking and testing")
    reports = [examine("local", obstacles.facts(), lambda: open_sandbox("local", limits=_LIMITS, ready=1))]
    say("docker: looking and testing")
    facts, runtimes = docker_facts()
    for runtime in (None, *sorted(runtimes & {_GVISOR})):
        name = "docker" if runtime is None else f"docker, runtime {runtime}"
        opened = partial(open_sandbox, "docker", runtime=runtime, limits=_LIMITS, ready=1)
        reports.append(examine(name, facts, opened))
    if sandbox_only:
        return Diagnosis(packages={}, backends=tuple(reports))
    return Diagnosis(packages=versions(), backends=tuple(reports), plugins=offers())


def offers() -> dict[str, str]:
    """Load every plugin, and tell of each what it offers."""
    with redirect_stdout(sys.stderr):  # what they print there is not ours
        found = {
            f"{plugin.name} of {plugin.distribution}": plugin.problem or ", ".join(plugin.ids) for plugin in plugins()
        }
    return {visible(name): visible(told) for name, told in found.items()}


def docker_facts() -> tuple[dict[str, str], set[str]]:
    """Look at the Docker engine.

    Returns:
        What is known of SDK, engine, image and gVisor as far as each can be asked, and the engine's runtimes.
    """
    facts = {"docker SDK": versions()["docker"]}
    runtimes: set[str] = set()
    try:
        with docker_engine.connect() as engine:
            runtimes = set(engine.abilities().runtimes)
            facts |= {"engine": "answers", "gVisor (runsc)": "registered" if _GVISOR in runtimes else "not registered"}
            facts["image"] = f"{IMAGE} {engine.image(IMAGE).id[:19]}"
    except SandboxError as error:
        # Opening the back end says the same as its obstacle, if it is one: here it tells how far one gets.
        facts["image" if "engine" in facts else "engine"] = str(error)
    return facts, runtimes


def examine(name: str, facts: Mapping[str, str], opened: Callable[[], Sandbox]) -> BackendReport:
    """Open a back end and let it run the self-test.

    Args:
        name: What to call it.
        facts: What is known of it already.
        opened: Opens it.
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
    # The address of the second is reserved for documentation, and a datagram socket sends nothing when it connects.
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
        Path(secret.name).chmod(0o644)
        result = sandbox.run(f"open({secret.name!r})")
    return "" if result.exc_type == "FileNotFoundError" else f"a file of the host could be looked at: {result.status}"


def _timeout_is_told(sandbox: Sandbox) -> str:
    return _status(sandbox, "while True: pass", "timeout")


def _memory_is_told(sandbox: Sandbox) -> str:
    return _status(sandbox, "kept = []\nwhile True: kept.append(b'x' * (8 << 20))", "memory")


def _status(sandbox: Sandbox, code: str, wanted: str) -> str:
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
    "endless loop is a timeout": _timeout_is_told,
    "too much memory is told": _memory_is_told,
    "state is rolled back": _state_is_rolled_back,
}
"""The self-test: each gives an empty text, or what came instead of what was expected."""


def show(diagnosis: Diagnosis) -> None:
    """Write the diagnosis to standard output: as tables where rich is installed, as plain lines on the base install."""
    tables = {"versions": [(name, found) for name, found in diagnosis.packages.items()]} if diagnosis.packages else {}
    tables |= {"plugins": [*diagnosis.plugins.items()]} if diagnosis.plugins else {}
    tables |= {f"sandbox: {report.name}": _rows(report) for report in diagnosis.backends}
    draw = _plain if find_spec("rich") is None else _rich
    for title, rows in tables.items():
        draw(title, rows)
    if not diagnosis.ok:
        print("no sandbox works here: environments that run programs can't be played")


def _rows(report: BackendReport) -> list[tuple[str, str]]:
    rows = [*report.facts.items()]
    if report.obstacle:
        rows.append(("obstacle", report.obstacle))
    if report.remedy:
        rows.append(("way out", report.remedy))
    rows += [(check.name, "passed" if check.passed else f"FAILED: {check.detail}") for check in report.checks]
    return [*rows, ("verdict", "works" if report.ok else "does not work")]


def _plain(title: str, rows: list[tuple[str, str]]) -> None:
    print(title)
    width = max(len(name) for name, _ in rows)
    for name, found in rows:
        print(f"  {name:{width}}  {found}")


def _rich(title: str, rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, found in rows:
        good, bad = found in ("passed", "works"), found.startswith(("FAILED", "does not work"))
        table.add_row(name, Text(found, style="green" if good else "red" if bad else ""))
    Console().print(table)
