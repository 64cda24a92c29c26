"""Grading needs math-verify, an extra, and leaves no process behind."""

import pytest


@pytest.fixture(autouse=True)
def _graders(graders: None) -> None: ...
