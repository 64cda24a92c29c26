"""Mix the tasks of several environments in proportion to their weights; one environment is a mix of one."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import torch

from agentrl.engines.base import Sampling
from agentrl.engines.rng import derive_seed
from agentrl.rollout.plan import TaskSource
from agentrl.toolenv.dialects import Dialect
from agentrl.types import Origin, Task


class TaskMix:
    """One split of each of a run's environments, and the order in which their tasks come.

    Places are cut into blocks. Up to the end of any block each environment has had its share of all places, give or
    take one for each environment; within a block the order is random, so that a step that uses only the first places
    of its block favours none.

    Args:
        sources: the splits by the name of their environment, which is empty where there is one.
        weights: a weight above 0 for each.
        block: places of a block.
    """

    def __init__(self, sources: Mapping[str, TaskSource], weights: Mapping[str, float], *, block: int) -> None:
        self.sources = sources
        # Exact: of rounded products the last places of a long run would be off by one.
        self._weights = [Fraction(weights[name]) for name in sources]
        self._block = block

    @property
    def dialects(self) -> list[Dialect]:
        """The dialect of each environment."""
        return [source.dialect for source in self.sources.values()]

    @property
    def label(self) -> str:
        """Names and hashes of the dialects."""
        return ", ".join(dialect.label for dialect in self.dialects)

    def texts(self, count: int) -> Iterator[str]:
        """Give the texts of the gold episodes of the first ``count`` tasks of each environment.

        Raises:
            ConfigError: an environment has no gold player.
        """
        return (text for source in self.sources.values() for text in source.texts(count))

    def origins(self, sampling: Sampling) -> dict[str, Origin]:
        """Give the origin that records of each environment's episodes carry."""
        return {name: source.origin(sampling) for name, source in self.sources.items()}

    def shares(self, count: int) -> dict[str, int]:
        """Share ``count`` places out by weight, by the name of the environment."""
        shares, left, rest = dict[str, int](), count, sum(self._weights, Fraction())
        # Each takes its part of what the ones before it left. None of them ever falls as ``count`` rises by one.
        for name, weight in zip(self.sources, self._weights, strict=True):
            shares[name] = left * weight // rest
            left, rest = left - shares[name], rest - weight
        return shares

    def pick(self, count: int, *, first: int = 0, seed: int) -> list[tuple[str, Task]]:
        """Pick the tasks of places ``first`` to ``first + count``, each with the name of its environment.

        Each environment gives its own tasks in the order of ``TaskSource.pick``, none left out.

        Args:
            count: number of tasks.
            first: the first place, at least 0.
            seed: shuffles the order of environments, and of the tasks of each.
        """
        begin = first - first % self._block
        names = [name for start in range(begin, first + count, self._block) for name in self._order(start, seed)]
        before, names = names[: first - begin], names[first - begin :][:count]
        passed, wanted = Counter(self.shares(begin)) + Counter(before), Counter(names)
        tasks = {name: iter(self.sources[name].pick(wanted[name], first=passed[name], seed=seed)) for name in wanted}
        return [(name, next(tasks[name])) for name in names]

    def _order(self, start: int, seed: int) -> Sequence[str]:
        """Give the names of the block that begins at ``start``."""
        before, after = self.shares(start), self.shares(start + self._block)
        names = [name for name in self.sources for _ in range(after[name] - before[name])]
        generator = torch.Generator().manual_seed(derive_seed(seed, "mix", start))
        return [names[place] for place in torch.randperm(len(names), generator=generator).tolist()]
