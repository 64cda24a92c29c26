"""Which tasks each step plays: all of the run's order one after the other, and what was not played comes next."""

from collections.abc import Mapping, Sequence
from typing import Any


class TaskOrder:
    """Deals the run's order out to the groups of steps, by index: of a group's task, and of its seeds."""

    def __init__(self) -> None:
        self._next = 0
        self._returned = list[int]()
        """Indices of groups that were cancelled."""
        self._dealt = dict[int, list[int]]()
        """Those of each step that may have to be played again."""

    def of(self, step: int, begin: int, end: int) -> Sequence[int]:
        """Return a step's indices from ``begin`` to ``end``; those that it lacks are dealt to it now."""
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
        """Forget the indices of all steps up to this one, which were trained on."""
        self._dealt = {number: dealt for number, dealt in self._dealt.items() if number > step}

    def state(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        dealt = {str(step): list(indices) for step, indices in self._dealt.items()}
        return {"next": self._next, "returned": self._returned, "dealt": dealt}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` has returned."""
        self._next, self._returned = state["next"], list(state["returned"])
        self._dealt = {int(step): list(indices) for step, indices in state["dealt"].items()}
