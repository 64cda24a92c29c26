"""What the workers of ``test_pool.py`` do: they evaluate Python."""

import os
from pathlib import Path

MAX_BYTES = 2 << 30
CONTROL = {"code": "6 * 7 == 42"}


def warm() -> None:
    """Import is enough."""


def die(folder: str) -> None:
    """Leave a folder of this process's number, and end."""
    Path(folder, str(os.getpid())).mkdir()
    os._exit(1)


def reply(*, code: str) -> object:
    return eval(code)
