"""Servers of sandboxes in processes of their own, as a user starts them."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.sandboxes import Sandbox
from agentrl.sandboxes.remote.client import RemoteSandbox

ROOT = Path(__file__).parents[3]
KEY = "a-key-of-sufficient-length"


class Served:
    """A server that runs."""

    def __init__(self, *options: str, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "agentrl", "sandbox", "serve", "--port", str(port), "--backend", "local", *options],
            env=os.environ | {"PYTHONPATH": str(ROOT), "AGENTRL_SANDBOX_KEY": KEY},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline() + self.process.stdout.readline()
        self.name = self.said.rpartition("env.sandbox=")[2].strip()
        assert self.name.startswith("remote:http://127.0.0.1:"), self.said
        self.port = int(self.name.rpartition(":")[2])

    def kill(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


Serve = Callable[..., Served]
Client = Callable[..., RemoteSandbox]


@pytest.fixture
def serve(sandbox: Sandbox) -> Iterator[Serve]:
    """Starts servers; where the local sandbox works, which is asked for only to be skipped with it."""
    served: list[Served] = []

    def start(*options: str, port: int = 0) -> Served:
        served.append(Served(*options, port=port))
        return served[-1]

    yield start
    for server in served:
        server.close()


@pytest.fixture(scope="module")
def served(sandbox: Sandbox) -> Iterator[Served]:
    """A server for three sandboxes, which no test may harm."""
    server = Served("--limit", "3", "--ready", "1")
    yield server
    server.close()


@pytest.fixture
def client() -> Iterator[Client]:
    """Opens sandboxes on servers."""
    opened: list[RemoteSandbox] = []

    def open_on(*servers: Served) -> RemoteSandbox:
        urls = ",".join(server.name.removeprefix("remote:") for server in servers)
        opened.append(RemoteSandbox(f"remote:{urls}", key=KEY))
        return opened[-1]

    yield open_on
    for each in opened:
        each.close()
