"""A pool of worker processes for requests that may hang, crash or take all memory: it forks, limits and replaces them.

A zygote imports the workers' module once and forks workers, so that a new worker is ready within milliseconds. If a
worker dies over a request before its time is up, the pool retries the request twice, on other workers. If these are
lost too, or the time is up, the pool asks a control question that every sane worker answers. An answer to it shows that
the request was at fault: ``ask`` returns None. Without an answer the machine is at fault, which is an error.

Not covered: a worker's time, memory and file sizes are limited, but it is no sandbox. It must not run untrusted code.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_ZYGOTE = Path(__file__).with_name("zygote.py")
_START_S = 600.0
_PATIENCE = 3
"""Limit of a request's wall time, as a multiple of its CPU time: other processes use the machine too."""
_REQUESTS = 500
"""A worker is replaced after this many requests, since libraries' caches grow with each."""
_CONTROL_SECONDS = 10.0
_SETTINGS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Replies that depend on a set's order do not differ between runs; a process of one thread can fork at any time."""


class WorkerPool:
    """A zygote process and the workers it forked; safe to share between threads.

    The workers' module has four names. ``warm(*words)`` runs once, in the zygote, and fills what all workers inherit.
    ``reply(**request)`` answers a request with anything that JSON can hold except None. ``CONTROL`` is the request of
    the control question: a sane worker answers it with something true, in no time. ``MAX_BYTES`` is the address space
    of a worker.

    Args:
        module: the workers' module, by name; the path of a file ``….py`` for another interpreter.
        size: number of workers that work at a time; further callers wait.
        python: another interpreter, whose own packages the module imports; by default this one, with ``sys.path``.
        words: arguments of ``warm``.
        name: what the workers do, for messages: ``grading``.
        failure: makes the exception that is raised where the machine is at fault, from a sentence.

    Raises:
        failure: the zygote does not start.
    """

    def __init__(
        self,
        module: str,
        size: int,
        *,
        name: str,
        failure: Callable[[str], Exception],
        python: str = "",
        words: Sequence[str] = (),
    ) -> None:
        self._module, self._name, self._failure = module, name, failure
        self._python, self._words = python, words
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._slots = threading.BoundedSemaphore(size)
        self._idle: list[_Worker] = []
        self._closed = False
        self._zygote: _Zygote | None = None
        self._running_zygote()

    def ask(self, request: Mapping[str, object], *, seconds: float) -> Any:
        """Return a worker's reply to ``request``; None where the request takes too long or kills every worker.

        Args:
            request: the arguments of the module's ``reply``.
            seconds: CPU time for it; it gets three times as much wall time.

        Raises:
            failure: the workers fail even on the control question.
        """
        with self._slots:
            try:
                # The machine may cause a loss, such as the kernel short of memory. It may cause a second one: the end
                # of the zygote costs an idle worker, and also the worker that it was to fork as it died.
                for _ in range(3):
                    reply = self._try(request, seconds)
                    if reply is not None:
                        return reply
            except TimeoutError:
                self._close_idle()
            try:
                works = self._try(None, _CONTROL_SECONDS)
            except TimeoutError as error:
                raise self._failure(f"a {self._name} process gets no CPU time: the machine is overloaded") from error
            if not works:
                raise self._failure(f"every {self._name} process dies, whatever it is asked: see the system's log")
            return None

    def close(self) -> None:
        """Kill the zygote, even one that is starting, and every worker. Safe to call twice."""
        with self._lock:
            self._closed = True
            zygote = self._zygote
        self._close_idle()
        # Outside the lock: waiting for the zygote takes time, in which others may want it.
        if zygote is not None:
            zygote.close()

    def forget(self) -> None:
        """Close a forked child's copies of the sockets, and leave the processes alone: they belong to the parent."""
        for worker in self._idle:
            worker.close()
        if self._zygote is not None:
            self._zygote.forget()

    def _try(self, request: Mapping[str, object] | None, seconds: float) -> Any:
        """Return one worker's reply, to the control question where ``request`` is None; None where it is lost."""
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        worker = worker or _Worker(self._running_zygote().fork())
        reply = None
        try:
            reply = worker.ask(request, seconds)
        finally:
            with self._lock:
                # Without a reply it is dead, or its reply is still to come and would be taken for the next request's.
                keep = reply is not None and worker.asked < _REQUESTS and not self._closed
                self._idle += [worker] if keep else []
            if not keep:
                worker.close()
        if reply is None:
            self._close_idle()
        return reply

    def _close_idle(self) -> None:
        # What killed one worker, such as the end of their zygote, may have killed all: the next try needs a new one.
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()

    def _running_zygote(self) -> "_Zygote":
        # A lock of its own: a zygote takes seconds to start, in which others give workers back, or close the pool.
        with self._starting, tempfile.TemporaryFile() as complaints:
            with self._lock:
                if self._closed:
                    raise self._failure(f"the {self._name} processes were closed")
                old = self._zygote
                if old is not None and old.alive:
                    return old
                self._zygote = made = _Zygote(self._python, self._module, self._words, complaints)
            if old is not None:
                old.close()
            if not made.await_ready():
                complaints.seek(0)
                lines = complaints.read()[-2000:].decode(errors="replace").strip().splitlines()
                problem = lines[-1] if lines else "it was killed"
                raise self._failure(f"the {self._name} process does not start: {problem}")
            return made


