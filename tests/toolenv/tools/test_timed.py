"""Calls with a time limit: what comes back, what goes on, and what is left at the end."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from agentrl.errors import InfrastructureError
from agentrl.toolenv.tools import timed
from agentrl.toolenv.tools.timed import BackgroundLoop, Overrun, call_async, close_shared_loop, in_thread


def threads(name: str) -> int:
    gc.collect()  # the episode of an environment that nobody closed ends with the environment
    return sum(thread.name == name for thread in threading.enumerate())


async def here() -> int:
    return threading.get_ident()


def test_threads_that_never_end_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "MAX_STRAYS", 2)
    release = threading.Event()
    for _ in range(2):
        assert isinstance(in_thread(lambda: release.wait(), 0.01).error, Overrun)
    for call in (in_thread, call_async):
        with pytest.raises(InfrastructureError, match="2 tool calls that ran past their time limit still run"):
            call(asyncio.Event, 0.01)  # pyright: ignore
    release.set()
    while threads("agentrl-tool"):
        time.sleep(0.01)
    assert in_thread(lambda: 3, 5.0).value == 3


def test_a_task_that_ends_the_process_ends_alone() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def leaves_a_child() -> str:
        child = asyncio.get_running_loop().create_task(leave())
        await asyncio.wait({child})
        return repr(child.exception())

    with closing(BackgroundLoop("test")) as loop, ThreadPoolExecutor() as pool:
        other = pool.submit(loop.call, lambda: asyncio.sleep(0.3, "slept"), 5.0)
        assert isinstance(loop.call(leave, 5.0).error, SystemExit)
        assert loop.call(leaves_a_child, 5.0).value == "SystemExit(3)"
        assert other.result().value == "slept"


def test_closing_cancels_what_still_runs() -> None:
    loop = BackgroundLoop("test-closing")
    begun, cancelled = threading.Event(), threading.Event()

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    with ThreadPoolExecutor() as pool:
        pool.submit(loop.call, hang, None)
        assert begun.wait()
        loop.close()
        loop.close()
    assert cancelled.is_set() and not threads("test-closing")


@pytest.mark.slow
def test_a_blocked_loop_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "_PATIENCE", 0.1)
    monkeypatch.setattr(timed, "_GRACE", 0.1)
    close_shared_loop()
    release = threading.Event()

    async def block() -> None:
        release.wait()

    first = call_async(here, 5.0).value
    assert isinstance(call_async(block, 0.05).error, Overrun)
    assert call_async(here, 5.0).value not in (first, None)
    release.set()
    while threads("agentrl-async-tools") > 1:
        time.sleep(0.01)
    close_shared_loop()
    assert not threads("agentrl-async-tools")


def test_a_slow_loop_is_kept() -> None:
    first = call_async(here, 5.0).value
    assert isinstance(call_async(lambda: asyncio.sleep(3600), 0.05).error, Overrun)
    assert call_async(here, 5.0).value == first


def test_the_process_ends_in_spite_of_calls_that_do_not() -> None:
    code = """
import asyncio, threading, time
from agentrl.toolenv.tools.timed import call_async, in_thread
in_thread(lambda: time.sleep(3600), 0.01)
threading.Thread(target=call_async, args=(lambda: asyncio.sleep(3600), None), daemon=True).start()
time.sleep(0.2)
print("end")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("end\n", "", 0)
