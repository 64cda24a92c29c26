"""What every test can rely on: no network for models, few hypothesis examples, and no silent skips where CI runs."""

import os
from collections.abc import Callable, Generator

import pytest
from hypothesis import HealthCheck, settings

# Set before any test imports transformers: both are read when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

CI = os.environ.get("AGENTRL_CI") == "1"

settings.register_profile("local", max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), max_examples=40, derandomize=True)
settings.load_profile("ci" if CI else "local")


@pytest.fixture(scope="session")
def require() -> Callable[[bool, str], None]:
    """Skip a test when a piece of the machine is missing: ``require(which("chromium") is not None, "needs chromium")``.

    Where ``AGENTRL_CI=1`` is set the test fails instead.
    """

    def check(there: bool, reason: str) -> None:
        if not there:
            pytest.skip(reason)

    return check


def fail_in_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure, so that CI can't pass by missing a piece."""
    # An expected failure is reported as skipped too; it ran, so it may stay.
    if CI and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"AGENTRL_CI=1 allows no skips: {reason}. Install what is missing, or deselect by marker."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Look at the outcome of every test."""
    report = yield
    fail_in_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Look at the outcome of importing every test file."""
    report = yield
    fail_in_ci(report)
    return report
