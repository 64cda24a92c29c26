"""Environments that leave something behind, each in one way. ``STARTED`` says how to clear it away."""

import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.toolenv.tools.function import ToolContext

from .good import Good, Memory

STARTED: list[Callable[[], object]] = []


class LeavesAChild(Good, codes="ARL-P001"):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        child = subprocess.Popen(["sleep", "60"])
        STARTED.append(lambda: (child.kill(), child.wait()))


class LeavesAThread(Good, codes="ARL-P002"):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        stop = threading.Event()
        threading.Thread(target=stop.wait, name="watcher", daemon=True).start()
        STARTED.append(stop.set)


class LeavesAFile(Good, codes="ARL-P003"):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        files = os.open(os.devnull, os.O_RDONLY)
        STARTED.append(lambda: os.close(files))


class ClosesOnce(Good, codes="ARL-P004"):
    """Has nothing left to close the second time."""

    closed = False

    def reset(self, **options: Any) -> Any:
        self.closed = False
        return super().reset(**options)

    def close(self) -> None:
        super().close()
        assert not self.closed
        self.closed = True


class Mute(Memory):
    """Answers nothing more once it was closed."""

    closed = False

    def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
        return "closed" if self.closed else super().call(arguments)

    def close(self) -> None:
        self.closed = True


class ClosesForGood(Good, codes="ARL-P005", shows=r"'print\(x \+ 1\)' and 'closed' in turn 1"):
    tools = (Mute(),)


class BreaksUnplayed(Good, codes="ARL-P004"):
    """Expects an episode to close."""

    def close(self) -> None:
        assert self.episode.turns >= 0


class Gone(Good, codes="ARL-P005"):
    """Can't begin again."""

    gone = False

    def close(self) -> None:
        self.gone = True

    def reset(self, **options: Any) -> Any:
        if self.gone:
            raise ValueError("I/O operation on closed file")
        return super().reset(**options)
