"""Keeps the head and the tail of an output that may be endless."""


class Capture:
    """Takes bytes as they come and holds at most ``limit`` of them."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit // 2
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self.size = 0
        """Bytes taken in all."""

    def add(self, data: bytes) -> None:
        """Take what came next."""
        self.size += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data[-self._tail_limit :]
            del self._tail[: max(0, len(self._tail) - self._tail_limit)]

    @property
    def truncated(self) -> bool:
        """Something was dropped."""
        return self.size > len(self._head) + len(self._tail)

    def text(self) -> str:
        """Return what was kept, with a note in place of what was not."""
        if not self.truncated:
            return (self._head + self._tail).decode("utf-8", "replace")
        missing = self.size - len(self._head) - len(self._tail)
        head, tail = self._head.decode("utf-8", "replace"), self._tail.decode("utf-8", "replace")
        return f"{head}\n… [{missing} bytes cut] …\n{tail}"
