"""Ctrl-C and SIGTERM during a run: they cancel it at an await, so that complete steps can be saved."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

import torch

from agentrl.errors import Terminated

T = TypeVar("T")


class Interrupts:
    """Turns the first Ctrl-C or SIGTERM into a cancellation of the run, and ignores further ones.

    The handlers raise nothing, so no statement is interrupted half-way. Python can set signal handlers in its main
    thread only; in another thread this does nothing.
    """

    def __enter__(self) -> "Interrupts":
        self._here = threading.current_thread() is threading.main_thread()
        self.kind: type[KeyboardInterrupt] = KeyboardInterrupt
        self._pressed = False
        self._cancel: Callable[[], object] = lambda: None
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        if self._here:
            for number in self._before:
                signal.signal(number, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        if self._here:
            for number, before in self._before.items():
                signal.signal(number, before)

    def hold(self) -> None:
        """Ignore further signals: the remaining work, such as saving, is short, and useless if it is cut off."""
        if self._here:
            for number in self._before:
                signal.signal(number, signal.SIG_IGN)

    async def run(self, work: Callable[[], Coroutine[object, object, None]]) -> None:
        """Do ``work`` until the first signal cancels it.

        Raises:
            CancelledError: a signal came, perhaps before this was called.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def cancel() -> None:
            task.cancel()
            # A signal handler runs beside the loop, which may be asleep in select and would not see the cancellation.
            loop.call_soon_threadsafe(lambda: None)

        # The callback comes before the flag: a signal between the two lines is seen either way.
        self._cancel = cancel
        if self._pressed:
            raise asyncio.CancelledError
        await work()

    def _press(self, number: int, _: object) -> None:
        self._pressed = True
        self.kind = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        self.hold()
        self._cancel()


def computing(work: Callable[[], T]) -> T:
    """Do ``work`` in this thread with the number of PyTorch threads in ``run.threads``.

    A new thread takes over this number when PyTorch first asks for it. MKL does not ask: its products would use all
    cores until then, and their last bits would depend on the thread that computes them.
    """
    torch.get_num_threads()
    return work()


async def run_in_thread(work: Callable[[], T]) -> T:
    """Do ``work`` in a thread. A cancellation meanwhile is raised at the next await, so that the result is not lost."""
    thread, cancelled = asyncio.create_task(asyncio.to_thread(computing, work)), False
    while not thread.done():
        try:
            await asyncio.wait({thread})
        except asyncio.CancelledError:
            cancelled = True
    task = asyncio.current_task()
    if task is not None and cancelled:
        task.cancel()
    return thread.result()


def stop_if_cancelled() -> None:
    """Raise CancelledError if the task was cancelled: long code that awaits nothing would not notice otherwise."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
