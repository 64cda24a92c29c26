"""Grading needs math-verify, an extra, and leaves no process behind."""

import importlib.util
from collections.abc import Callable, Iterator

import pytest

from agentrl.grading.latex import close_graders


@pytest.fixture(autouse=True)
def _math_verify(require: Callable[[bool, str], None]) -> None:
    require(importlib.util.find_spec("math_verify") is not None, "needs math-verify")


@pytest.fixture(autouse=True, scope="package")
def _graders() -> Iterator[None]:
    yield
    close_graders()
