"""Calls with a time limit: a function in another thread, a coroutine on the event loop that the process shares.

A call returns a future that has ended, so an exception is a value: a tool that raises ``SystemExit`` must not end the
process that called it. A coroutine is cancelled at its limit. A Python thread can't be killed: one that overran runs on
until its function returns, with whatever it holds. With ``MAX_STRAYS`` such threads in a process, no more calls begin.
"""

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from agentrl.errors import EnvContractError, InfrastructureError
from agentrl.processes.per_process import PerProcess

MAX_STRAYS = 64
"""Number of threads running past their limit at which no further call begins."""
_GRACE = 1.0  # seconds that a cancelled coroutine has for its clean-up
_PATIENCE = 5.0  # seconds that a loop has to show that it is not blocked
_Calls: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Callable[[], object]] | None]"
_T = TypeVar("_T")


class Overrun(Exception):
    """A call took longer than its limit."""


_lock = PerProcess(threading.Lock)
_strays: set[threading.Thread] = set()


class ToolThread:
    """A daemon thread that makes one call after another, so that a call can use what an earlier one made in its thread.

    The thread begins with the first call. It ends with ``close``, or when this object is garbage-collected. A call that
    overruns keeps the thread; the next call gets a new one. A copy of this object has a thread of its own.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._calls: _Calls = queue.SimpleQueue()
        self._end: Callable[[], object] = lambda: None

    def call(self, function: Callable[[], _T], timeout: float | None) -> Future[_T]:
        """Call ``function`` in the thread and wait for it; a call from that thread runs in a thread of its own.

        Args:
            function: what to call.
            timeout: seconds to wait; None waits without limit.

        Returns:
            The ended call: its value, or its exception, which is ``Overrun`` where the time limit ended it.

        Raises:
            InfrastructureError: ``MAX_STRAYS`` calls that overran still run.
        """
        _check_strays()
        # The thread would wait for itself for ever.
        if self._thread is threading.current_thread():
            return ToolThread().call(function, timeout)
        if self._thread is None or not self._thread.is_alive():  # dead in a forked child, which inherits no threads
            self._begin()
        call: Future[_T] = Future()
        self._calls.put((call, function))
        try:
            concurrent.futures.wait([call], timeout)
        finally:
            # In ``finally``, because a Ctrl-C during the wait leaves the call running as well.
            if not call.done() and self._thread is not None:
                with _lock.get():
                    _strays.add(self._thread)
                self.close()
        return _ended(call)

    def run(self, function: Callable[[], _T], *, begin: bool = False) -> _T:
        """Call ``function`` without a time limit, in the thread if there is one, else in the caller's.

        Args:
            function: what to call; what it raises is raised here.
            begin: begin the thread if there is none.
        """
        if self._thread is threading.current_thread() or (self._thread is None and not begin):
            return function()
        return self.call(function, None).result()

    def close(self) -> None:
        """Let the thread end once its current call is over."""
        self._thread = None
        self._end()

    def _begin(self) -> None:
        self._calls = queue.SimpleQueue()
        # The thread refers to the queue, not to this object, which can so be collected; that ends the thread.
        self._end = weakref.finalize(self, self._calls.put, None)
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name="agentrl-tool", daemon=True)
        self._thread.start()

    def __reduce__(self) -> tuple[type["ToolThread"], tuple[()]]:
        return ToolThread, ()


def _serve(calls: _Calls) -> None:
    while (request := calls.get()) is not None:
        call, function = request
        try:
            call.set_result(function())
        except BaseException as error:  # SystemExit included: it becomes a value
            call.set_exception(error)
        # The function may refer to the ToolThread, which would not be collected while this thread waits.
        del request, call, function


def _check_strays() -> None:
    with _lock.get():
        _strays.difference_update([thread for thread in _strays if not thread.is_alive()])
        if len(_strays) >= MAX_STRAYS:
            raise InfrastructureError(
                f"{len(_strays)} tool calls that ran past their time limit still run, and a thread can't be killed: "
                "give the tool an end of its own, make it async, or run what may never end in a sandbox"
            )


def _ended(call: Future[_T]) -> Future[_T]:
    if not call.done():
        call = Future()
        call.set_exception(Overrun())
    return call


class BackgroundLoop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.closed = False
        """True once it is closed or given up: its coroutines are cancelled, and no call may begin."""
        self._thread = threading.Thread(target=self._run, name="agentrl-loop", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Awaitable[_T]], timeout: float | None) -> Future[_T]:
        """Await what ``function`` returns, on this loop, and wait for it in the calling thread.

        Args:
            function: called on the loop.
            timeout: seconds after which it is cancelled; None waits without limit.

        Returns:
            The ended call, as of :meth:`ToolThread.call`.

        Raises:
            EnvContractError: the calling thread is the loop's own.
        """
        if threading.current_thread() is self._thread:
            raise EnvContractError("an async tool waits for a call on its own event loop: write def, not async def")
        call: Future[_T] = Future()
        asyncio.run_coroutine_threadsafe(_settle(call, function, timeout), self._loop)
        # The loop itself ends the call at its limit; the grace is for clean-up, and for finding the loop blocked.
        concurrent.futures.wait([call], None if timeout is None else timeout + _GRACE)
        return _ended(call)

    def responds(self) -> bool:
        """Return True if the loop still runs callbacks; a coroutine that never awaits blocks it."""
        responded = threading.Event()
        self._loop.call_soon_threadsafe(responded.set)
        return responded.wait(_PATIENCE)

    def close(self, *, wait: float = 5.0) -> threading.Thread:
        """Cancel running coroutines and end the thread, which a coroutine that blocks the loop can delay.

        Args:
            wait: seconds to wait for the end.
        """
        if not self.closed:
            self.closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(wait)
        return self._thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self.closed:
            # asyncio re-raises these two out of the loop: here they may end their own task only.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()
        # Repeated, because the clean-up of a cancelled task may begin another.
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


async def _settle(call: Future[_T], function: Callable[[], Awaitable[_T]], timeout: float | None) -> None:
    scope = asyncio.timeout(timeout)
    try:
        async with scope:
            value = await function()
        call.set_result(value)
    except BaseException as error:  # SystemExit included: it becomes a value
        # The scope distinguishes the time limit from a TimeoutError of the function's own.
        call.set_exception(Overrun() if scope.expired() else error)


_loops = PerProcess(BackgroundLoop, close=BackgroundLoop.close)
shared_loop = _loops.get
"""Return the one loop of this process, for all async tools and MCP sessions: made at first use, closed at exit."""


def call_async(function: Callable[[], Awaitable[_T]], timeout: float | None) -> Future[_T]:
    """Await what ``function`` returns on the event loop of this process.

    A loop that a coroutine blocks past its time limit is given up: the next call gets a new one, and so does the next
    call of an MCP session.

    Args:
        function: called on the loop.
        timeout: seconds after which it is cancelled; None waits without limit.

    Returns:
        The ended call, as of :meth:`ToolThread.call`.

    Raises:
        InfrastructureError: ``MAX_STRAYS`` calls that overran still run.
    """
    _check_strays()
    loop = shared_loop()
    call = loop.call(function, timeout)
    if isinstance(call.exception(), Overrun) and not loop.responds():
        _loops.drop(loop)
        with _lock.get():
            _strays.add(loop.close(wait=0.0))
    return call
