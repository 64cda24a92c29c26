"""The processes that grade: where they come from, how they are asked, and what happens when one dies.

An answer that makes its grader die or use up its time is graded once more, by a fresh grader. When that one is lost as
well and a third can still tell what the root of 8 is, the answer is to blame: it is equal to nothing, and is counted.
Otherwise the machine is to blame. Not covered: a grader is bounded in time, memory and what it writes, but it is not
a sandbox; it parses what the model wrote and runs none of it.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, replace
from typing import IO

from agentrl.errors import InfrastructureError

MAX_BYTES = 2 * 2**30
"""Address space of a grader; one that has loaded sympy holds half a gigabyte."""
_START_S = 180.0
_PATIENCE = 60
"""A grader may take this many times its CPU time by the clock: other processes want the machine too."""
_REQUESTS = 500
"""A grader is replaced after this many requests: what sympy remembers of them is never given back."""
_KNOWN = (r"\sqrt{8}", r"2\sqrt{2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeCounters:
    """What the graders of this process did so far."""

    asked: int = 0
    """How many answers they were asked about."""
    lost: int = 0
    """How many graders died or ran out of time over an answer."""
    blamed: int = 0
    """How many answers were graded as wrong because no grader survived them."""


class GraderPool:
    """A nursery process and the graders it forked; safe to share between threads.

    Args:
        size: how many graders work at a time; further askers wait.

    Raises:
        InfrastructureError: the nursery does not start.
    """

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(size)
        self._idle: list[_Grader] = []
        self._counters = GradeCounters()
        self._nursery = _Nursery()

    @property
    def counters(self) -> GradeCounters:
        """What was asked and lost so far."""
        return self._counters

    def same(self, answer: str, expected: str, *, seconds: float, problem: str = "") -> bool:
        """Ask whether ``answer`` means ``expected``.

        Args:
            answer: what the agent wrote.
            expected: the answer of the task.
            seconds: CPU time for the comparison.
            problem: what was asked, where the answer's form matters as well.

        Raises:
            InfrastructureError: the graders do not work, whatever they are asked.
        """
        with self._slots:
            self._count(asked=1)
            for _ in range(2):
                verdict = self._ask(answer, expected, seconds, problem)
                if verdict is not None:
                    return verdict
                self._count(lost=1)
            if self._ask(*_KNOWN, max(seconds, 10.0)) is not True:
                raise InfrastructureError("answers can't be graded: every grading process dies, see the system's log")
            self._count(blamed=1)
            return False

    def close(self) -> None:
        """End the nursery and every grader. Safe to call twice."""
        with self._lock:
            idle, self._idle = self._idle, []
        for grader in idle:
            grader.close()
        self._nursery.close()

    def forget(self) -> None:
        """Let go of everything in a forked child, without touching the processes: they belong to the parent."""
        for grader in self._idle:
            grader.close()
        self._nursery.forget()

    def _ask(self, answer: str, expected: str, seconds: float, problem: str = "") -> bool | None:
        grader = self._take()
        try:
            request = {"answer": answer, "expected": expected, "problem": problem}
            verdict = grader.ask({**request, "seconds": seconds, "bytes": MAX_BYTES}, seconds)
        except BaseException:
            grader.close()
            raise
        if verdict is None or grader.asked >= _REQUESTS:
            grader.close()
        else:
            with self._lock:
                self._idle.append(grader)
        return verdict

    def _take(self) -> "_Grader":
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if not self._nursery.alive:
                self._nursery.close()
                self._nursery = _Nursery()
            return _Grader(self._nursery.hatch())

    def _count(self, *, asked: int = 0, lost: int = 0, blamed: int = 0) -> None:
        with self._lock:
            now = self._counters
            self._counters = replace(now, asked=now.asked + asked, lost=now.lost + lost, blamed=now.blamed + blamed)


class _Grader:
    """One grader, from this side of its socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._stream = link.makefile("rwb")
        self.asked = 0

    def ask(self, request: dict[str, object], seconds: float) -> bool | None:
        """The verdict; None where the grader was lost over it.

        Raises:
            InfrastructureError: the grader is alive and gets no CPU time.
        """
        self.asked += 1
        self._link.settimeout(max(60.0, _PATIENCE * seconds))
        try:
            self._stream.write(json.dumps(request).encode() + b"\n")
            self._stream.flush()
            reply = self._stream.readline()
        except TimeoutError as error:
            raise InfrastructureError("a grading process gets no CPU time: the machine is overloaded") from error
        except OSError:
            return None
        return bool(json.loads(reply)["same"]) if reply.endswith(b"\n") else None

    def close(self) -> None:
        """Hang up: the grader ends when it is idle, and by its timer when it is not."""
        with contextlib.suppress(OSError):  # what was still to be written has nobody to read it
            self._stream.close()
        self._link.close()


class _Nursery:
    """The process that forks graders; see ``agentrl.answers.worker``."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as complaints:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "agentrl.answers.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                # The same modules as here; a fixed hash seed, so that verdicts do not differ between runs.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
            theirs.close()
            self._await_ready(complaints)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def hatch(self) -> socket.socket:
        """A socket to a new grader.

        Raises:
            InfrastructureError: the nursery has died this very moment.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"g"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise InfrastructureError(f"the process that forks graders is gone: {error}") from error
        return ours

    def close(self) -> None:
        """Kill the process with all its graders, which are one process group."""
        self._control.close()
        if self.alive:
            os.killpg(self._process.pid, 9)
        self._process.wait()

    def forget(self) -> None:
        """Let go of a process that belongs to this process's parent."""
        self._control.close()
        self._process.returncode = 0  # nothing for this process to wait for

    def _await_ready(self, complaints: IO[bytes]) -> None:
        self._control.settimeout(_START_S)
        try:
            ready = self._control.recv(1)
        except TimeoutError:
            ready = b""
        self._control.settimeout(None)
        if not ready:
            self.close()
            complaints.seek(0)
            lines = complaints.read()[-2000:].decode(errors="replace").strip().splitlines()
            raise InfrastructureError(f"the grading process does not start: {lines[-1] if lines else 'it was killed'}")
