"""A session and its forks under one pid 1: who is whose process, and whose turn it is.

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
from dataclasses import replace
from typing import NoReturn

from agentrl.sandboxes import wire
from agentrl.sandboxes.inheritance import Inheritance, Member
from agentrl.sandboxes.line import Line
from agentrl.sandboxes.overseer import POLL_MS, Overseer
from agentrl.sandboxes.scratch import Shelf


class HostChannel:
    """A socket to the host over which descriptors come."""

    def __init__(self, descriptor: int) -> None:
        """Take over an open socket."""
        self._socket = socket.socket(fileno=descriptor)
        self._passed: list[int] = []

    def fileno(self) -> int:
        """Give the descriptor that becomes readable when the host says something."""
        return self._socket.fileno()

    def recv(self, size: int, /) -> bytes:
        """Take what the host said; nothing where the host is gone."""
        data, passed, _, _ = socket.recv_fds(self._socket, size, 3)
        self._passed += passed
        return data

    def sendall(self, data: bytes, /) -> None:
        """Tell the host something; a host that has let go meanwhile is found out by the next ``recv``."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def take(self) -> list[int]:
        """Take the descriptors that came: they belong to the caller."""
        passed, self._passed = self._passed, []
        return passed

    def close(self) -> None:
        """Let go of the host."""
        self._socket.close()


class Family:
    """All sessions of one pid namespace; what each must know of the others."""

    def __init__(self, start: Inheritance, prepare: Callable[[], int]) -> None:
        """Take over the first session's channel; ``prepare`` makes the file systems and gives a writable ``/proc``."""
        self._start = start
        self._first = HostChannel(start.channel)
        self._prepare = prepare
        self._proc = -1
        self._overseers: dict[Overseer, HostChannel] = {}
        self._starts: dict[Overseer, Inheritance] = {}
        self._places: dict[Overseer, int] = {}
        self._resting: dict[Overseer, frozenset[int]] = {}
        self._active: Overseer | None = None
        self._shelf: Shelf | None = None
        self._expected: tuple[Line, list[int]] | None = None

    def serve(self) -> NoReturn:
        """Oversee until the host has let go of every session."""
        try:
            self._proc = self._prepare()
            first = Overseer(self._first, self._start, self._proc, kin=self)
            self._admit(first, self._first, self._start, 0)
            self._active = first
            first.spawn()
            while True:
                self._wait()
        except Exception as error:  # whatever it is, the sessions end here, and the host must hear of it
            fault: wire.Message = {"t": "fault", "why": f"{type(error).__name__}: {error}", "errno": None}
            for channel in {self._first, *self._overseers.values()}:
                with suppress(OSError):
                    channel.sendall(wire.pack(fault))
        finally:
            os._exit(1)

    def _admit(self, overseer: Overseer, channel: HostChannel, start: Inheritance, place: int) -> None:
        self._overseers[overseer] = channel
        self._starts[overseer] = start
        self._places[overseer] = place

    def _wait(self) -> None:
        self._hold()
        poll = select.poll()
        idle = self._active is None or self._active.idle
        if self._active is not None:
            self._active.register(poll)
        if idle:
            for overseer, channel in self._overseers.items():
                if overseer is not self._active:
                    poll.register(channel, select.POLLIN)
        ready = dict(poll.poll(None if idle else POLL_MS))
        if self._active is not None:
            self._active.move(ready)
        if self._active is None or self._active.idle:
            for overseer, channel in list(self._overseers.items()):
                if overseer is not self._active and channel.fileno() in ready:
                    self._activate(overseer)
                    return

    def _hold(self) -> None:
        """Keep stopped what rests: the active session's program may try to wake what nobody would watch."""
        for pid in frozenset[int]().union(*self._resting.values()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def _activate(self, overseer: Overseer) -> None:
        shelf = self._shelf
        assert shelf is not None, "only a fork can rest"
        if self._active is not None:
            self._resting[self._active] = self._active.rest()
            shelf.store(self._places[self._active])
        shelf.fetch(self._places[overseer])
        self._resting.pop(overseer, None)
        self._active = overseer
        overseer.wake()

    def spared(self, member: Member) -> frozenset[int]:
        """Give the processes of all other sessions, which rest."""
        return frozenset[int]().union(*(pids for other, pids in self._resting.items() if other is not member))

    def leave(self, member: Member) -> None:
        """End the active session; with the last one everything ends."""
        overseer = self._active
        assert overseer is not None and overseer is member, "only the active session is heard"
        if len(self._overseers) == 1:
            os._exit(0)
        overseer.end()
        self._overseers.pop(overseer).close()
        start = self._starts.pop(overseer)
        for descriptor in (start.out, start.err):
            os.close(descriptor)
        place = self._places.pop(overseer)
        if self._shelf is not None:
            self._shelf.drop(place)
        self._active = None

    def ask_fork(self, member: Member, line: Line) -> bool:
        """Tell the active session's program to copy itself, and hand it the copy's descriptors; whether it can hear."""
        assert self._active is not None and self._active is member, "only the active session is heard"
        self._forget_expected()
        descriptors = self._overseers[self._active].take()
        if len(descriptors) != 3:
            raise OSError("an order to fork came without its descriptors")
        self._expected = (twin := Line(), descriptors)
        return line.hand_over({"t": "fork"}, [twin.there, *descriptors[1:]])

    def fork(self, member: Member, pid: int, *, pristine: bool) -> str | None:
        """Make a session out of the stopped copy ``pid``, with a copy of the active session's scratch folders."""
        overseer = self._active
        assert overseer is not None and overseer is member and self._expected is not None, "it was asked to fork"
        line, descriptors = self._expected
        # What the active session left running must not write while its folders are copied.
        overseer.rest()
        try:
            if self._shelf is None:
                self._shelf = Shelf(self._start.limits)
            place = self._shelf.copy()
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._forget_expected()
            return f"its files can't be copied: {error}"
        self._expected = None
        channel = HostChannel(descriptors[0])
        start = replace(self._start, channel=descriptors[0], out=descriptors[1], err=descriptors[2])
        twin = Overseer(channel, start, self._proc, kin=self, line=line)
        self._admit(twin, channel, start, place)
        self._resting[twin] = frozenset({pid})
        twin.adopt(pid, pristine=pristine)
        return None

    def _forget_expected(self) -> None:
        if self._expected is not None:
            line, descriptors = self._expected
            self._expected = None
            line.close()
            for descriptor in descriptors:
                os.close(descriptor)
