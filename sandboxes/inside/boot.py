"""The first code that runs in a container: reads our modules from standard input and starts the runner.

Its text is given to the interpreter as ``python -c``, so it imports nothing of ours. So the code that supervises a
container is always the code of the host that made it, whatever its image, and programs find none of it on disk.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType


def read_exactly(size: int) -> bytes:
    """Read exactly so many bytes of standard input, and none beyond."""
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


class SourceFinder(importlib.abc.InspectLoader, importlib.abc.MetaPathFinder):
    """Imports modules from the sources that the host sent."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module among the sources; a module with modules below it is a package."""
        if fullname not in self._sources:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=self.is_package(fullname))

    def is_package(self, fullname: str) -> bool:
        """Return whether other modules are below this one."""
        return any(name.startswith(f"{fullname}.") for name in self._sources)

    def get_source(self, fullname: str) -> str:
        """Return a module's text."""
        return self._sources[fullname]


def main() -> None:
    """Read the modules and start the runner, which never returns."""
    size = int.from_bytes(read_exactly(4), "big")
    finder = SourceFinder(json.loads(read_exactly(size)))
    sys.meta_path.insert(0, finder)
    runner = importlib.import_module("agentrl.sandboxes.inside.runner")
    sys.meta_path.remove(finder)
    runner.main()


# True as well where the interpreter runs this text itself.
if __name__ == "__main__":
    main()
