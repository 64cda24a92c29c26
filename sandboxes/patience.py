"""A session's own wall clock, which stands still while the session is ready to run and gets no core."""

import time
from collections.abc import Collection
from typing import Final

from agentrl.sandboxes import processes

STRETCH: Final = 10.0
"""How much longer than on an idle machine a session may take, whatever it waited for: a program that sleeps can keep a
thread that asks for a core and, at the lowest priority, gets none."""
LINGER_S: Final = 0.001
"""So soon after a cell the next one need not have been stopped and woken: that costs a tenth of a short cell."""
_LOOK_S: Final = 0.01
_NEWS_S: Final = 1.0


class OwnClock:
    """Wall time without the time in which the session waited for a core.

    Of all threads the one that waited longest between two looks counts: their sum would let a program stop its clock
    with many threads that wait for each other. What a process waited between the last look at it and its end is lost,
    and where the kernel does not say how long threads wait, as gVisor's does not, this is the plain wall clock.
    """

    def __init__(self) -> None:
        """Start it."""
        self._delays: dict[int, float] = {}
        self._looked = 0.0
        self.start()

    def start(self) -> None:
        """Begin at zero again."""
        self._began = time.monotonic()
        self._waited = 0.0
        self._told = self._began

    def has_passed(self, seconds: float, spared: Collection[int]) -> bool:
        """Whether so much of the session's own time has passed since the start.

        Args:
            seconds: How much.
            spared: Processes that do not count.
        """
        now = time.monotonic()
        passed = now - self._began
        # Whoever asks often gets the answer from before, unless it matters.
        if now - self._looked > _LOOK_S or passed - self._waited > seconds:
            delays = processes.run_delays(spared)
            longest = max((delay - self._delays.get(task, 0.0) for task, delay in delays.items()), default=0.0)
            self._waited = min(self._waited + longest, passed)
            self._delays, self._looked = delays, now
        return max(passed - self._waited, passed / STRETCH) > seconds

    def has_news(self) -> bool:
        """Whether it has run for another second, so that who waits should be told that somebody still watches."""
        if time.monotonic() - self._told < _NEWS_S:
            return False
        self._told = time.monotonic()
        return True