class _Worker:
    """One worker, from this side of its socket."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._stream = link.makefile("rwb")
        self.asked = 0

    def ask(self, request: Mapping[str, object] | None, seconds: float) -> Any:
        """Return the reply; None where the worker was lost over it.

        Raises:
            TimeoutError: its time is up.
        """
        self.asked += 1
        began = time.monotonic()
        # The worker's timer counts CPU time only: without a limit of wall time a starved one would block its caller.
        self._link.settimeout(_PATIENCE * seconds)
        line = b""
        with contextlib.suppress(ConnectionError):
            self._stream.write(json.dumps([request, seconds]).encode() + b"\n")
            self._stream.flush()
            line = self._stream.readline()
        if line.endswith(b"\n"):
            return json.loads(line)
        if time.monotonic() - began >= seconds:
            raise TimeoutError
        return None

    def close(self) -> None:
        """Hang up: the worker ends when it is idle, and by its timer when it is not."""
        with contextlib.suppress(OSError):  # what was still to be written has nobody to read it
            self._stream.close()
        self._link.close()


class _Zygote:
    """The process that forks workers; see ``agentrl.processes.zygote``."""

    def __init__(self, python: str, module: str, words: Sequence[str], complaints: IO[bytes]) -> None:
        """Start it; it serves when :meth:`await_ready` has returned."""
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        # The same modules as here; another interpreter has its own, of other versions.
        path = "" if python else os.pathsep.join(filter(None, sys.path))
        with theirs:
            self._process = subprocess.Popen(
                [python or sys.executable, "-P", _ZYGOTE, module, str(theirs.fileno()), *words],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                env={**os.environ, **_SETTINGS, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for this process alone
            )

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def await_ready(self) -> bool:
        """Wait until it has imported everything; False where it does not start, or was closed meanwhile."""
        with self._lock, contextlib.suppress(OSError):
            self._control.settimeout(_START_S)
            if self._control.recv(1):
                self._control.settimeout(None)
                return True
        self.close()
        return False

    def fork(self) -> socket.socket:
        """Return a socket to a new worker; nobody listens at its other end where the zygote has just died."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError:
            self.close()
        return ours

    def close(self) -> None:
        """Kill the zygote; its workers end with it."""
        self._process.kill()
        self._process.wait()
        # A thread in await_ready holds the lock until the zygote's end has woken it.
        with self._lock:
            self._control.close()

    def forget(self) -> None:
        """Close the socket, and leave the process alone: it belongs to this process's parent."""
        self._control.close()
        self._process.returncode = 0  # nothing for this process to wait for
