"""Calls of tools: what the model reads of what a function gives, raises, or takes too long for."""

import asyncio
import dataclasses
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pydantic
import pytest

from agentrl.toolenv.tools.function import ToolContext, ToolError, tool

from ...conftest import python
from .test_function import context


@dataclasses.dataclass
class Point:
    x: int
    y: int


class Box(pydantic.BaseModel):
    size: int


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *(("é", "é"), ("", ""), (3, "3"), (0.5, "0.5"), (True, "true"), (None, "null")),
        *(({"a": [1, "é"]}, '{"a":[1,"é"]}'), ((1, 2), "[1,2]"), (Point(1, 2), '{"x":1,"y":2}')),
        (Box(size=3), '{"size":3}'),
    ],
)
def test_what_is_no_text_is_written_as_json(value: object, shown: str) -> None:
    assert tool(name="give")(lambda: value).call({}) == shown


def circle() -> list[object]:
    made: list[object] = []
    made.append(made)
    return made


@pytest.mark.parametrize("value", [object(), {"a": object()}, circle(), {"\ud800": 1}, np.zeros(3)])
def test_what_json_can_not_express_is_told(value: object) -> None:
    with pytest.raises(ToolError, match=f"give gave a {type(value).__name__}, which can't be written as JSON"):
        tool(name="give")(lambda: value).call({})


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        *((SystemExit(3), "SystemExit: 3"), (KeyboardInterrupt(), "KeyboardInterrupt: ")),
        *((GeneratorExit(), "GeneratorExit: "), (asyncio.CancelledError("x"), "CancelledError: x")),
        *((TimeoutError("slow"), "TimeoutError: slow"), (Unsayable(), "Unsayable: (a Unsayable that can't be shown)")),
        *((ToolError("not today"), "not today"), (ValueError("x" * 10000), "characters left out")),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_whatever_is_raised_is_told(raised: BaseException, message: str, kind: str) -> None:
    def at_once() -> str:
        raise raised

    async def later() -> str:
        await asyncio.sleep(0)
        raise raised

    with pytest.raises(ToolError) as caught:
        tool(at_once if kind == "sync" else later).call({})
    assert message in str(caught.value)
    assert len(str(caught.value)) <= 2000


def test_an_async_function_is_a_tool_too() -> None:
    @tool
    async def double(a: int, ctx: ToolContext) -> int:
        await asyncio.sleep(0)
        return a * 2 + ctx.seed

    assert double.call({"a": "4"}, context(1)) == "9"

    async def inside() -> str:
        return double.call({"a": 1}, context())  # as in a notebook, where a loop is running already

    assert asyncio.run(inside()) == "2"


def test_async_calls_of_many_threads_run_side_by_side() -> None:
    together = asyncio.Barrier(20)

    @tool(timeout=None)
    async def wait(a: int) -> int:
        await together.wait()
        return a

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(lambda a: wait.call({"a": a}), range(20))) == [str(a) for a in range(20)]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_call_that_overruns_is_stopped(kind: str) -> None:
    released, ended = threading.Event(), threading.Event()

    def hang() -> None:
        released.wait()
        ended.set()  # a thread can't be killed: the function comes to its end

    async def wait() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()  # a coroutine is cancelled

    with pytest.raises(ToolError, match=r"stopped: slow ran longer than 0\.05 s"):
        tool(name="slow", timeout=0.05)(hang if kind == "sync" else wait).call({})
    released.set()
    assert ended.wait()


def test_an_interrupt_of_the_user_is_no_observation() -> None:
    code = """
import os, signal, threading, time
from agentrl import tool
@tool(timeout=None)
def hang() -> str:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(3600)
hang.call({})
"""
    assert python("-c", code, status=-signal.SIGINT).stderr.splitlines()[-1] == "KeyboardInterrupt"
