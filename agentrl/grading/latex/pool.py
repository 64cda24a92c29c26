"""A pool of grading processes: it forks them, sends them answers, and replaces those that die.

If a grader dies over an answer before its time is up, the pool retries it twice, on other graders. If these are lost
too, or the time is up, the pool asks for a comparison that is known to be true. Where it succeeds, the answer
was at fault: it is graded as wrong. Where it fails, grading is broken: InfrastructureError.

Not covered: a grader's time, memory and file sizes are limited, but it is no sandbox; it parses what the model wrote
and runs none of it.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO

from agentrl.errors import InfrastructureError

MAX_BYTES = 2 * 2**30
"""Address space of a grader; one that has loaded sympy holds half a gigabyte."""
_START_S = 180.0
_PATIENCE = 3
"""Limit of a grader's wall time, as a multiple of its CPU time: other processes use the machine too."""
_REQUESTS = 500
"""A grader is replaced after this many requests: sympy's caches grow with each."""
_KNOWN = (r"\sqrt{8}", r"2\sqrt{2}")
"""Two answers that are the same, and that a working grader tells so in no time."""
_KNOWN_SECONDS = 10.0


class GraderPool:
    """A zygote process and the graders it forked; safe to share between threads.

    Args:
        size: number of graders that work at a time; further callers wait.

    Raises:
        InfrastructureError: the zygote does not start.
    """

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._slots = threading.BoundedSemaphore(size)
        self._idle: list[_Grader] = []
        self._closed = False
        self._zygote: _Zygote | None = None
        self._running(None)

    def same(self, answer: str, expected: str, *, seconds: float, problem: str = "", second: bool = False) -> bool:
        """Return True if ``answer`` means the same as ``expected``.

        Args:
            answer: what the agent wrote.
            expected: the answer of the task.
            seconds: CPU time for the comparison, which gets three times as much wall time.
            problem: the problem's text, where the answer's form matters as well.
            second: ask math-verify alone.

        Raises:
            InfrastructureError: the graders fail even on a comparison that is known to be true.
        """
        with self._slots:
            try:
                # A loss may be the machine's doing, such as the kernel short of memory, and the second too: what kills
                # the zygote takes an idle grader along, and one that it was asked to fork as it died.
                for _ in range(3):
                    verdict = self._ask(answer, expected, seconds, problem, second=second)
                    if verdict is not None:
                        return verdict
            except TimeoutError:
                self._close_idle()
            try:
                works = self._ask(*_KNOWN, _KNOWN_SECONDS)
            except TimeoutError as error:
                raise InfrastructureError("a grading process gets no CPU time: the machine is overloaded") from error
            if not works:
                raise InfrastructureError("answers can't be graded: every grading process dies, see the system's log")
            return False

    def close(self) -> None:
        """Kill the zygote, even one that is starting, and every grader. Safe to call twice."""
        with self._lock:
            self._closed = True
            zygote = self._zygote
        self._close_idle()
        # Outside the lock: waiting for the zygote takes time, in which others may want it.
        if zygote is not None:
            zygote.close()

    def forget(self) -> None:
        """Close a forked child's copies of the sockets, and leave the processes alone: they belong to the parent."""
        for grader in self._idle:
            grader.close()
        if self._zygote is not None:
            self._zygote.forget()

    def _ask(
        self, answer: str, expected: str, seconds: float, problem: str = "", *, second: bool = False
    ) -> bool | None:
        grader = self._take()
        try:
            request = {"answer": answer, "expected": expected, "problem": problem, "second": second}
            verdict = grader.ask({**request, "seconds": seconds, "bytes": MAX_BYTES}, seconds)
        # The reply is still to come: it would be taken for the next request's.
        except BaseException:
            grader.close()
            raise
        if verdict is None:
            self._close_idle()
        with self._lock:
            keep = verdict is not None and grader.asked < _REQUESTS and not self._closed
            if keep:
                self._idle.append(grader)
        if not keep:
            grader.close()
        return verdict

    def _close_idle(self) -> None:
        # What killed one grader, such as the end of their zygote, may have killed all: the next try needs a new one.
        with self._lock:
            idle, self._idle = self._idle, []
        for grader in idle:
            grader.close()

    def _take(self) -> "_Grader":
        with self._lock:
            if self._idle:
                return self._idle.pop()
        zygote = self._running(None)
        try:
            return _Grader(zygote.fork_grader())
        except InfrastructureError:
            # The zygote has died since: try once more with a new one.
            return _Grader(self._running(zygote).fork_grader())

    def _running(self, dead: "_Zygote | None") -> "_Zygote":
        # A lock of its own: a zygote takes seconds to start, in which others give graders back, or close the pool.
        with self._starting, tempfile.TemporaryFile() as complaints:
            with self._lock:
                if self._closed:
                    raise InfrastructureError("the grading processes were closed")
                found = self._zygote
                if found is not None and found is not dead and found.alive:
                    return found
                self._zygote = made = _Zygote(complaints)
            if found is not None:
                found.close()
            made.await_ready(complaints)
            return made


