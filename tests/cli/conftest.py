"""Commands, and programs of their own for what only those can show."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main

ROOT = Path(__file__).resolve().parents[2]
Command = Callable[..., Any]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command that ends with this code; what it said: ``command("list", "nothing", code=2).err``."""

    def run(*argv: str, code: int = 0) -> Any:
        assert main(argv) == code
        return capsys.readouterr()

    return run


def python(*argv: str, folder: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """What Python says where nobody installed this checkout, nothing is typed, and these variables are set."""
    paths = {"PYTHONPATH": str(ROOT)} | env
    return subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env=os.environ | paths,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
