import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The slow loops of reference.py; pytest's importlib mode puts no test folder on the path."""
    spec = importlib.util.spec_from_file_location("algos_reference", Path(__file__).with_name("reference.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
