"""One object per process: made at first use, made again in a forked child, and closed when Python exits."""

import atexit
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, TypeVarTuple

T = TypeVar("T")
Key = TypeVarTuple("Key")


class PerProcess(Generic[T, *Key]):
    """An object that all threads of a process share, or one object per key.

    Meant for module level: a ``PerProcess`` is never garbage-collected.

    Args:
        make: makes the object for a key.
        close: ends an object when Python exits, the last one made first.
        forget: runs in a forked child and drops the parent's object there without ending it.
    """

    def __init__(
        self,
        make: Callable[[*Key], T],
        *,
        close: Callable[[T], object] = lambda _: None,
        forget: Callable[[T], object] = lambda _: None,
    ) -> None:
        self._make, self._close, self._forget = make, close, forget
        self._lock = threading.Lock()
        self._made: dict[tuple[*Key], T] = {}
        os.register_at_fork(after_in_child=self._begin_child)

    def get(self, *key: *Key) -> T:
        """Return this process's object; make it where there is none, while other threads wait."""
        with self._lock:
            if key not in self._made:
                made = self._make(*key)
                if not self._made:
                    # After ``make``: exit handlers run last in, first out, and this object must be closed before
                    # those that ``make`` has registered on the way.
                    atexit.register(self.close)
                self._made[key] = made
            return self._made[key]

    def existing(self) -> list[T]:
        """Return the objects that this process has made, of all keys."""
        with self._lock:
            return list(self._made.values())

    def drop(self, shared: T) -> None:
        """Hand ``shared`` over to the caller, who closes it; the next ``get`` makes another."""
        with self._lock:
            self._made = {key: made for key, made in self._made.items() if made is not shared}

    def close(self) -> None:
        """Close the objects of this process; the next ``get`` makes another."""
        with self._lock:
            made, self._made = self._made, {}
        # Outside the lock: closing may take long, or may ask for an object of this very kind.
        for shared in reversed(made.values()):
            self._close(shared)

    def _begin_child(self) -> None:
        # A thread of the parent may have held the lock during the fork; no thread here would release it.
        self._lock = threading.Lock()
        made, self._made = self._made, {}
        for shared in made.values():
            self._forget(shared)
