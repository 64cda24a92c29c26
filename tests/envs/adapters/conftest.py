"""Interpreters that have other projects' packages, or fakes of them."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.envs.adapters.interpreter import close_interpreters

HERE = Path(__file__).parent
INSTALLED = HERE.parents[2] / "build" / "task_sets"
REAL = pytest.param(True, marks=pytest.mark.ci, id="real")
FAKE = pytest.param(False, id="fake")


@pytest.fixture(scope="session")
def make_python(
    tmp_path_factory: pytest.TempPathFactory, require: Callable[[bool, str], None]
) -> Iterator[Callable[[str, bool], str]]:
    """Makes an interpreter that has a project's package, or our fake of it, and the files of ``theirs``."""

    def make(project: str, real: bool) -> str:
        interpreter = INSTALLED / project / "bin" / "python" if real else Path(sys.executable)
        require(interpreter.exists(), "run scripts/install_task_sets.sh")
        script = tmp_path_factory.mktemp("python") / "python"
        paths = f"{HERE / 'theirs'}:{'' if real else HERE / 'fakes'}"
        script.write_text(f'#!/bin/sh\nPYTHONPATH="{paths}" exec "{interpreter}" "$@"\n')
        script.chmod(0o755)
        return str(script)

    yield make
    close_interpreters()
