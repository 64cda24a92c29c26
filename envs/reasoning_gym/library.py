"""Get questions and scores of the library reasoning-gym from the single process that it runs in.

The process starts with the first question, which takes seconds, and has a fixed hash seed: some of the library's
questions depend on the order of a set.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigError, InfrastructureError
from agentrl.processes.per_process import PerProcess

MAX_CHARS = 20_000
"""A longer answer is wrong, whatever it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question of the library."""

    place: int
    """Its index in the library's data set, or the seed of one."""
    question: str
    """The question's text."""
    answer: str
    """The library's answer; empty where it gives none."""


class Library:
    """The library in a separate process. Safe to share between threads: requests are serialized."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def question(self, name: str, config: Mapping[str, object], split: str, index: int) -> Question:
        """Return question number ``index`` of a split, always the same one.

        Raises:
            ConfigError: the task does not take these settings.
            InfrastructureError: the process ended.
        """
        return Question(**self._ask(do="question", name=name, config=_json(config), split=split, index=index))

    def score(self, name: str, config: Mapping[str, object], place: int, answer: str) -> float:
        """Return the library's score of ``answer``, from 0 to 1; 0 where its scorer fails on it or takes too long.

        Raises:
            InfrastructureError: the process ended.
        """
        if len(answer) > MAX_CHARS:
            return 0.0
        return float(self._ask(do="score", name=name, config=_json(config), place=place, answer=answer)["score"])

    def close(self) -> None:
        """End the process; the next request starts another."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, **request: object) -> dict[str, Any]:
        with self._lock:
            # What ended one process may have been the machine's doing: a request that ends two is at fault itself.
            line = self._answer(request) or self._answer(request)
        if not line:
            raise InfrastructureError("reasoning-gym's process ended before it replied: it is started anew when asked")
        reply: dict[str, Any] = json.loads(line)
        if "config" in reply:
            raise ConfigError(reply["config"])
        return reply

    def _answer(self, request: Mapping[str, object]) -> str:
        """Return the process's line; empty where it ended over the request, or before."""
        process = self._process = self._process or _started()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        except BaseException:
            self._end()  # the reply is still to come, and would be taken for the next request's
            raise
        if not line:
            self._end()
        return line


def _json(config: Mapping[str, object]) -> str:
    try:
        return json.dumps(config, sort_keys=True)
    except TypeError as error:
        raise ConfigError(f"a setting of reasoning-gym must be a number, text, list or dict: {error}") from error


def _started() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl.envs.reasoning_gym.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C is for this process alone; the other ends when the pipe is closed
        # One thread, so that it can fork at any time.
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONHASHSEED": "0",
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        },
    )


shared_library = PerProcess(Library, close=Library.close).get
"""The library's process, shared by all environments of this process; a forked child gets one of its own."""
