"""A plan that prefers the tasks that the policy solves sometimes, estimated from its own episodes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from agentrl.engines.rng import derive_seed
from agentrl.errors import ConfigError
from agentrl.rollout.mix import TaskMix
from agentrl.rollout.taskplan import Choose, TaskPlan
from agentrl.types import Group, Task, Trajectory, won

_MOST_DRAWS = 1000
"""Tasks of an endless split that are drawn on average for a group, before all are accepted."""
_Counts = dict[str, dict[str, list[float]]]
"""Successes and episodes by stratum and task."""


class SuccessPlan(TaskPlan):
    """Weighs a task by ``max(floor, 4·p·(1 − p))``, where p estimates its success.

    p is the mean of a Beta distribution, of the task's own episodes and of ``prior`` further ones that succeed as often
    as those of its stratum. The tasks with the same tags are a stratum. Its success is estimated likewise, with
    ``prior`` further episodes of which half succeed. With each step all counts shrink by ``forget``.

    A finite split is drawn from by weight. Tasks of an endless split do not come again: they are drawn in order, and
    the weight of their stratum is the probability that they are accepted. The environments of a mix keep their shares.

    Args:
        mix: the tasks of the training split.
        seed: the run's.
        prior: weight of the prior, in episodes.
        floor: least weight of a task, relative to one with p = ½.
        forget: share of the counts that is forgotten with each step.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(
        self, mix: TaskMix, seed: int, *, prior: float = 4.0, floor: float = 0.1, forget: float = 0.05
    ) -> None:
        for name, value, fits, wanted in (
            ("prior", prior, prior > 0, "above 0"),
            ("floor", floor, 0 < floor <= 1, "above 0 and at most 1"),
            ("forget", forget, 0 <= forget < 1, "at least 0 and below 1"),
        ):
            if not fits:
                raise ConfigError(f"rollout.plan.options.{name} is {value:g}: set it to a number {wanted}")
        self._mix, self._seed = mix, seed
        self._prior, self._floor, self._keep = prior, floor, 1 - forget
        self._counts: dict[str, _Counts] = {name: {} for name in mix.sources}
        """By environment. An endless split has one entry a stratum, whose task has no name."""
        self._next = dict.fromkeys(mix.sources, 0)
        """The next task of each endless split."""
        self._finite: dict[str, Sequence[tuple[str, str]]] = {}
        """Ids and strata of the tasks of finite splits, read once."""

    def pick(self, step: int) -> Choose:
        """Fix the weights of all tasks as they are now."""
        draw = {
            name: partial(self._accepted, name, self._stratum_weights(name))
            if source.tasks.size is None
            else partial(self._drawn, name, self._task_weights(name))
            for name, source in self._mix.sources.items()
        }

        def choose(indices: range) -> list[tuple[str, Task]]:
            names = self._mix.names(len(indices), start=indices.start, seed=self._seed)
            drawn = {name: iter(draw[name](count, indices.start)) for name, count in Counter(names).items()}
            return [(name, next(drawn[name])) for name in names]

        return choose

    def learned(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Count successes; return each stratum's share of its environment's groups, and its estimated success."""
        for count in (
            count for counts in self._counts.values() for tasks in counts.values() for count in tasks.values()
        ):
            count[:] = [number * self._keep for number in count]
        played = Counter[tuple[str, str]]()
        for group in groups:
            source, stratum = self._mix.sources[group.env], _stratum(group.trajectories[0])
            task_id = "" if source.tasks.size is None else group.task_id
            count = self._counts[group.env].setdefault(stratum, {}).setdefault(task_id, [0.0, 0.0])
            count[0] += sum(won(episode, source.best_return) for episode in group)
            count[1] += len(group)
            played[group.env, stratum] += 1
        in_env, metrics = Counter(group.env for group in groups), dict[str, float]()
        for (env, stratum), number in sorted(played.items()):
            prefix = f"plan/{env}/" if env else "plan/"
            prefix += quote(stratum, safe=" :,", errors="surrogatepass")
            metrics |= {f"{prefix}/share": number / in_env[env], f"{prefix}/success": self._of_stratum(env, stratum)}
        return metrics

    def state(self) -> Mapping[str, object]:
        """Return the counts, and which tasks come next."""
        return {"counts": self._counts, "next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from them."""
        self._counts, self._next = state["counts"], state["next"]

    def _of_stratum(self, name: str, stratum: str) -> float:
        """Estimate the success of a stratum."""
        wins, episodes = map(sum, zip((0.0, 0.0), *self._counts[name].get(stratum, {}).values(), strict=True))
        return (wins + self._prior / 2) / (episodes + self._prior)

    def _weight(self, success: float) -> float:
        return max(self._floor, 4 * success * (1 - success))

    def _stratum_weights(self, name: str) -> Mapping[str, float]:
        return {stratum: self._weight(self._of_stratum(name, stratum)) for stratum in self._counts[name]}

    def _task_weights(self, name: str) -> Tensor:
        """Compute the weights of all tasks of a finite split [n]."""
        if name not in self._finite:
            self._finite[name] = [(task.id, _stratum(task)) for task in self._mix.sources[name].tasks]
        prior, counts, tasks = self._prior, self._counts[name], self._finite[name]
        means = {stratum: self._of_stratum(name, stratum) for stratum in {stratum for _, stratum in tasks}}
        weights = list[float]()
        for task_id, stratum in tasks:
            wins, episodes = counts.get(stratum, {}).get(task_id, (0.0, 0.0))
            weights.append(self._weight((wins + prior * means[stratum]) / (episodes + prior)))
        return torch.tensor(weights, dtype=torch.float64)

    def _drawn(self, name: str, weights: Tensor, count: int, index: int) -> Sequence[Task]:
        """Draw tasks of a finite split for the groups from ``index`` on.

        Systematic sampling (Madow 1949): each task comes as often as its weight says, rounded up or down. So none comes
        twice until its share is more than one.
        """
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "plan", name, index))
        order = torch.randperm(len(weights), generator=generator)
        bounds = weights[order].cumsum(0)
        points = (torch.arange(count) + torch.rand(1, generator=generator, dtype=torch.float64)) / count * bounds[-1]
        # The largest point may be rounded up to the last bound.
        numbers = torch.searchsorted(bounds, points, right=True).clamp(max=len(weights) - 1)
        return [self._mix.sources[name].tasks[number] for number in order[numbers].tolist()]

    def _accepted(self, name: str, weights: Mapping[str, float], count: int, _: int) -> Sequence[Task]:
        """Draw the next tasks of an endless split until so many are accepted."""
        tasks, accepted, draws = self._mix.sources[name].tasks, list[Task](), 0
        while len(accepted) < count:
            number, draws = self._next[name], draws + 1
            self._next[name] += 1
            task = tasks[number]
            # A stratum without history has p = ½, and so the weight 1.
            weight = weights.get(_stratum(task), 1.0) if draws <= _MOST_DRAWS * count else 1.0
            if derive_seed(self._seed, "plan", name, number) < 2**63 * weight:
                accepted.append(task)
        return accepted


def _stratum(tagged: Task | Trajectory) -> str:
    return " ".join(tagged.tags) or "untagged"
