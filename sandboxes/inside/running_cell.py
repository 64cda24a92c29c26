"""Accounts for the cell that runs: how it began, what it has used, which limit it passed, and how it ended."""

import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from agentrl.sandboxes.inside import processes, wire
from agentrl.sandboxes.inside.clock import SessionClock

_STATUSES: Final = ("ok", "error", "exit", "memory")


@dataclass(slots=True, kw_only=True)
class RunningCell:
    """The cell, or other order, that the program works on."""

    order: wire.Message
    token: str
    started: float = field(default_factory=time.monotonic)
    cpu_before: float = 0.0
    clock_before: float = 0.0
    oom_before: int = field(default_factory=processes.oom_kills)
    rss: int = 0
    next_pss: float = 0.0
    shared: int = 0
    claim: wire.Message | None = None
    reason: str | None = None
    poisoned: bool = False

    def validate(self, claim: wire.Message) -> wire.Message:
        """Validate what the program claims to have come of the cell.

        Raises:
            agentrl.sandboxes.inside.wire.WireError: The claim has another form, or is the second one.
        """
        checked: wire.Message = {
            "status": claim.get("status"),
            "value": wire.text(claim, "value", wire.MAX_CLAIM),
            "exc_type": wire.text(claim, "exc_type", 200),
            "traceback": wire.text(claim, "traceback", wire.MAX_CLAIM),
            "exit_code": wire.number(claim, "exit_code"),
        }
        if checked["status"] not in _STATUSES or self.claim is not None:
            raise wire.WireError("no such status")
        return checked

    def measure(self, pid: int, excluded: Collection[int]) -> wire.Message:
        """Measure what was used so far.

        Args:
            pid: The program.
            excluded: Processes that do not count.
        """
        # The sum over all processes counts in ticks of 10 ms; the program's own clock is exact, and usually the whole.
        wall, now = time.monotonic() - self.started, processes.usage(excluded)
        precise = processes.cpu_clock(pid) - self.clock_before
        cpu = max(now.cpu_s - self.cpu_before, precise, 0.0)
        return {"t": "done", "wall": wall, "cpu": cpu, "rss": max(self.rss, now.rss), "signal": None}

    def overrun(self, clock: SessionClock, memory: int, excluded: Collection[int]) -> str | None:
        """Return the limit that is passed: ``timeout``, ``memory``, or None.

        Args:
            clock: The session's clock, started with the cell.
            memory: What all processes may hold together [bytes].
            excluded: Processes that do not count.
        """
        now, used = time.monotonic(), processes.usage(excluded)
        self.rss = max(self.rss, used.rss)
        late = clock.has_passed(wire.real(self.order, "wall"), excluded)
        if late or used.cpu_s - self.cpu_before > wire.real(self.order, "cpu"):
            return "timeout"
        # Exact figures cost milliseconds for each process: spend at most a fifth of the time on them, unless what was
        # touched since may be too much.
        if used.rss <= memory or (now < self.next_pss and used.rss - self.shared <= memory):
            return None
        exact = processes.proportional_bytes(excluded, used.rss, memory)
        self.shared = used.rss - exact
        self.next_pss = time.monotonic() + 4 * (time.monotonic() - now)
        return "memory" if exact > memory else None

    def outcome(self, status: int) -> wire.Message:
        """Return how a cell ended whose program exited with a status as of ``wait``."""
        code = os.waitstatus_to_exitcode(status)
        # Pid 1 stopped it: only a claim of that very end may add its traceback.
        if self.reason is not None:
            told = {} if self.claim is None or self.claim["status"] != self.reason else self.claim
            return {**told, "status": self.reason}
        if self.claim is not None and code == 0:
            return self.claim
        # Nobody but the kernel's memory limit explains this kill, since the count has grown with it.
        if code == -signal.SIGKILL and processes.oom_kills() > self.oom_before:
            return {"status": "memory"}
        if code < 0:
            return {"status": "killed", "signal": -code}
        return {"status": "exit", "exit_code": code}
