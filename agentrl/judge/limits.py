"""Limits of requests and tokens a minute, and what was spent."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from threading import Lock

_WINDOW_S = 60.0


@dataclass(slots=True, kw_only=True)
class Spent:
    """What the requests of this process have cost."""

    requests: int = 0
    """Requests that were sent, those that failed included."""
    cached: int = 0
    """Questions that the cache answered."""
    read: int = 0
    """Tokens that the server says it has read."""
    written: int = 0
    """Tokens that the server says it has written."""


@dataclass(slots=True)
class Use:
    """A request of the last minute."""

    at: float
    """When it was sent, in seconds of the meter's clock."""
    tokens: float
    """Its tokens: an estimate until its answer is here."""


class Meter:
    """Holds requests back so that no minute has more of them, or of their tokens, than is allowed.

    A request of more tokens than a minute may have is sent alone.

    Args:
        requests: most requests in any minute.
        tokens: most tokens in any minute, read and written.
        clock: returns the time in seconds.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        requests: float,
        tokens: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._requests, self._tokens, self._clock, self._sleep = requests, tokens, clock, sleep
        self._uses = deque[Use]()
        # Requests may come from several event loops.
        self._lock = Lock()

    async def admit(self, tokens: float) -> Use:
        """Wait until a request may be sent; its tokens can be corrected afterwards in what is returned."""
        while not isinstance(use := self._use_or_wait(tokens), Use):
            await self._sleep(use)
        return use

    def _use_or_wait(self, tokens: float) -> Use | float:
        with self._lock:
            now = self._clock()
            while self._uses and now - self._uses[0].at >= _WINDOW_S:
                self._uses.popleft()
            total = tokens + sum(use.tokens for use in self._uses)
            if self._uses and (len(self._uses) >= self._requests or total > self._tokens):
                return self._uses[0].at + _WINDOW_S - now
            use = Use(now, tokens)
            self._uses.append(use)
            return use
