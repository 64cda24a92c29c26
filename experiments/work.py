"""How workers share units: a lock that ends with its process claims a unit, and a pause file makes workers wait."""

import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rows import ROOT

from agentrl.errors import RunFolderError
from agentrl.runs.files import lock_folder

PLACE = ROOT / "runs" / "experiments"
"""Where units are at work; git ignores it."""
_POLL_S = 1.0
_SAY = partial(print, flush=True)


@contextmanager
def claimed(name: str, root: Path = PLACE) -> Generator[Path | None]:
    """Claim a unit for this process; the file ``.lock`` in its folder names the process.

    Args:
        name: of the unit.
        root: the folder in which units have theirs.

    Yields:
        The unit's folder, or None where another process has it.
    """
    folder = root / name
    try:
        lock = lock_folder(folder, "unit", "unit")
    except RunFolderError:
        yield None
        return
    try:
        yield folder
    finally:
        lock.close()


def tidy(folder: Path) -> None:
    """Remove the folder of a unit that is done."""
    shutil.rmtree(folder, ignore_errors=True)


class Limits:
    """When a worker waits, and when it takes no further unit.

    Args:
        units: most units; 0 for no limit.
        hours: after which no unit is begun; 0 for no limit.
        pause_file: the worker waits as long as it is there.
        say: tells a person.
    """

    def __init__(self, units: int, hours: float, pause_file: Path | None, say: Callable[[str], None] = _SAY) -> None:
        self._units, self._pause_file, self._say = units, pause_file, say
        self._end = time.monotonic() + 3600 * hours if hours else float("inf")
        self.done = 0
        """Units that were finished."""

    @property
    def reached(self) -> bool:
        """True where no further unit is to be begun."""
        return time.monotonic() >= self._end or bool(self._units and self.done >= self._units)

    def wait(self, check: Callable[[], object] = lambda: None) -> None:
        """Wait while the file for a pause is there; ``check`` is called again and again, and may raise."""
        announced = False
        while self._pause_file is not None and self._pause_file.exists():
            if not announced:
                self._say(f"waiting until {self._pause_file} is gone")
                announced = True
            check()
            time.sleep(_POLL_S)
