"""Command lines of agentrl in processes that begin quickly, as the tests of training have them, and a small game."""

import pytest

from ..train.conftest import server
from .played import register

__all__ = ["server"]


@pytest.fixture(autouse=True)
def game(clean_registry: None) -> None:
    """The game of ``played.py``, registered."""
    register()
