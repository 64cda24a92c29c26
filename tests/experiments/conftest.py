"""The modules of experiments, which are scripts and no package."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a module of experiments by its name."""
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module
