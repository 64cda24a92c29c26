"""Counts what a sandbox does: the same way for every back end, safe from any thread."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable

from agentrl.sandboxes.base import LATENCY_BOUNDS_S, Counters, ForkRefused, Result, SandboxClosed, SandboxError, Status


class Meter:
    """Counters that calls from several threads may add to."""

    def __init__(self) -> None:
        """Start at zero."""
        self._lock = threading.Lock()
        self._runs = Counter[Status]()
        self._latency = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._faults = self._reruns = 0
        self._queue_s = 0.0

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
        with self._lock:
            self._runs[result.status] += 1
            self._latency[bucket] += 1
            self._queue_s += result.queue_s

    def fault(self, error: SandboxError) -> None:
        """Count a fault of the infrastructure; a closed session and a refused fork are none."""
        if not isinstance(error, SandboxClosed | ForkRefused):
            with self._lock:
                self._faults += 1

    def rerun(self) -> None:
        """Count a program that is run again because its worker died."""
        with self._lock:
            self._reruns += 1

    def snapshot(self) -> Counters:
        """Copy the counters as they are now."""
        with self._lock:
            return Counters(
                runs=dict(self._runs),
                faults=self._faults,
                reruns=self._reruns,
                queue_s=self._queue_s,
                latency=tuple(self._latency),
            )
