"""What the tests of mathematical environments share."""

import importlib.util
from collections.abc import Callable, Iterator

import pytest

from agentrl.grading.latex import close_graders


@pytest.fixture(scope="module")
def graders(require: Callable[[bool, str], None]) -> Iterator[None]:
    """The processes that grade with math-verify, ended when the file's tests have run."""
    require(importlib.util.find_spec("math_verify") is not None, "needs math-verify")
    yield
    close_graders()
