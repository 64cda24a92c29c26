"""Accounts for the CPU time and the memory of a session, between its cells too: the next cell is charged.

A program can use both while no cell runs: in the handler of an alarm, or by a late answer to an order.
"""

import time
from collections.abc import Collection

from agentrl.sandboxes.inside import processes, wire
from agentrl.sandboxes.inside.processes import Usage
from agentrl.sandboxes.inside.running_cell import RunningCell
from agentrl.sandboxes.inside.snapshot import HONEST_S


class Account:
    """Adds up what a session used since its last answer."""

    def __init__(self, memory: int) -> None:
        """Begin with nothing; ``memory`` is what all processes may hold together [bytes]."""
        self._memory = memory
        self._owed = self._clock_before = 0.0
        self._since = processes.usage().cpu_s
        self._next_pss = 0.0
        self._shared = 0
        self.rss = 0
        """Largest resident memory since it was set to zero [bytes]."""

    def settle(self, pid: int, excluded: Collection[int], cell: RunningCell | None = None) -> None:
        """Forget what was used so far; see :meth:`resume`."""
        self._owed = 0.0
        self.resume(pid, excluded, cell)

    def pause(self, excluded: Collection[int]) -> None:
        """Charge nothing from here on until :meth:`resume`."""
        self._owed = processes.usage(excluded).cpu_s - self._since

    def resume(self, pid: int, excluded: Collection[int], cell: RunningCell | None = None) -> None:
        """Charge from here on again, beside what was owed before the pause.

        Args:
            pid: The program.
            excluded: Processes that do not count.
            cell: A cell that waited, whose time begins now.
        """
        if cell is not None:
            cell.restart()
        self._since = processes.usage(excluded).cpu_s - self._owed
        self._clock_before = processes.cpu_clock(pid) - self._owed

    def usage(self, excluded: Collection[int]) -> Usage:
        """Return the CPU time since the last answer, and the memory now."""
        used = processes.usage(excluded)
        self.rss = max(self.rss, used.rss)
        return Usage(cpu_s=max(used.cpu_s - self._since, 0.0), rss=used.rss)

    def measure(self, pid: int, excluded: Collection[int]) -> wire.Message:
        """Return the CPU time since the last answer and the largest memory, as an answer states them."""
        # The sum over all processes counts in ticks of 10 ms. The program's own clock is exact, and usually shows all.
        cpu = max(self.usage(excluded).cpu_s, processes.cpu_clock(pid) - self._clock_before)
        return {"cpu": cpu, "rss": self.rss}

    def overrun(self, cell: RunningCell | None, excluded: Collection[int], *, copying: bool) -> str | None:
        """Return the limit that is passed: ``timeout``, ``memory``, or None.

        Args:
            cell: The cell that runs or is next, if any.
            excluded: Processes that do not count.
            copying: The program was ordered to copy itself, so one of the processes may be its copy.
        """
        used = self.usage(excluded)
        # An honest copy is charged to no cell, but how long it took is known only when it is made.
        if cell is not None and cell.is_late(used.cpu_s, excluded, HONEST_S if copying else 0.0):
            return "timeout"
        now = time.monotonic()
        # Exact figures cost milliseconds for each process: spend at most a fifth of the time on them, unless what was
        # touched since may be too much.
        if used.rss <= self._memory or (now < self._next_pss and used.rss - self._shared <= self._memory):
            return None
        exact = processes.proportional_bytes(excluded, used.rss, self._memory, copying=copying)
        self._shared = used.rss - exact
        self._next_pss = time.monotonic() + 4 * (time.monotonic() - now)
        return "memory" if exact > self._memory else None
