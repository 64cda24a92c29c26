"""The stopped copy of a program from before its current cell: what a rollback continues with."""

import os
import signal
import time
from contextlib import suppress
from typing import Final

from agentrl.sandboxes.inside import processes
from agentrl.sandboxes.inside.program_channel import ProgramChannel

_MAX_CPU_S: Final = 0.002
HONEST_S: Final = 0.5
"""How long a program may take to copy itself: milliseconds on Linux, a few tenths of a second on gVisor."""


class Snapshot:
    """At most one copy of a session's program, with the channel that the copy will listen to."""

    def __init__(self) -> None:
        self.pid = 0
        """The copy; 0 where there is none."""
        self._cpu_s = self._requested = 0.0
        self._channel: ProgramChannel | None = None

    def request(self, program: ProgramChannel) -> bool:
        """Order the program to copy itself, and return whether it can read the order.

        The copy gets a channel of its own, since the next cell could shut the one that the program has.
        """
        self._requested = time.monotonic()
        channel = ProgramChannel()
        sent = program.send_fds({"t": "snapshot"}, [channel.program_end])
        # While the program copies itself: to end one copy takes as long as to make one.
        self.drop()
        self._channel = channel
        return sent

    def keep(self, pid: int) -> bool:
        """Note a copy that has stopped, and return whether it came so soon that no cell is charged for it."""
        self.pid, self._cpu_s = pid, processes.cpu_clock(pid)
        return time.monotonic() - self._requested < HONEST_S

    def take(self) -> ProgramChannel | None:
        """Return the channel of the copy and forget both, or ``None`` where the copy can't be trusted any more."""
        # Another process than pid 1 may have woken the copy: then the copy has run, and its state has changed.
        slept = self.pid > 0 and processes.cpu_clock(self.pid) - self._cpu_s < _MAX_CPU_S
        if not slept or not processes.is_stopped(self.pid):
            return None
        channel, self._channel, self.pid = self._channel, None, 0
        return channel

    def drop(self) -> None:
        """Kill the copy and close its channel, where there are any."""
        if self.pid:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            self.pid = 0
        self.close()

    def close(self) -> None:
        """Close the channel; the caller ends the copy."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
