"""Plans choose the tasks of each step: uniformly, or those that the policy solves sometimes.

``rollout.plan`` names the plan. Its choice follows from the run's seed, a group's running number, and what the plan has
learned, so a resumed run continues with the same tasks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from agentrl.config import Config
from agentrl.errors import ConfigError
from agentrl.named import make_named
from agentrl.rollout.mix import TaskMix
from agentrl.types import Group, Task

Choose = Callable[[range], Sequence[tuple[str, Task]]]
"""Chooses the task of each of some consecutive indices of a run's groups, with the name of its environment."""
PLANS: Mapping[str, str] = {
    "uniform": "agentrl.rollout.taskplan:UniformPlan",
    "success": "agentrl.rollout.success:SuccessPlan",
}
"""Module and class of each plan by its name."""


@runtime_checkable
class TaskPlan(Protocol):
    """Chooses the tasks of each step; made with the training split, the run's seed, and ``rollout.plan.options``."""

    def pick(self, step: int) -> Choose:
        """Fix how the tasks of a step are chosen, and return what chooses them.

        The source asks when the step begins, before the outcomes of any step that is still trained on: so timing
        changes no choice. It then calls the result for the step's first groups, and again for refills. An index comes
        once in a run.
        """
        ...

    def learned(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Learn from all groups that a step has played, trained on or silent; return metrics; by default none."""
        return {}

    def state(self) -> Mapping[str, object]:
        """Return what a checkpoint keeps, as plain data; by default nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` has returned; by default nothing."""


def make_plan(config: Config, mix: TaskMix) -> TaskPlan:
    """Make the plan that ``rollout.plan`` names: one of ``PLANS``, or ``module:name`` of another.

    Raises:
        UnknownNameError: there is no such plan.
        ConfigError: it does not take one of ``rollout.plan.options``, or not such a value.
    """
    plan = config.rollout.plan
    made = make_named("rollout.plan", PLANS, plan.name, plan.options, mix, config.run.seed)
    if not isinstance(made, TaskPlan):
        raise ConfigError(f"rollout.plan {plan.name!r} makes no plan: make it a subclass of {__name__}.TaskPlan")
    return made


class UniformPlan(TaskPlan):
    """Goes through each split in passes that ``run.seed`` shuffles; an endless split comes in its order."""

    def __init__(self, mix: TaskMix, seed: int) -> None:
        self._mix, self._seed = mix, seed

    def pick(self, step: int) -> Choose:
        """Return what takes the next tasks of the mix, in every step alike."""
        return lambda indices: self._mix.pick(len(indices), start=indices.start, seed=self._seed)
