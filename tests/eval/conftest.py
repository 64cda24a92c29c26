"""A small game."""

import pytest

from .played import register


@pytest.fixture(autouse=True)
def game(clean_registry: None) -> None:
    """The game of ``played.py``, registered."""
    register()
