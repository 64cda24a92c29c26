"""Commands, in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main

Command = Callable[..., Any]
LOADING = "loading PyTorch …\n"
"""What the first command that needs it says in this process."""


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command that ends with this code; what it said: ``command("list", "nothing", code=2).err``."""

    def run(*argv: str, code: int = 0) -> Any:
        assert main(argv) == code
        return capsys.readouterr()

    return run


def everything(folder: Path) -> dict[str, bytes | None]:
    files = (path for path in folder.rglob("*") if path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in files}


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one sentence that a command says before it ends with exit code 2, leaving everything as it was."""
    before = everything(Path())
    assert main(argv) == 2
    out, err = capsys.readouterr()
    err = err.removeprefix(LOADING)
    assert out == "" and err.startswith("agentrl: ") and err.count("\n") == 1 and "Traceback" not in err, err
    assert everything(Path()) == before
    return err.removeprefix("agentrl: ").strip()
