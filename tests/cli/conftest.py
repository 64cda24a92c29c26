"""Commands, in this process."""

from collections.abc import Callable
from typing import Any

import pytest

from agentrl.cli import main

Command = Callable[..., Any]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command that ends with this code; what it said: ``command("list", "nothing", code=2).err``."""

    def run(*argv: str, code: int = 0) -> Any:
        assert main(argv) == code
        return capsys.readouterr()

    return run
