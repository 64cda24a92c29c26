"""Counts what a sandbox does: the same way for every back end, safe from any thread."""

import threading
from bisect import bisect_left
from collections.abc import Callable

from agentrl.sandboxes.base import LATENCY_BOUNDS_S, Counters, ForkRefused, Result, SandboxClosed, SandboxError


class Meter:
    """Counters that calls from several threads may add to."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self._total = Counters()

    def measure(self, call: Callable[[], Result]) -> Result:
        """Run one call and count how it ends.

        Raises:
            SandboxError: What the call raised.
        """
        try:
            result = call()
        except SandboxError as error:
            self.fault(error)
            raise
        self.ran(result)
        return result

    def ran(self, result: Result) -> None:
        """Count a cell or one-shot program that ended."""
        bucket = bisect_left(LATENCY_BOUNDS_S, result.queue_s + result.wall_s)
        latency = tuple(int(index == bucket) for index in range(len(LATENCY_BOUNDS_S) + 1))
        self._add(Counters(runs={result.status: 1}, queue_s=result.queue_s, latency=latency))

    def fault(self, error: SandboxError) -> None:
        """Count a fault of the infrastructure; a closed session and a refused fork are none."""
        if not isinstance(error, SandboxClosed | ForkRefused):
            self._add(Counters(faults=1))

    def rerun(self) -> None:
        """Count a program that is run again because its worker died."""
        self._add(Counters(reruns=1))

    def snapshot(self) -> Counters:
        """Return the counters as they are now."""
        return self._total

    def _add(self, counted: Counters) -> None:
        with self._lock:
            self._total += counted
