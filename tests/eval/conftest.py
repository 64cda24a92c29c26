"""A small game."""

import pytest

import agentrl

from .played import ID, Sums


@pytest.fixture(autouse=True)
def game(clean_registry: None) -> None:
    """The game of ``played.py``, registered."""
    agentrl.register(ID, Sums)
