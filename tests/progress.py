"""What ``scripts/test.sh`` shows: what is skipped on this machine, how far the tests are, and each failure at once."""

import os
import shutil
import threading
import time
from importlib.util import find_spec

import pytest

MINUTES = 8
"""Minutes that all tests take on two cores that do nothing else."""
STEP_S = 10.0
"""Seconds between two lines where the output is no terminal."""


def missing() -> dict[str, str]:
    """Return what this machine lacks, each with the way to get it."""
    lacks = {
        "Docker": (os.path.exists("/var/run/docker.sock") or "DOCKER_HOST" in os.environ, "source scripts/engine.sh"),
        "gVisor": (shutil.which("runsc"), "apt-get install runsc"),
        "Chromium": (shutil.which("chromium"), "apt-get install chromium"),
        "vLLM": (find_spec("vllm"), "pip install 'agentrl[vllm]'"),
        "Ray": (find_spec("ray"), "pip install 'agentrl[ray]'"),
        "reasoning-gym": (find_spec("reasoning_gym"), "pip install 'agentrl[reasoning-gym]'"),
        "a CUDA device": (os.path.exists("/dev/nvidia0"), "needs the hardware"),
    }
    return {name: remedy for name, (present, remedy) in lacks.items() if not present}


class Progress:
    """A line that moves: a bar in a terminal, otherwise a new line every ten seconds."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = time.monotonic()
        self._total = self._done = self._failed = 0
        self._running: dict[str, None] = {}
        self._stopped = threading.Event()

    def pytest_report_header(self) -> list[str]:
        """Report what will be skipped, and how long the rest takes."""
        all_files = self._config.args_source is pytest.Config.ArgsSource.TESTPATHS
        everything = all_files and not self._config.getoption("markexpr")
        lines = [f"On two quiet cores these tests take {MINUTES} minutes."] if everything else []
        lines += [f"Skipped here: what needs {name} ({remedy})" for name, remedy in missing().items()]
        return lines

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Learn how many tests there are, from one of the processes that run them."""
        self._begin(len(ids))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Learn how many tests there are, where this process runs them."""
        if session.items:
            self._begin(len(session.items))

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str]:
        """Print no dots: the line says how many have ended."""
        if hasattr(report, "wasxfail"):
            return ("xfailed", "", "XFAIL") if report.skipped else ("xpassed", "", "XPASS")
        if report.passed and report.when != "call":
            return "", "", ""
        category = "error" if report.failed and report.when != "call" else report.outcome
        return category, "", category.upper()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test runs."""
        self._running[nodeid] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a failure at once."""
        if report.failed:
            self._failed += 1
            self._write(f"FAILED {report.nodeid}", end="\n")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Note that a test has ended."""
        self._done += 1
        self._running.pop(nodeid, None)

    def pytest_sessionfinish(self) -> None:
        """Leave the line as it is in the end."""
        self._stopped.set()
        if self._total:
            self._write(self._line(), end="\n")

    def _begin(self, total: int) -> None:
        if not self._total:
            self._total = total
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        terminal = self._config.get_terminal_writer().hasmarkup
        while not self._stopped.wait(0.5 if terminal else STEP_S):
            self._write(self._line(), end="" if terminal else "\n")

    def _line(self) -> str:
        share, seconds = self._done / self._total, int(time.monotonic() - self._began)
        bar = "#" * round(20 * share)
        text = f"[{bar:20}] {share:6.1%}  {self._done:,} of {self._total:,} tests, {self._failed} failed"
        names = next(reversed(self._running), "")
        return f"{text}, {seconds // 60}:{seconds % 60:02} min  {names}"

    def _write(self, text: str, *, end: str) -> None:
        writer = self._config.get_terminal_writer()
        if writer.hasmarkup:
            text = "\r" + text[: writer.fullwidth - 1].ljust(writer.fullwidth - 1)
        writer.write(text + end, flush=True)
