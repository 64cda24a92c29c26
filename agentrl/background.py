"""Calls with a time limit: a function in another thread, a coroutine on an event loop that runs in the background.

Whatever the call raises comes back as a value: a tool that raises ``SystemExit`` must not end the process that called
it. A Python thread can't be killed. One that overran goes on until its function returns, with whatever it holds; there
may be ``MAX_STRAYS`` of these in a process before no more calls are begun. A coroutine is cancelled.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from agentrl.errors import InfrastructureError

MAX_STRAYS = 64
"""How many threads that overran may still be running when another call begins."""
_GRACE = 1.0  # seconds that a cancelled coroutine has for its clean-up
_PATIENCE = 5.0  # seconds that a loop has to show that it is not blocked
_Future: TypeAlias = "concurrent.futures.Future[object]"
_Calls: TypeAlias = "queue.SimpleQueue[tuple[_Future, Callable[[], object]] | None]"
_T = TypeVar("_T")


class Overrun(Exception):
    """A call took longer than its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call ended."""

    value: object = None
    """What it returned, if it did."""
    error: BaseException | None = None
    """What it raised; ``Overrun`` where the time limit ended it."""


_lock = threading.Lock()
_strays: set[threading.Thread] = set()


def in_thread(function: Callable[[], object], timeout: float | None) -> Outcome:
    """Call ``function`` in a daemon thread and wait for it.

    Args:
        function: what to call.
        timeout: seconds to wait for; None waits as long as it takes.

    Raises:
        InfrastructureError: too many calls that overran still run; the process can't bear more of them.
    """
    worker = Worker()
    try:
        return worker.call(function, timeout)
    finally:
        worker.close()


class Worker:
    """A daemon thread that makes one call after another: what one of them has made there, the next may use there.

    It begins with the first call, and ends with ``close`` or when nobody holds the worker any more. A call that overran
    keeps it, and the next one gets another. A copy has a thread of its own.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._calls: _Calls = queue.SimpleQueue()
        self._end: Callable[[], object] = lambda: None

    def call(self, function: Callable[[], object], timeout: float | None) -> Outcome:
        """Call ``function`` in the thread and wait for it; one that is called from there gets a thread of its own.

        Args:
            function: what to call.
            timeout: seconds to wait for; None waits as long as it takes.

        Raises:
            InfrastructureError: too many calls that overran still run; the process can't bear more of them.
        """
        _check_strays()
        if self._thread is threading.current_thread():
            return in_thread(function, timeout)
        if self._thread is None or not self._thread.is_alive():  # a forked child has none of its parent's threads
            self._begin()
        ended: _Future = concurrent.futures.Future()
        self._calls.put((ended, function))
        try:
            concurrent.futures.wait([ended], timeout)
        finally:
            if not ended.done() and self._thread is not None:
                with _lock:
                    _strays.add(self._thread)
                self.close()
        return _outcome(ended) if ended.done() else Outcome(error=Overrun())

    def run(self, function: Callable[[], _T], *, begin: bool = False) -> _T:
        """What ``function`` gives or raises, in the thread if there is one, else right here.

        Args:
            function: what to call.
            begin: begin the thread for it.
        """
        if self._thread is threading.current_thread() or (self._thread is None and not begin):
            return function()
        given: list[_T] = []
        outcome = self.call(lambda: given.append(function()), None)
        if outcome.error is not None:
            raise outcome.error
        return given[0]

    def close(self) -> None:
        """Let the thread end, once the call that it makes is over."""
        self._thread = None
        self._end()

    def _begin(self) -> None:
        self._calls = queue.SimpleQueue()
        self._end = weakref.finalize(self, self._calls.put, None)
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name="agentrl-tool", daemon=True)
        self._thread.start()

    def __reduce__(self) -> tuple[type["Worker"], tuple[()]]:
        return Worker, ()


def _serve(calls: _Calls) -> None:
    while (asked := calls.get()) is not None:
        _settle(*asked)
        del asked  # what it holds may be what keeps the worker alive


def _check_strays() -> None:
    with _lock:
        _strays.difference_update([thread for thread in _strays if not thread.is_alive()])
        if len(_strays) >= MAX_STRAYS:
            raise InfrastructureError(
                f"{len(_strays)} tool calls that ran past their time limit still run, and a thread can't be killed: "
                "give the tool an end of its own, make it async, or run what may never end in a sandbox"
            )


def _settle(ended: _Future, function: Callable[[], object]) -> None:
    try:
        ended.set_result(function())
    except BaseException as error:  # it becomes a value, whatever it is
        ended.set_exception(error)


def _outcome(ended: _Future) -> Outcome:
    error = ended.exception()
    return Outcome(value=ended.result()) if error is None else Outcome(error=error)


class BackgroundLoop:
    """An event loop in a daemon thread.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Awaitable[object]], timeout: float | None) -> Outcome:
        """Await what ``function`` returns, on this loop, and wait for it in the calling thread.

        Args:
            function: called on the loop.
            timeout: seconds after which it is cancelled; None waits as long as it takes.
        """
        ended: _Future = concurrent.futures.Future()
        asyncio.run_coroutine_threadsafe(_settle_async(ended, function, timeout), self._loop)
        concurrent.futures.wait([ended], None if timeout is None else timeout + _GRACE)
        return _outcome(ended) if ended.done() else Outcome(error=Overrun())

    def turns(self) -> bool:
        """Whether the loop still turns; one that a coroutine blocks does not."""
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        return turned.wait(_PATIENCE)

    def close(self, *, wait: float = 5.0) -> threading.Thread:
        """Cancel what still runs, and end the thread, which a coroutine that blocks it can delay.

        Args:
            wait: seconds to wait for the end.
        """
        if not self._closing:
            self._closing = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(wait)
        return self._thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            # asyncio lets these two out of a task and out of the loop: here they end that task alone.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


async def _settle_async(ended: _Future, function: Callable[[], Awaitable[object]], timeout: float | None) -> None:
    scope = asyncio.timeout(timeout)
    try:
        async with scope:
            value = await function()
        ended.set_result(value)
    except BaseException as error:  # it becomes a value, whatever it is
        ended.set_exception(Overrun() if scope.expired() else error)


_shared: list[BackgroundLoop] = []


def call_async(function: Callable[[], Awaitable[object]], timeout: float | None) -> Outcome:
    """Await what ``function`` returns on the event loop that all async tools of this process share.

    The loop is made at the first call and closed when the process ends. One that a coroutine blocks past its time limit
    is given up, and the next call gets another.

    Args:
        function: called on the loop.
        timeout: seconds after which it is cancelled; None waits as long as it takes.

    Raises:
        InfrastructureError: too many calls that overran still run; the process can't bear more of them.
    """
    _check_strays()
    with _lock:
        if not _shared:
            _shared.append(BackgroundLoop("agentrl-async-tools"))
        loop = _shared[0]
    outcome = loop.call(function, timeout)
    if isinstance(outcome.error, Overrun) and not loop.turns():
        with _lock:
            if loop in _shared:
                _shared.remove(loop)
                _strays.add(loop.close(wait=0.0))
    return outcome


def close_shared_loop() -> None:
    """Close the loop that async tools share; the next call makes another."""
    with _lock:
        closing = _shared.copy()
        _shared.clear()
    for loop in closing:
        loop.close()


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _strays.clear()
    _shared.clear()


atexit.register(close_shared_loop)
os.register_at_fork(after_in_child=_forget)
