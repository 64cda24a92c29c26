"""The cell that runs: how it began, whether its time is over, and how it ended."""

import os
import secrets
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
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Distinguishes this cell's result from one that an earlier cell left in the channel."""
    started: float = field(default_factory=time.monotonic)
    clock: SessionClock = field(default_factory=SessionClock)
    oom_before: int = field(default_factory=processes.oom_kills)
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

    def restart(self) -> None:
        """Begin its time anew: it waited for a fresh program."""
        self.started = time.monotonic()
        self.clock.start()

    def is_late(self, cpu_s: float, excluded: Collection[int], grace_s: float) -> bool:
        """Return whether its time is over.

        Args:
            cpu_s: CPU time that it is charged for so far [seconds].
            excluded: Processes that do not count.
            grace_s: Added to both limits [seconds].
        """
        late = self.clock.has_passed(wire.real(self.order, "wall") + grace_s, excluded)
        return late or cpu_s > wire.real(self.order, "cpu") + grace_s

    def outcome(self, status: int) -> wire.Message:
        """Return how a cell ended whose program exited with a status as of ``wait``."""
        code = os.waitstatus_to_exitcode(status)
        # Pid 1 stopped it: only a claim of that very end may add its traceback.
        if self.reason is not None:
            claim = {} if self.claim is None or self.claim["status"] != self.reason else self.claim
            return {**claim, "status": self.reason}
        if self.claim is not None and code == 0:
            return self.claim
        # Nobody but the kernel's memory limit explains this kill, since the count has grown with it.
        if code == -signal.SIGKILL and processes.oom_kills() > self.oom_before:
            return {"status": "memory"}
        if code < 0:
            return {"status": "killed", "signal": -code}
        return {"status": "exit", "exit_code": code}
