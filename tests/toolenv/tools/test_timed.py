"""Calls with a time limit: what comes back, what goes on, and what is left at the end."""

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from agentrl.errors import InfrastructureError
from agentrl.toolenv.tools import timed
from agentrl.toolenv.tools.timed import BackgroundLoop, Overrun, ToolThread, call_async

from ...conftest import python


def threads(name: str) -> int:
    gc.collect()  # the episode of an environment that nobody closed ends with the environment
    return sum(thread.name == name for thread in threading.enumerate())


async def here() -> int:
    return threading.get_ident()


def test_threads_that_never_end_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "MAX_STRAYS", 2)
    release = threading.Event()
    for _ in range(2):
        assert isinstance(ToolThread().call(release.wait, 0.01).exception(), Overrun)
    for call in (ToolThread().call, call_async):
        with pytest.raises(InfrastructureError, match="2 tool calls that ran past their time limit still run"):
            call(asyncio.Event, 0.01)  # pyright: ignore
    release.set()
    while threads("agentrl-tool"):
        time.sleep(0.01)
    assert ToolThread().call(lambda: 3, 5.0).result() == 3


def test_a_task_that_ends_the_process_ends_alone() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def leaves_a_child() -> str:
        child = asyncio.get_running_loop().create_task(leave())
        await asyncio.wait({child})
        return repr(child.exception())

    with closing(BackgroundLoop()) as loop, ThreadPoolExecutor() as pool:
        other = pool.submit(loop.call, lambda: asyncio.sleep(0.3, "slept"), 5.0)
        assert isinstance(loop.call(leave, 5.0).exception(), SystemExit)
        assert loop.call(leaves_a_child, 5.0).result() == "SystemExit(3)"
        assert other.result().result() == "slept"


def test_closing_cancels_what_still_runs() -> None:
    timed._loops.close()
    loop = BackgroundLoop()
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
    assert cancelled.is_set() and not threads("agentrl-loop")


def test_a_slow_loop_is_kept() -> None:
    loop_id = call_async(here, 5.0).result()
    assert isinstance(call_async(lambda: asyncio.sleep(3600), 0.05).exception(), Overrun)
    assert call_async(here, 5.0).result() == loop_id


def test_the_process_ends_in_spite_of_calls_that_do_not() -> None:
    code = """
import asyncio, threading, time
from agentrl.toolenv.tools.timed import ToolThread, call_async
ToolThread().call(lambda: time.sleep(3600), 0.01)
threading.Thread(target=call_async, args=(lambda: asyncio.sleep(3600), None), daemon=True).start()
time.sleep(0.2)
print("end")
"""
    ran = python("-c", code)
    assert (ran.stdout, ran.stderr) == ("end\n", "")
