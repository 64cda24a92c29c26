"""Processes of this Python that begin quickly: ``fork_server.py`` forks them."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

import psutil

SERVER = Path(__file__).with_name("fork_server.py")


class Command:
    """A command line of agentrl in a process of its own."""

    def __init__(self, server: "Server", pid: int, folder: Path) -> None:
        self._server, self.pid, self._folder = server, pid, folder
        self._end = os.pidfd_open(pid)

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text()

    @property
    def running(self) -> bool:
        return is_alive(self.pid)

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait until something is there, while the process runs."""
        while not ready():
            assert not self._ends_within(0.002), f"it ended too early:\n{self.err}"

    def descendants(self) -> set[int]:
        """Its children, their children and so on, but for those that fork on request."""
        children = psutil.Process(self.pid).children(recursive=True)
        return {child.pid for child in children if child.name() != "agentrl-forks"}

    def wait(self) -> int:
        """The exit code; a signal's number, negative, where one ended it."""
        self._ends_within(None)
        os.close(self._end)
        return self._server.ask({"wait": self.pid})

    def _ends_within(self, seconds: float | None) -> bool:
        return bool(select.select([self._end], [], [], seconds)[0])

    def done(self) -> "Command":
        """Itself, once it has ended well."""
        assert self.wait() == 0, self.err
        return self


class Server:
    """Has imported PyTorch once, and forks a process for every command line."""

    def __init__(self) -> None:
        # Only a process with a single thread may fork, and numpy starts others as it is imported.
        env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._numbers, self._lock = count(), Lock()

    def ask(self, order: Mapping[str, object]) -> int:
        assert self._process.stdin and self._process.stdout
        with self._lock:
            print(json.dumps(order), file=self._process.stdin, flush=True)
            return int(self._process.stdout.readline())

    def begin(
        self,
        *words: str | Path,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        input: str = "",
        logs: Path | None = None,
    ) -> Command:
        """Start ``python WORDS`` in ``cwd``; its output goes to files in ``logs``, by default a folder in ``cwd``."""
        logs = logs or cwd / f".logs-{next(self._numbers)}"
        logs.mkdir(parents=True, exist_ok=True)
        # Before it begins: whoever asks what it has said may be sooner than it.
        for name, text in {"in": input, "out": "", "err": ""}.items():
            (logs / name).write_text(text)
        environment = {**(os.environ if env is None else env)}
        order = {"words": [*map(str, words)], "cwd": str(cwd), "env": environment, "logs": str(logs)}
        return Command(self, self.ask(order), logs)

    def start(self, folder: Path, *argv: str) -> Command:
        """Start ``agentrl argv…`` in ``folder``."""
        return self.begin("-m", "agentrl", *argv, cwd=folder)

    def run(
        self, *words: str | Path, cwd: Path, env: Mapping[str, str] | None = None, input: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python WORDS`` as :func:`subprocess.run` does, and wait for its end."""
        with TemporaryDirectory() as logs:
            command = self.begin(*words, cwd=cwd, env=env, input=input, logs=Path(logs))
            return subprocess.CompletedProcess(words, command.wait(), command.out, command.err)

    def close(self) -> None:
        self._process.communicate()


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
