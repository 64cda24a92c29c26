"""Processor seconds of each test and of the processes that it starts: ``scripts/test.sh --costs`` prints a table.

Clock time would say nothing on a machine that does other work.
"""

import resource
import time
from collections import Counter
from collections.abc import Generator
from typing import Any

import psutil
import pytest

SHOWN = 50
_BEFORE = pytest.StashKey[tuple[float, int, float]]()
"""Processor seconds, number of shared fixtures, and clock as a test begins."""


def spent() -> float:
    """Return the processor seconds that this process and its descendants, living or not, have used so far."""
    used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    for child in psutil.Process().children(recursive=True):
        try:
            used += sum(child.cpu_times()[:4])  # its own, and those of its children that have ended
        except psutil.NoSuchProcess:
            continue
    return used


class Measure:
    """Measures in the process that runs the tests, and writes the costs into the reports' ``user_properties``.

    A fixture that outlives its test is charged under its own name, not to the test that happens to ask first.
    """

    def __init__(self) -> None:
        self._shared: list[tuple[str, float]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        """Measure what importing the tests costs."""
        before = spent()
        result = yield
        self._shared.append(("(importing all test files)", spent() - before))
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Measure a shared fixture, without those that it asks for itself."""
        before, inner = spent(), len(self._shared)
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                own = spent() - before - sum(cost for _, cost in self._shared[inner:])
                self._shared.append((f"{fixturedef.baseid}::{fixturedef.argname}", own))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Measure setup, call and teardown together; the last report carries the figures."""
        item.stash[_BEFORE] = spent(), len(self._shared), time.monotonic()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, pytest.TestReport]:
        """Hand the figures to the process that prints them."""
        report = yield
        if call.when == "teardown":
            before, inner, began = item.stash[_BEFORE]
            own = spent() - before - sum(cost for _, cost in self._shared[inner:])
            costs = own, time.monotonic() - began, tuple(self._shared)
            report.user_properties = [*report.user_properties, ("costs", costs)]
            self._shared.clear()
        return report


class Table:
    """Sums up the reports of all processes and prints the dearest."""

    def __init__(self) -> None:
        self._tests, self._clock, self._fixtures = Counter[str](), Counter[str](), Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what a test's last report carries."""
        costs: Any
        for name, costs in report.user_properties:
            if name == "costs":
                self._tests[report.nodeid], self._clock[report.nodeid], shared = costs
                for fixture, cost in shared:
                    self._fixtures[fixture] += cost

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the dearest tests and fixtures, and the sums of files and folders."""
        files, folders, clock = Counter[str](), Counter[str](), Counter[str](self._clock)
        for test, cost in self._tests.items():
            file = test.split("::")[0]
            files[file] += cost
            folders[file.rpartition("/")[0]] += cost
            clock[file] += self._clock[test]
            clock[file.rpartition("/")[0]] += self._clock[test]
        sums = f"{self._tests.total():.0f} of tests, {self._fixtures.total():.0f} of shared fixtures and imports"
        terminalreporter.section(f"processor seconds: {sums}; seconds of clock beside")
        tables = {"tests": self._tests, "shared fixtures": self._fixtures, "files": files, "folders": folders}
        for title, costs in tables.items():
            terminalreporter.write_line(f"-- the dearest {title}", bold=True)
            for name, cost in costs.most_common(SHOWN):
                seconds = f"{clock[name]:8.2f}" if name in clock else " " * 8
                terminalreporter.write_line(f"{cost:8.2f} {seconds}  {name}")
