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

    The sequence of tasks is cut into blocks. Up to the end of any block each environment has its share of the tasks so
    far, give or take one for each environment. Within a block the order of environments is random, so that a step that
    uses only the beginning of its block favours none.

    Args:
        sources: the splits by the name of their environment, which is empty where there is only one.
        weights: a weight above 0 for each.
        block: tasks of a block.
    """

    def __init__(self, sources: Mapping[str, TaskSource], weights: Mapping[str, float], *, block: int) -> None:
        self.sources = sources
        # Exact fractions: rounded products would be off by one late in a long run.
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
        """Return the texts of the gold episodes of the first ``count`` tasks of each environment.

        Raises:
            ConfigError: an environment has no gold player.
        """
        return (text for source in self.sources.values() for text in source.texts(count))

    def origins(self, sampling: Sampling) -> dict[str, Origin]:
        """Return the origin that records of each environment's episodes carry."""
        return {name: source.origin(sampling) for name, source in self.sources.items()}

    def shares(self, count: int) -> dict[str, int]:
        """Share ``count`` tasks out by weight, by the name of the environment."""
        shares, left, rest = dict[str, int](), count, sum(self._weights, Fraction())
        # Each takes its part of the rest that the ones before it left. No share ever falls when ``count`` rises by one.
        for name, weight in zip(self.sources, self._weights, strict=True):
            shares[name] = left * weight // rest
            left, rest = left - shares[name], rest - weight
        return shares

    def pick(self, count: int, *, start: int = 0, seed: int) -> list[tuple[str, Task]]:
        """Pick tasks ``start`` to ``start + count`` of the sequence, each with the name of its environment.

        Each environment gives its own tasks in the order of ``TaskSource.pick``, without gaps.

        Args:
            count: number of tasks.
            start: index of the first one, at least 0.
            seed: shuffles the order of environments, and of the tasks of each.
        """
        begin = start - start % self._block
        before, names = self.names(start - begin, start=begin, seed=seed), self.names(count, start=start, seed=seed)
        # Each environment continues after the tasks that all blocks and names before took from it.
        passed, wanted = Counter(self.shares(begin)) + Counter(before), Counter(names)
        tasks = {name: iter(self.sources[name].pick(wanted[name], start=passed[name], seed=seed)) for name in wanted}
        return [(name, next(tasks[name])) for name in names]

    def names(self, count: int, *, start: int, seed: int) -> list[str]:
        """Return the environments of the tasks that ``pick`` returns."""
        skipped = start % self._block
        blocks = range(start - skipped, start + count, self._block)
        return [name for block in blocks for name in self._order(block, seed)][skipped : skipped + count]

    def _order(self, begin: int, seed: int) -> Sequence[str]:
        """Return the shuffled names of the block that begins at index ``begin``."""
        before, after = self.shares(begin), self.shares(begin + self._block)
        names = [name for name in self.sources for _ in range(after[name] - before[name])]
        generator = torch.Generator().manual_seed(derive_seed(seed, "mix", begin))
        return [names[index] for index in torch.randperm(len(names), generator=generator).tolist()]
