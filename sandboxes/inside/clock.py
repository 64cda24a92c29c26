"""Measures a session's wall time, without the time in which the session is ready to run and gets no core."""

import time
from collections.abc import Collection
from typing import Final

from agentrl.sandboxes.inside import processes

STRETCH: Final = 10.0
"""Bound on the ratio of real time to session time: a program that sleeps can keep a thread at the lowest priority that
asks for a core and never gets one."""
LINGER_S: Final = 0.001
"""Delay before an idle session is stopped: to stop and wake it between two cells costs a tenth of a short cell."""
_LOOK_S: Final = 0.01
_HEARTBEAT_S: Final = 1.0


class SessionClock:
    """Wall time without the time in which the session waited for a core.

    Of all threads the one that waited longest between two samples counts: their sum would let a program stop its clock
    with many threads that wait for each other. What a process waited between the last sample and its end is lost, and
    where the kernel does not say how long threads wait, as gVisor's does not, this is the plain wall clock.
    """

    def __init__(self) -> None:
        """Start it."""
        self._delays: dict[int, float] = {}
        self._looked = 0.0
        self.start()

    def start(self) -> None:
        """Reset to zero."""
        self._began = time.monotonic()
        self._waited = 0.0
        self._last_beat = self._began

    def has_passed(self, seconds: float, excluded: Collection[int]) -> bool:
        """Return whether the session's time since the start is above a limit.

        Args:
            seconds: The limit.
            excluded: Processes that do not count.
        """
        now = time.monotonic()
        passed = now - self._began
        # A sample reads a file for each thread: the last one serves for a while, unless the answer would be yes.
        if now - self._looked > _LOOK_S or passed - self._waited > seconds:
            delays = processes.run_delays(excluded)
            # A thread seen for the first time brings the wait of its whole life, which lies after the last sample.
            longest = max((delay - self._delays.get(task, 0.0) for task, delay in delays.items()), default=0.0)
            self._waited = min(self._waited + longest, passed)
            self._delays, self._looked = delays, now
        return max(passed - self._waited, passed / STRETCH) > seconds

    def heartbeat_due(self) -> bool:
        """Return true once a second: the host waits longer as long as it hears that pid 1 is at work."""
        if time.monotonic() - self._last_beat < _HEARTBEAT_S:
            return False
        self._last_beat = time.monotonic()
        return True
