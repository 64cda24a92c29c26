"""Keeps what sessions run in ready: workers that a zygote forked, or containers."""

import os
import threading
import time
from abc import ABC, abstractmethod
from contextlib import nullcontext, suppress
from typing import Final, Generic, Protocol, TypeVar

from agentrl.sandboxes.base import SandboxClosed, SandboxError

_SPARE: Final = 1
_AHEAD: Final = max(1, len(os.sched_getaffinity(0)) - 1)
"""Members that start at a time while nobody waits for them: the imports of each keep a core busy."""


class Member(Protocol):
    """What a pool holds."""

    made: float
    """When it was made, by the monotonic clock [seconds]."""

    @property
    def alive(self) -> bool:
        """It can serve a session."""
        ...

    def dispose(self) -> None:
        """End it."""
        ...


M = TypeVar("M", bound=Member)


class ReadyPool(ABC, Generic[M]):
    """Members: some ready, some serving, some starting; safe from any thread.

    Each call that takes a member replaces it. A pool without ``slots`` makes members at once, in that call, and each
    serves one session. A pool with ``slots`` needs seconds for a member. Threads make it, and :meth:`give_back` takes
    it back after a session. Such a pool makes one member for each caller that waits. Ahead of callers it makes members
    up to its size in all, and one that is ready; these leave a core free.
    """

    def __init__(self, size: int, slots: threading.Semaphore | None = None) -> None:
        """Make nothing.

        Args:
            size: Members to keep; 0 makes each when it is asked for.
            slots: One is held while a member is made: imports would make the clocks of running cells run out.
        """
        self._size, self._slots = size, slots
        self._changed = threading.Condition()
        self._ready: list[M] = []
        self._serving: set[M] = set()
        self._starting = self._removing = self._waiting = 0
        self._fault: SandboxError | None = None
        self._closed = False

    @property
    def ready(self) -> int:
        """Number of those that wait for a session."""
        return len(self._ready)

    @property
    def total(self) -> int:
        """Number of all, with those that are starting."""
        return len(self._ready) + len(self._serving) + self._starting

    @property
    def fault(self) -> str:
        """Reason why the last member could not be started; empty where it could."""
        return str(self._fault or "")

    def fill(self) -> None:
        """Start what is missing."""
        with self._changed:
            while self._missing() > 0:
                self._launch()

    def take(self, *, fresh: bool = False) -> M:
        """Take a ready member, or wait until one is.

        Args:
            fresh: Take none that was made before this call.

        Raises:
            SandboxClosed: The pool was closed.
            SandboxError: None can be started.
        """
        since = time.monotonic() if fresh else 0.0
        with self._changed:
            self._waiting += 1
            # A fault of before does not count: this caller has one more member tried.
            self._fault = None
            try:
                while (member := self._pick(since)) is None:
                    # The pool may be full of members that are too old for this caller.
                    if fresh and not self._starting:
                        self._launch()
                    self.fill()
                    if self._starting:
                        self._changed.wait()
                if self._slots is not None:
                    self._serving.add(member)
                return member
            finally:
                self._waiting -= 1
                self.fill()

    def give_back(self, member: M, usable: bool) -> None:
        """Take a member back after a session, or replace it; called by its own thread."""
        with self._changed:
            # One that ends while it starts is removed by the thread that starts it.
            ours = member in self._serving or member in self._ready
            self._serving.discard(member)
            self._ready = [other for other in self._ready if other is not member]
            # A burst of sessions leaves more than are to be kept.
            room = len(self._ready) < max(self._size, self._waiting)
            keep = ours and usable and member.alive and room
            if keep:
                self._ready.append(member)
            self._removing += ours and not keep
            self._changed.notify_all()
            self.fill()
        if ours and not keep:
            self._remove(member)

    def close(self) -> None:
        """End every member and wait until they are gone. Closing twice is allowed."""
        with self._changed:
            self._closed = True
            members = [*self._ready, *self._serving]
            self._ready.clear()
            self._serving.clear()
            self._removing += len(members)
            self._changed.notify_all()
        for member in members:
            self._remove(member)
        with self._changed:
            while self._starting or self._removing:
                self._changed.wait()

    @abstractmethod
    def _make(self) -> M:
        """Make a member.

        Raises:
            SandboxError: It can't be made.
        """

    def _pick(self, since: float) -> M | None:
        if self._closed:
            raise SandboxClosed("this sandbox is closed")
        for member in list(self._ready):
            if not member.alive:
                self._ready.remove(member)
                self._removing += 1
                # In a thread, since this one has the lock, and to remove a container is a call of the engine.
                threading.Thread(target=self._remove, args=(member,), daemon=True).start()
            elif member.made >= since:
                self._ready.remove(member)
                return member
        if self._fault is not None:
            raise self._fault
        return None

    def _missing(self) -> int:
        """Return how many members to start now."""
        # After a fault the pool starts none until a caller needs one: the engine may be gone.
        if self._closed or self._fault is not None:
            return 0
        soon = len(self._ready) + self._starting
        wanted = max(self._size - self.total, min(_SPARE, self._size) - soon)
        ahead = wanted if self._slots is None else min(wanted, _AHEAD - self._starting)
        # What callers wait for starts at once, whatever the cores are busy with.
        return max(ahead, self._waiting - soon)

    def _launch(self) -> None:
        self._starting += 1
        if self._slots is None:
            self._start()
        else:
            threading.Thread(target=self._start, daemon=True).start()

    def _start(self) -> None:
        # Where the start is interrupted, by Ctrl-C for instance, this fault is left.
        member, fault = None, SandboxError("the start was interrupted")
        try:
            with self._slots or nullcontext():
                member, fault = None if self._closed else self._make(), None
        except SandboxError as error:
            fault = error
        except Exception as error:  # a caller that waits for this member must see it, whatever it is
            fault = SandboxError(f"a session could not be started: {type(error).__name__}: {error}")
        finally:
            with self._changed:
                self._starting -= 1
                self._fault = fault
                # Closed meanwhile: close() waits until this member is removed as well.
                late = member if self._closed else None
                self._removing += late is not None
                if member is not None and late is None:
                    self._ready.append(member)
                self._changed.notify_all()
                # Without slots the caller is in fill() itself.
                if self._slots is not None:
                    self.fill()
        if late is not None:
            self._remove(late)

    def _remove(self, member: M) -> None:
        """Remove a member that has been counted in ``_removing``."""
        # Where the engine is gone, the container ends with its stream, and the engine removes it later.
        with suppress(SandboxError):
            member.dispose()
        with self._changed:
            self._removing -= 1
            self._changed.notify_all()
