"""Limit the episodes at play to what the engine's cache holds, and wait until enough groups are complete."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from agentrl.engines.base import Cache

T = TypeVar("T")
_ROOMY = 0.8
"""Below this share of the cache there is room for another episode."""
_FULL = 0.95
"""From this share on there are too many."""
_CUT = 0.75
"""Of the episodes at play, how many may be once there were too many."""


class Gate:
    """Admits episodes in the order in which they came.

    If the engine reports how full its cache is, the gate at first admits as many episodes as fit whatever their length.
    Each turn that ends while there is room admits one more, so their number doubles in the time of a turn. When the
    cache is full, the limit falls by a quarter, and from then on it rises by one after a turn of each episode: additive
    increase, multiplicative decrease (Chiu and Jain 1989). No episode at play is stopped.

    Args:
        most: most episodes at a time, and the limit where the engine reports nothing.
        tokens: most tokens of an episode.
    """

    def __init__(self, most: int, tokens: int) -> None:
        self.limit: float = most
        """Episodes at a time, for now."""
        self._most, self._tokens = most, tokens
        self._inside, self._preempted = 0, 0
        self._waiting = deque[asyncio.Future[None]]()
        self._seen = self._was_full = False

    async def __aenter__(self) -> None:
        # Not a semaphore: its limit can't change, and it serves one event loop only.
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append(admitted)
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def observe(self, cache: Cache | None) -> None:
        """Adapt the limit to the engine's cache, before the first episode and after each turn."""
        if cache is None:
            return
        fits = min(self._most, max(1, cache.tokens // self._tokens))
        preempted, self._preempted = cache.preempted > self._preempted, cache.preempted
        if not self._seen:
            self._seen, self.limit = True, fits
        elif preempted or cache.used >= _FULL:
            self._was_full = True
            # Only once, until episodes have ended and the number at play has fallen to the limit.
            if self._inside <= self.limit:
                self.limit = max(fits, _CUT * self._inside)
        elif cache.used < _ROOMY and self._waiting:
            self.limit = min(self._most, self.limit + (1 / self.limit if self._was_full else 1))
            self._admit()

    def _leave(self) -> None:
        self._inside -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._inside + 1 <= self.limit:
            admitted = self._waiting.popleft()
            if not admitted.done():  # its episode was cancelled
                admitted.set_result(None)
                self._inside += 1


async def wait_for_enough(
    enough: int | None, playing: Sequence[asyncio.Task[T]], leaving: set[asyncio.Task[T]], complete: Callable[[T], bool]
) -> tuple[Sequence[T], int]:
    """Wait until ``enough`` groups are complete, and cancel the others.

    Args:
        enough: how many groups; None waits for all.
        playing: a task for each group.
        leaving: receives cancelled tasks and holds them until they have ended. They are not waited for, since a slow
            tool may delay them; their environments are closed afterwards.
        complete: returns True for a result whose group lost no episode.

    Returns:
        The results of the tasks that have ended, in order, and the number of cancelled groups.
    """
    count = 0
    try:
        for task in asyncio.as_completed(playing):
            count += complete(await task)
            if count == enough:
                break
        late = [task for task in playing if not task.done()]
        ended = [task.result() for task in playing if task.done()]
    except BaseException as error:
        for task in playing:
            task.cancel()
        await asyncio.wait(playing)
        # One bug in an environment breaks many episodes alike, and the first error says enough. The others are read
        # too: asyncio prints errors that nobody reads.
        for task in playing:
            _ = task.cancelled() or task.exception()
        cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        raise cause from cause.__cause__
    for task in late:
        task.cancel()
        leaving.add(task)
        task.add_done_callback(leaving.discard)
    return ended, len(late)
