"""The first lines that run in a container: take our modules from standard input and start the runner.

Its text is given to the interpreter as ``python -c``, so it imports nothing of ours. A container is thus always
watched over by the very code of the host that made it, whatever its image, and programs find none of that code on disk.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType


def take(size: int) -> bytes:
    """Read exactly so many bytes of standard input, and none beyond."""
    found = b""
    while len(found) < size:
        piece = os.read(0, size - len(found))
        if not piece:
            os._exit(0)
        found += piece
    return found


class Sent(importlib.abc.InspectLoader, importlib.abc.MetaPathFinder):
    """Finds modules among the sources that the host sent."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Say which modules are here; a module with modules below it is a package."""
        if fullname not in self._sources:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=self.is_package(fullname))

    def is_package(self, fullname: str) -> bool:
        """Whether other modules are below this one."""
        return any(name.startswith(f"{fullname}.") for name in self._sources)

    def get_source(self, fullname: str) -> str:
        """Give a module's text."""
        return self._sources[fullname]


def main() -> None:
    """Take the modules and hand over to the runner, which never returns."""
    size = int.from_bytes(take(4), "big")
    finder = Sent(json.loads(take(size)))
    sys.meta_path.insert(0, finder)
    runner = importlib.import_module("agentrl.sandboxes.runner")
    sys.meta_path.remove(finder)
    runner.main()


# True as well where the interpreter runs this text itself.
if __name__ == "__main__":
    main()
