"""Which episodes are at play: as many as the engine's cache holds and the run allows, until enough have ended."""

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
    """Lets episodes in, those first that have waited longest.

    Of an engine that says how full its cache is, as many are let in at first as fit there whatever their length. Each
    turn that ends while there is room lets in one more, so that their number doubles in the time of a turn. Where the
    cache is full, a quarter has to go, and from then on only a turn of each lets in one more: additive increase,
    multiplicative decrease (Chiu and Jain 1989). Nobody is thrown out: those at play end.

    Args:
        most: episodes at a time; without figures of a cache, always so many.
        tokens: of the longest episode.
    """

    def __init__(self, most: int, tokens: int) -> None:
        self.limit: float = most
        """Episodes at a time for now."""
        self._most, self._tokens = most, tokens
        self._inside, self._preempted = 0, 0
        self._waiting = deque[asyncio.Future[None]]()
        self._known = self._was_full = False

    async def __aenter__(self) -> None:
        # Not a semaphore: its limit can't change, and it serves one event loop only.
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._admit()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
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
        if not self._known:
            self._known, self.limit = True, fits
        elif preempted or cache.used >= _FULL:
            self._was_full = True
            # Once, until it shows.
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
            place = self._waiting.popleft()
            if not place.done():  # its episode was given up
                place.set_result(None)
                self._inside += 1


async def wait_for_enough(
    enough: int | None, playing: Sequence[asyncio.Task[T]], leaving: set[asyncio.Task[T]], complete: Callable[[T], bool]
) -> tuple[Sequence[T], int]:
    """Wait until ``enough`` groups are complete, and cancel the others.

    Args:
        enough: how many; None waits for all.
        playing: plays a group each.
        leaving: holds what was cancelled until it has ended. Nobody waits for it: it may be in a slow tool, and closes
            its environments afterwards.
        complete: says of what has been played whether no episode of it was lost.

    Returns:
        What has ended, in order, and the number of groups that were cancelled.
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
        # One bug in an environment breaks many episodes alike: the first error says it all, and asyncio would write
        # each of the others to the terminal if nobody had asked for it.
        for task in playing:
            _ = task.cancelled() or task.exception()
        cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        raise cause from cause.__cause__
    for task in late:
        task.cancel()
        leaving.add(task)
        task.add_done_callback(leaving.discard)
    return ended, len(late)
