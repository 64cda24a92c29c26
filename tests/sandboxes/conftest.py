"""What the tests of this folder share: a session, and a look at the processes and sessions that a sandbox made."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from agentrl.sandboxes import Sandbox, Session


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[Session]:
    with sandbox.session() as opened:
        yield opened


def below(pid: int) -> set[int]:
    """Every process below ``pid``; those that have ended count as long as nobody waited for them."""
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


def pid_ones(depth: int) -> set[int]:
    """Every first process of a namespace below this process: of a sandbox (1), of a session in one (2)."""
    found = set[int]()
    for pid in below(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):
            (line,) = re.findall(r"NSpid:(.*)", Path(f"/proc/{pid}/status").read_text())
            if len(line.split()) == depth + 1 and line.split()[-1] == "1":
                found.add(pid)
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that run still; a zombie whose new parent does not look does not."""
    found = set[int]()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
    return found


def await_ready(sandbox: Sandbox, count: int) -> None:
    """Wait until so many sessions are ready."""
    while sandbox.health().ready != count:
        time.sleep(0.01)
