"""Environments that leave something behind, each in one way. ``STARTED`` says how to clear it away."""

import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.toolenv.tools.function import ToolContext

from .good import Broken, Good, Memory

STARTED: list[Callable[[], object]] = []


class LeavesAChild(Good):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        child = subprocess.Popen(["sleep", "60"])

        def end() -> None:
            child.kill()
            child.wait()

        STARTED.append(end)


class LeavesAThread(Good):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        stop = threading.Event()
        threading.Thread(target=stop.wait, name="watcher", daemon=True).start()
        STARTED.append(stop.set)


class LeavesAFile(Good):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        files = os.open(os.devnull, os.O_RDONLY)
        STARTED.append(lambda: os.close(files))


class ClosesOnce(Good):
    """Has nothing left to close the second time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.log: list[str] = ["open"]

    def reset(self, **options: Any) -> Any:
        self.log = ["open"]
        return super().reset(**options)

    def close(self) -> None:
        super().close()
        self.log.pop()


class Mute(Memory):
    """Answers nothing more once it was closed."""

    closed = False

    def call(self, arguments: Mapping[str, object], ctx: ToolContext | None = None) -> str:
        return "closed" if self.closed else super().call(arguments)

    def close(self) -> None:
        self.closed = True


class ClosesForGood(Good):
    tools = (Mute(),)


class BreaksUnplayed(Good):
    """Expects an episode to close."""

    def close(self) -> None:
        assert self.episode.turns >= 0


class Gone(Good):
    """Can't begin again."""

    gone = False

    def close(self) -> None:
        self.gone = True

    def reset(self, **options: Any) -> Any:
        if self.gone:
            raise ValueError("I/O operation on closed file")
        return super().reset(**options)


BROKEN: list[Broken] = [
    *((LeavesAChild, {"ARL-P001"}), (LeavesAThread, {"ARL-P002"}), (LeavesAFile, {"ARL-P003"})),
    *((ClosesOnce, {"ARL-P004"}), (ClosesForGood, {"ARL-P005"}), (BreaksUnplayed, {"ARL-P004"}), (Gone, {"ARL-P005"})),
]
