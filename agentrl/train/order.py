"""The order of a run's tasks: each step takes the next ones, and those of cancelled groups come again."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.rollout.taskplan import Choose


class Dealt(NamedTuple):
    """A group of the run's order."""

    number: int
    """Its running number, from which its seeds follow."""
    env: str
    """Name of its environment."""
    task_id: str
    """Its task, chosen once: a plan may have learned since."""


class TaskOrder:
    """Deals the groups of the run's order to steps."""

    def __init__(self) -> None:
        self._next = 0
        self._returned = list[Dealt]()
        """Groups that were cancelled."""
        self._dealt = dict[int, list[Dealt]]()
        """Groups of each step that a resumed run may have to play again."""

    def of(self, step: int, begin: int, end: int, choose: Choose) -> Sequence[Dealt]:
        """Return a step's groups from ``begin`` to ``end``; those that it lacks are dealt now, with chosen tasks."""
        dealt = self._dealt.setdefault(step, [])
        missing = max(0, end - len(dealt))
        again, self._returned = self._returned[:missing], self._returned[missing:]
        if new := range(self._next, self._next + missing - len(again)):
            self._next = new.stop
            tasks = zip(new, choose(new), strict=True)
            again += [Dealt(number, env, task.id) for number, (env, task) in tasks]
        dealt += again
        return dealt[begin:end]

    def give_back(self, step: int, groups: Sequence[Dealt]) -> None:
        """Take back groups of a step, which were cancelled."""
        self._dealt[step] = [group for group in self._dealt[step] if group not in groups]
        self._returned = sorted([*self._returned, *groups])

    def forget(self, step: int) -> None:
        """Forget the groups of all steps up to this one: they were trained on."""
        self._dealt = {number: dealt for number, dealt in self._dealt.items() if number > step}

    def state(self) -> dict[str, Any]:
        """Return the state as plain data."""
        dealt = {str(step): list(groups) for step, groups in self._dealt.items()}
        return {"next": self._next, "returned": self._returned, "dealt": dealt}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that ``state`` has returned."""
        self._next, self._returned = state["next"], [Dealt(*group) for group in state["returned"]]
        self._dealt = {int(step): [Dealt(*group) for group in groups] for step, groups in state["dealt"].items()}
