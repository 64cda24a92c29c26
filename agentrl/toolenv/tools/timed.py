"""Calls with a time limit: a function in another thread, a coroutine on a background event loop.

An exception comes back as a value: a tool that raises ``SystemExit`` must not end the process that called it. A
coroutine is cancelled at its limit. A Python thread can't be killed: one that overran runs on until its function
returns, with whatever it holds. With ``MAX_STRAYS`` such threads in a process, no more calls are begun.
"""

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from agentrl.errors import InfrastructureError
from agentrl.processes.per_process import PerProcess

MAX_STRAYS = 64
"""Number of threads running past their limit at which no further call begins."""
_GRACE = 1.0  # seconds that a cancelled coroutine has for its clean-up
_PATIENCE = 5.0  # seconds that a loop has to show that it is not blocked
_Future: TypeAlias = "concurrent.futures.Future[object]"
_Calls: TypeAlias = "queue.SimpleQueue[tuple[_Future, Callable[[], object]] | None]"
_T = TypeVar("_T")


class Overrun(Exception):
    """A call took longer than its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a call."""

    value: object = None
    """The returned value, if there is one."""
    error: BaseException | None = None
    """The raised exception; ``Overrun`` where the time limit ended the call."""


_lock = PerProcess(threading.Lock)
_strays: set[threading.Thread] = set()


def in_thread(function: Callable[[], object], timeout: float | None) -> Outcome:
    """Call ``function`` in a daemon thread and wait for it.

    Args:
        function: what to call.
        timeout: seconds to wait; None waits without limit.

    Raises:
        InfrastructureError: ``MAX_STRAYS`` calls that overran still run.
    """
    worker = Worker()
    try:
        return worker.call(function, timeout)
    finally:
        worker.close()


class Worker:
    """A daemon thread that makes one call after another, so that a call can use what an earlier one made in its thread.

    The thread begins with the first call, and ends with ``close`` or when the worker is garbage-collected. A call that
    overruns keeps the thread; the next call gets a new one. A copy of a worker has a thread of its own.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._calls: _Calls = queue.SimpleQueue()
        self._end: Callable[[], object] = lambda: None

    def call(self, function: Callable[[], object], timeout: float | None) -> Outcome:
        """Call ``function`` in the thread and wait for it; a call from that thread runs in a thread of its own.

        Args:
            function: what to call.
            timeout: seconds to wait; None waits without limit.

        Raises:
            InfrastructureError: ``MAX_STRAYS`` calls that overran still run.
        """
        _check_strays()
        # The thread would wait for itself for ever.
        if self._thread is threading.current_thread():
            return in_thread(function, timeout)
        if self._thread is None or not self._thread.is_alive():  # dead in a forked child, which inherits no threads
            self._begin()
        ended: _Future = concurrent.futures.Future()
        self._calls.put((ended, function))
        try:
            concurrent.futures.wait([ended], timeout)
        finally:
            # In ``finally``, because a Ctrl-C during the wait leaves the call running as well.
            if not ended.done() and self._thread is not None:
                with _lock.get():
                    _strays.add(self._thread)
                self.close()
        return _outcome(ended) if ended.done() else Outcome(error=Overrun())

    def run(self, function: Callable[[], _T], *, begin: bool = False) -> _T:
        """Call ``function`` without a time limit, in the thread if there is one, else in the caller's.

        Args:
            function: what to call; what it raises is raised here.
            begin: begin the thread if there is none.
        """
        if self._thread is threading.current_thread() or (self._thread is None and not begin):
            return function()
        given: list[_T] = []
        outcome = self.call(lambda: given.append(function()), None)
        if outcome.error is not None:
            raise outcome.error
        return given[0]

    def close(self) -> None:
        """Let the thread end once its current call is over."""
        self._thread = None
        self._end()

    def _begin(self) -> None:
        self._calls = queue.SimpleQueue()
        # The thread refers to the queue, not to the worker: an abandoned worker is collected, and this ends its thread.
        self._end = weakref.finalize(self, self._calls.put, None)
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name="agentrl-tool", daemon=True)
        self._thread.start()

    def __reduce__(self) -> tuple[type["Worker"], tuple[()]]:
        return Worker, ()


def _serve(calls: _Calls) -> None:
    while (asked := calls.get()) is not None:
        _settle(*asked)
        del asked  # the function may refer to the worker, which then would not be collected while the thread waits


def _check_strays() -> None:
    with _lock.get():
        _strays.difference_update([thread for thread in _strays if not thread.is_alive()])
        if len(_strays) >= MAX_STRAYS:
            raise InfrastructureError(
                f"{len(_strays)} tool calls that ran past their time limit still run, and a thread can't be killed: "
                "give the tool an end of its own, make it async, or run what may never end in a sandbox"
            )


def _settle(ended: _Future, function: Callable[[], object]) -> None:
    try:
        ended.set_result(function())
    except BaseException as error:  # SystemExit included: it becomes a value
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
            timeout: seconds after which it is cancelled; None waits without limit.
        """
        ended: _Future = concurrent.futures.Future()
        asyncio.run_coroutine_threadsafe(_settle_async(ended, function, timeout), self._loop)
        # The loop itself ends the call at its limit; the grace is for clean-up, and for finding the loop blocked.
        concurrent.futures.wait([ended], None if timeout is None else timeout + _GRACE)
        return _outcome(ended) if ended.done() else Outcome(error=Overrun())

    def turns(self) -> bool:
        """Return True if the loop still runs callbacks; a coroutine that never awaits blocks it."""
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        return turned.wait(_PATIENCE)

    def close(self, *, wait: float = 5.0) -> threading.Thread:
        """Cancel running coroutines and end the thread, which a coroutine that blocks the loop can delay.

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


async def _settle_async(ended: _Future, function: Callable[[], Awaitable[object]], timeout: float | None) -> None:
    scope = asyncio.timeout(timeout)
    try:
        async with scope:
            value = await function()
        ended.set_result(value)
    except BaseException as error:  # SystemExit included: it becomes a value
        # The scope tells the time limit from a TimeoutError of the function's own.
        ended.set_exception(Overrun() if scope.expired() else error)


_loops = PerProcess(lambda: BackgroundLoop("agentrl-async-tools"), close=BackgroundLoop.close)
close_shared_loop = _loops.close
"""Close the loop that async tools share; the next call makes another."""


def call_async(function: Callable[[], Awaitable[object]], timeout: float | None) -> Outcome:
    """Await what ``function`` returns on the event loop that all async tools of this process share.

    The loop is made at the first call and closed when the process ends. A loop that a coroutine blocks past its time
    limit is given up, and the next call gets a new one.

    Args:
        function: called on the loop.
        timeout: seconds after which it is cancelled; None waits without limit.

    Raises:
        InfrastructureError: ``MAX_STRAYS`` calls that overran still run.
    """
    _check_strays()
    loop = _loops.get()
    outcome = loop.call(function, timeout)
    if isinstance(outcome.error, Overrun) and not loop.turns():
        _loops.drop(loop)
        with _lock.get():
            _strays.add(loop.close(wait=0.0))
    return outcome
