"""The order of a run's tasks: each step takes the next ones, and those of cancelled groups come again."""

from collections.abc import Mapping, Sequence
from typing import Any


class TaskOrder:
    """Deals the indices of the run's order to steps: an index decides a group's task and its seeds."""

    def __init__(self) -> None:
        self._next = 0
        self._returned = list[int]()
        """Indices of groups that were cancelled."""
        self._dealt = dict[int, list[int]]()
        """Indices of each step that a resumed run may have to play again."""

    def of(self, step: int, begin: int, end: int) -> Sequence[int]:
        """Return a step's indices from ``begin`` to ``end``; indices that it lacks are dealt now."""
        dealt = self._dealt.setdefault(step, [])
        while len(dealt) < end:
            if self._returned:
                dealt.append(self._returned.pop(0))
            else:
                dealt.append(self._next)
                self._next += 1
        return dealt[begin:end]

    def give_back(self, step: int, indices: Sequence[int]) -> None:
        """Take back indices of a step, whose groups were cancelled."""
        self._dealt[step] = [index for index in self._dealt[step] if index not in indices]
        self._returned = sorted([*self._returned, *indices])

    def forget(self, step: int) -> None:
        """Forget the indices of all steps up to this one: they were trained on."""
        self._dealt = {number: dealt for number, dealt in self._dealt.items() if number > step}

    def state(self) -> dict[str, Any]:
        """Return the state as plain data."""
        dealt = {str(step): list(indices) for step, indices in self._dealt.items()}
        return {"next": self._next, "returned": self._returned, "dealt": dealt}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that ``state`` has returned."""
        self._next, self._returned = state["next"], list(state["returned"])
        self._dealt = {int(step): list(indices) for step, indices in state["dealt"].items()}
