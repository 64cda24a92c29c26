"""The modules of experiments, which are scripts and no package."""

import importlib
from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def load(name: str) -> Any:
    """Import a module of experiments by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXPERIMENTS)
        return importlib.import_module(name)
