"""Sets of tasks: a list, or as many as wanted from a generator by index; and which split a task belongs to."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from agentrl.errors import EnvContractError, UnknownNameError
from agentrl.types import Task


class TaskSet(ABC):
    """Tasks by index and by id. Iteration is lazy; an endless set iterates forever."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """How many tasks there are; None where there is no end."""

    @abstractmethod
    def __getitem__(self, index: int) -> Task:
        """The task at ``index``, counting from 0."""

    @abstractmethod
    def find(self, task_id: str) -> Task:
        """The task called ``task_id``.

        Raises:
            UnknownNameError: the set has no such task.
        """

    def __iter__(self) -> Iterator[Task]:
        index = 0
        while self.size is None or index < self.size:
            yield self[index]
            index += 1


class TaskList(TaskSet):
    """A finite set that holds its tasks.

    Raises:
        EnvContractError: there is no task, or two tasks share an id.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tuple(tasks)
        self._by_id = {task.id: task for task in self._tasks}
        if not self._tasks:
            raise EnvContractError("a set of tasks needs at least one task")
        if len(self._by_id) != len(self._tasks):
            raise EnvContractError("two tasks of one set share an id")

    @property
    def size(self) -> int:
        """How many tasks there are."""
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        """The task at ``index``."""
        return self._tasks[index]

    def find(self, task_id: str) -> Task:
        """The task called ``task_id``."""
        if task_id not in self._by_id:
            raise UnknownNameError("task", task_id, list(self._by_id)[:1000])
        return self._by_id[task_id]


class GeneratedTasks(TaskSet):
    """An endless set: task ``i`` is made by ``make(i)`` and called ``prefix:i``.

    Args:
        prefix: what the ids begin with.
        make: makes the task of an index, the same one each time; the id it sets is replaced.
    """

    def __init__(self, prefix: str, make: Callable[[int], Task]) -> None:
        self._prefix = prefix
        self._make = make

    @property
    def size(self) -> None:
        """There is no end."""
        return None

    def __getitem__(self, index: int) -> Task:
        """The task made for ``index``."""
        return replace(self._make(index), id=f"{self._prefix}:{index}")

    def find(self, task_id: str) -> Task:
        """The task called ``task_id``."""
        prefix, _, index = task_id.rpartition(":")
        if prefix != self._prefix or not (index.isascii() and index.isdigit() and len(index) <= 18):
            raise UnknownNameError("task", task_id, [f"{self._prefix}:0"])
        return self[int(index)]


def stable_hash(text: str) -> int:
    """64 bits of ``text``, the same in every process; Python's own hash is not."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


def split_of(key: str, one_in: int) -> str:
    """The one split that what is called ``key`` belongs to: one key in ``one_in`` is ``test``, the others ``train``."""
    return "train" if stable_hash(key) % one_in else "test"
