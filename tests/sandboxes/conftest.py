"""What the tests of this folder share: a session, and a look at the processes and sessions that a sandbox made."""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

import psutil
import pytest

from agentrl.sandboxes import Sandbox, Session

from ..conftest import load_script

HOST = """
import sys, time
from agentrl.sandboxes import open_sandbox
sandbox = open_sandbox(sys.argv[1], ready=2)
session = sandbox.session()
session.run("import subprocess\\nsubprocess.Popen(['sleep', '600'])")
while not sandbox.health().ready:  # one that was made and not started yet stays for the next sandbox to remove
    time.sleep(0.05)
print("up", flush=True)
time.sleep(600)
"""
"""A process with a sandbox of the back end that its argument names, a session in it, and a program in that."""


@pytest.fixture
def session(sandbox: Sandbox) -> Iterator[Session]:
    with sandbox.session() as opened:
        yield opened


def below(pid: int) -> set[int]:
    """Every process below ``pid``; those that have ended count as long as nobody waited for them."""
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


def pid_ones(kind: Literal["zygote", "session"]) -> set[int]:
    """Every first process of such a namespace below this process."""
    return set(load_script("chaos_sandboxes").first_processes()[kind])


def alive(pids: set[int]) -> set[int]:
    """Those that run still; a zombie whose new parent does not look does not."""
    running = set[int]()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.add(pid)
    return running


def await_ready(sandbox: Sandbox, count: int) -> None:
    """Wait until so many sessions are ready."""
    while sandbox.health().ready != count:
        time.sleep(0.01)