class _Grader:
    """One grader, from this side of its socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._stream = link.makefile("rwb")
        self.asked = 0

    def ask(self, request: dict[str, object], seconds: float) -> bool | None:
        """Return the verdict; None where the grader was lost over it.

        Raises:
            TimeoutError: its time is up.
        """
        self.asked += 1
        began = time.monotonic()
        # The grader's timer counts CPU time only: without a limit of wall time a starved one would block its caller.
        self._link.settimeout(_PATIENCE * seconds)
        reply = b""
        with contextlib.suppress(ConnectionError):
            self._stream.write(json.dumps(request).encode() + b"\n")
            self._stream.flush()
            reply = self._stream.readline()
        if reply.endswith(b"\n"):
            return bool(json.loads(reply)["same"])
        if time.monotonic() - began >= seconds:
            raise TimeoutError
        return None

    def close(self) -> None:
        """Hang up: the grader ends when it is idle, and by its timer when it is not."""
        with contextlib.suppress(OSError):  # what was still to be written has nobody to read it
            self._stream.close()
        self._link.close()


class _Zygote:
    """The process that forks graders; see ``agentrl.grading.latex.worker``."""

    def __init__(self, complaints: IO[bytes]) -> None:
        """Start it; it serves when :meth:`await_ready` has returned."""
        self._lock, self._ending = threading.Lock(), threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "agentrl.grading.latex.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                # The same modules as here; a fixed hash seed, so that verdicts do not differ between runs.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        # Without reaping it: until close() has killed its process group, no other may get the group's number.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._process.returncode is None and os.waitid(os.P_PID, self._process.pid, options) is None

    def await_ready(self, complaints: IO[bytes]) -> None:
        """Wait until it has imported everything.

        Raises:
            InfrastructureError: it does not start, or was closed meanwhile.
        """
        with self._lock, contextlib.suppress(OSError):
            self._control.settimeout(_START_S)
            if self._control.recv(1):
                self._control.settimeout(None)
                return
        self.close()
        complaints.seek(0)
        lines = complaints.read()[-2000:].decode(errors="replace").strip().splitlines()
        raise InfrastructureError(f"the grading process does not start: {lines[-1] if lines else 'it was killed'}")

    def fork_grader(self) -> socket.socket:
        """Return a socket to a new grader.

        Raises:
            InfrastructureError: the zygote has died this very moment.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                socket.send_fds(self._control, [b"g"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise InfrastructureError(f"the process that forks graders is gone: {error}") from error
        return ours

    def close(self) -> None:
        """Kill the process group: the zygote and its graders, which outlive it where it has died alone."""
        with self._ending:
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        # A thread in await_ready holds the lock until the zygote's end has woken it.
        with self._lock:
            self._control.close()

    def forget(self) -> None:
        """Close the socket, and leave the process alone: it belongs to this process's parent."""
        self._control.close()
        self._process.returncode = 0  # nothing for this process to wait for
