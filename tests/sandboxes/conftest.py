"""What the tests of this folder share: a session, and a look at the processes and sessions that a sandbox made."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

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


def await_ready(sandbox: Sandbox, count: int) -> None:
    """Wait until so many sessions are ready."""
    while sandbox.health().ready != count:
        time.sleep(0.01)


def count_side_by_side(sandbox: Sandbox, *, threads: int, sessions: int) -> None:
    """Have sessions count in several threads at once: none may see another's variable."""

    def episode(number: int) -> list[str | None]:
        with sandbox.session(seed=number) as session:
            session.run(f"x = {number}")
            return [session.run("x += 1\nx").value for _ in range(3)]

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(episode, range(sessions)))
    assert found == [[str(n + 1), str(n + 2), str(n + 3)] for n in range(sessions)]
