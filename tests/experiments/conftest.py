"""The modules of experiments, which are scripts and no package. What they say, they say on every machine."""

from functools import partial
from pathlib import Path

import pytest

from ..conftest import load_script

load = partial(load_script, folder="experiments")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.ci)
