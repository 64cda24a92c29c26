"""A session and its forks under one pid 1: which process belongs to which session, and which session is active.

Memory can be copied by ``fork`` only, which leaves the copy in the pid namespace of the original. So a fork is a second
session there, with a program, a channel, a clock and scratch folders of its own. One of them is active at a time; every
process of the others is stopped, so that all processes that come and go belong to the active one.
"""

import os
import select
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from agentrl.sandboxes.inside import wire
from agentrl.sandboxes.inside.interfaces import SessionManager, SessionSetup
from agentrl.sandboxes.inside.program_channel import ProgramChannel
from agentrl.sandboxes.inside.scratch import ScratchStore
from agentrl.sandboxes.inside.supervisor import POLL_MS, Supervisor


class HostSocket:
    """A socket to the host that also receives descriptors."""

    def __init__(self, descriptor: int) -> None:
        """Take over an open socket."""
        self._socket = socket.socket(fileno=descriptor)
        self._passed: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the host has sent something."""
        return self._socket.fileno()

    def recv(self, size: int, /) -> bytes:
        """Receive bytes; none where the host is gone."""
        data, passed, _, _ = socket.recv_fds(self._socket, size, 3)
        self._passed += passed
        return data

    def sendall(self, data: bytes, /) -> None:
        """Send bytes; the next ``recv`` finds out whether the host has let go meanwhile."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def take_descriptors(self) -> list[int]:
        """Return the descriptors received so far, which belong to the caller then."""
        passed, self._passed = self._passed, []
        return passed

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


@dataclass(slots=True, kw_only=True)
class _Entry:
    """One session of the group."""

    host: HostSocket
    setup: SessionSetup
    index: int
    """Of its scratch folders."""
    suspended: frozenset[int] = frozenset()
    """Its processes, all stopped; empty for the active session."""


class SessionGroup(SessionManager):
    """All sessions of one pid namespace, and the manager of each."""

    def __init__(self, setup: SessionSetup, prepare: Callable[[], int]) -> None:
        """Take over the first session's socket; ``prepare`` makes the file systems and opens a writable ``/proc``."""
        self._setup = setup
        self._first_host = HostSocket(setup.channel)
        self._prepare = prepare
        self._entries: dict[Supervisor, _Entry] = {}
        self._active: Supervisor | None = None
        self._scratch: ScratchStore | None = None
        self._pending_fork: tuple[ProgramChannel, list[int]] | None = None

    def serve(self) -> NoReturn:
        """Supervise until the host has let go of every session."""
        try:
            self._setup = replace(self._setup, proc=self._prepare())
            self._active = supervisor = Supervisor(self._first_host, self._setup, self)
            self._entries[supervisor] = _Entry(host=self._first_host, setup=self._setup, index=0)
            supervisor.spawn()
            while True:
                self._wait()
        except Exception as error:  # whatever it is, the sessions end here, and the host must hear of it
            fault: wire.Message = {"t": "fault", "why": f"{type(error).__name__}: {error}", "errno": None}
            for host in {self._first_host, *(entry.host for entry in self._entries.values())}:
                with suppress(OSError):
                    host.sendall(wire.pack(fault))
        finally:
            os._exit(1)

    def _wait(self) -> None:
        self._keep_stopped()
        poll = select.poll()
        idle = self._active is None or self._active.idle
        if self._active is not None:
            self._active.register(poll)
        # While the active session is busy, orders to the others wait in their sockets.
        if idle:
            for supervisor, entry in self._entries.items():
                if supervisor is not self._active:
                    poll.register(entry.host, select.POLLIN)
        ready = dict(poll.poll(None if idle else POLL_MS))
        if self._active is not None:
            self._active.handle(ready)
        # Checked again: an order that came with these events may have made the active session busy.
        if self._active is None or self._active.idle:
            for supervisor, entry in list(self._entries.items()):
                if supervisor is not self._active and entry.host.fileno() in ready:
                    self._activate(supervisor)
                    return

    def _keep_stopped(self) -> None:
        # The active session's program may try to wake the others' processes, which nobody would watch then.
        for pid in self.other_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def _activate(self, supervisor: Supervisor) -> None:
        scratch = self._scratch
        assert scratch is not None, "only a fork can be suspended"
        # All sessions share the mount namespace: the scratch folders at the known paths are the active session's.
        if self._active is not None:
            self._entries[self._active].suspended = self._active.suspend()
            scratch.swap_out(self._entries[self._active].index)
        scratch.swap_in(self._entries[supervisor].index)
        self._entries[supervisor].suspended = frozenset()
        self._active = supervisor
        supervisor.resume()

    def other_pids(self) -> frozenset[int]:
        """Return the processes of all sessions but the active one."""
        return frozenset[int]().union(*(entry.suspended for entry in self._entries.values()))

    def _active_session(self) -> Supervisor:
        assert self._active is not None, "only the active session gets orders"
        return self._active

    def end_session(self) -> None:
        """End the active session; with the last one everything ends."""
        # The kernel kills every process of the namespace with its pid 1, and unmounts its folders.
        if len(self._entries) == 1:
            os._exit(0)
        active = self._active_session()
        active.end()
        entry = self._entries.pop(active)
        entry.host.close()
        for descriptor in (entry.setup.out, entry.setup.err):
            os.close(descriptor)
        if self._scratch is not None:
            self._scratch.drop(entry.index)
        self._active = None

    def request_fork(self, channel: ProgramChannel) -> bool:
        """Order the active session's program to copy itself, and return whether it can read the order."""
        self._cancel_fork()
        descriptors = self._entries[self._active_session()].host.take_descriptors()
        if len(descriptors) != 3:
            raise OSError("an order to fork came without its descriptors")
        self._pending_fork = (forked := ProgramChannel(), descriptors)
        return channel.send_fds({"t": "fork"}, [forked.program_end, *descriptors[1:]])

    def complete_fork(self, pid: int, *, pristine: bool) -> str | None:
        """Make a session out of the stopped copy ``pid``, with a copy of the active session's scratch folders."""
        assert self._pending_fork is not None, "a copy was requested before"
        channel, descriptors = self._pending_fork
        # What the active session left running must not write while its folders are copied.
        self._active_session().suspend()
        try:
            # A session that is never forked needs no store, which costs a mount and dozens of folders.
            if self._scratch is None:
                self._scratch = ScratchStore(self._setup.limits)
            index = self._scratch.copy()
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._cancel_fork()
            return f"its files can't be copied: {error}"
        self._pending_fork = None
        host = HostSocket(descriptors[0])
        setup = replace(self._setup, channel=descriptors[0], out=descriptors[1], err=descriptors[2])
        forked = Supervisor(host, setup, self, channel=channel)
        self._entries[forked] = _Entry(host=host, setup=setup, index=index, suspended=frozenset({pid}))
        forked.attach(pid, pristine=pristine)
        return None

    def _cancel_fork(self) -> None:
        # The program died or refused after a request: the descriptors were meant for a session that will not be.
        if self._pending_fork is not None:
            channel, descriptors = self._pending_fork
            self._pending_fork = None
            channel.close()
            for descriptor in descriptors:
                os.close(descriptor)
