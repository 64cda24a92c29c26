"""Command lines of agentrl in processes that begin quickly, as the tests of training have them, and a small game."""

from collections.abc import Iterator

import gymnasium
import pytest

from ..train.conftest import server
from .played import ID, register

__all__ = ["server"]


@pytest.fixture(autouse=True)
def game() -> Iterator[None]:
    """The game of ``played.py``, registered."""
    register()
    yield
    gymnasium.registry.pop(ID)
