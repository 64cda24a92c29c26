"""The first code that runs in a container: reads our modules from standard input and starts the runner.

Its text is given to the interpreter as ``python -c``, so it imports nothing of ours. So the code that supervises a
container is always the code of the host that made it, whatever its image, and programs find none of it on disk.
"""

import importlib
import os
import sys


def read_exactly(size: int) -> bytes:
    """Read exactly so many bytes of standard input, and none beyond."""
    data = b""
    while len(data) < size:
        piece = os.read(0, size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


def main() -> None:
    """Read the modules and start the runner, which never returns."""
    size = int.from_bytes(read_exactly(4), "big")
    with open(os.memfd_create("modules"), "wb") as archive:
        archive.write(read_exactly(size))
        archive.flush()
        path = f"/proc/self/fd/{archive.fileno()}"
        sys.path.insert(0, path)
        runner = importlib.import_module("agentrl.sandboxes.inside.runner")
        sys.path.remove(path)
    runner.main()


# True as well where the interpreter runs this text itself.
if __name__ == "__main__":
    main()
