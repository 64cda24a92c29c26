"""Recorded episodes with the gradient of each of their tokens, and what groups of them make of these.

Legend: K tasks, R rows (one episode each), S sampled tokens, D width of the projection, E estimators.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from agentrl import algos
from agentrl.algos.aggregate import coefficients
from agentrl.algos.head import token_energy
from agentrl.algos.ratios import behaviour_weights
from agentrl.algos.rows import Rows
from agentrl.batch import Batch
from agentrl.errors import UsageError
from agentrl.eval.episodes import load
from agentrl.types import Group, Trajectory

LARGE = 2**16
"""Weights of a matrix that is not large, at most."""
BINS = 10
"""Bins of the probability of a token."""
Estimators = Mapping[str, tuple[str, Mapping[str, object]]]
"""Name and options of an advantage, by what the table calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Episodes, with energy, weight and gradient of each of their sampled tokens."""

    batch: Batch
    """The episodes of K tasks, whole groups together."""
    energy: Tensor
    """Token energy [S]."""
    weights: Tensor
    """Truncated ratio of the loaded weights to those that sampled, a number per row on all its tokens [S]."""
    gradients: Tensor
    """Each token's ∇logp, projected [S, D]."""
    probability: Tensor
    """π of each token at the loaded weights [S]."""

    @classmethod
    def of(cls, batch: Batch, logp: Tensor, sum_sq: Tensor, gradients: Tensor) -> "Recorded":
        """From each token's log-prob and Σπ² at the loaded weights [S]."""
        weights = behaviour_weights(logp, batch.in_time(batch.sampler_logp), batch.episode_starts, kind="sequence")
        energy = token_energy(logp, sum_sq)
        return cls(batch=batch, energy=energy, weights=weights, gradients=gradients, probability=logp.exp())


class _Copied:
    """A parameter's gradient as it is, at its own coordinates."""

    def __init__(self, start: int, size: int) -> None:
        self.here = slice(start, start + size)

    def add(self, total: Tensor, gradient: Tensor) -> None:
        total[:, self.here] += gradient.flatten(1)


class _Scattered:
    """A count sketch: each weight is added to a random coordinate with a random sign."""

    def __init__(self, size: int, width: int, generator: torch.Generator, device: str) -> None:
        # A parameter is scattered over as many lines of D as it needs, and the lines are added. So no two weights are
        # written to one address, which a GPU would do one after the other.
        self.lines = -(-size // width)
        self.places = torch.randperm(self.lines * width, generator=generator)[:size].to(device)
        self.signs = _signs((size,), generator).to(device)

    def add(self, total: Tensor, gradient: Tensor) -> None:
        width = total.shape[1]
        scattered = gradient.new_zeros(len(gradient), self.lines * width)
        scattered[:, self.places] = gradient.flatten(1) * self.signs
        total += scattered.view(len(gradient), self.lines, width).sum(1)


class _TwoSided:
    """AᵀGB of a large matrix G, random signs in A and B: an outer product is projected without being formed."""

    def __init__(self, shape: torch.Size, width: int, generator: torch.Generator, device: str) -> None:
        side = math.isqrt(width)
        self.a, self.b = (_signs((length, side), generator).to(device) / side**0.5 for length in shape)

    def add(self, total: Tensor, gradient: Tensor) -> None:
        self._add(total, self.a.T @ gradient @ self.b)

    def add_outer(self, total: Tensor, rows: Tensor, columns: Tensor) -> None:
        self._add(total, (rows @ self.a).mT @ (columns @ self.b))

    def _add(self, total: Tensor, projected: Tensor) -> None:
        total[:, : self.a.shape[1] ** 2] += projected.flatten(1)


def _signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, tuple(shape), generator=generator) * 2.0 - 1.0


class Projection:
    """A random projection of gradients onto D coordinates that keeps inner products.

    They are off by about √(2/D) of the norms; within one large matrix by up to √(4/√D), which averages out over the
    matrices of a model. A model of at most D weights is not projected.

    Args:
        parameters: that are differentiated by.
        width: D.
        seed: of the random numbers, which are the same on every device.
        device: of the gradients.
    """

    def __init__(self, parameters: Sequence[Tensor], width: int, seed: int, device: str = "cpu") -> None:
        sizes = [parameter.numel() for parameter in parameters]
        generator = torch.Generator().manual_seed(seed)
        self.width = min(sum(sizes), width)
        self._parts = list[_Copied | _Scattered | _TwoSided]()
        for number, parameter in enumerate(parameters):
            if sum(sizes) <= width:
                self._parts.append(_Copied(sum(sizes[:number]), sizes[number]))
            elif parameter.dim() == 2 and sizes[number] > LARGE:
                self._parts.append(_TwoSided(parameter.shape, width, generator, device))
            else:
                self._parts.append(_Scattered(sizes[number], width, generator, device))

    def add(self, total: Tensor, gradient: Tensor, number: int) -> None:
        """Add the projection of gradients by one parameter to others.

        Args:
            total: what is added to [n, D].
            gradient: by the parameter [n, its shape].
            number: of the parameter.
        """
        self._parts[number].add(total, gradient)

    def add_outer(self, total: Tensor, rows: Tensor, columns: Tensor, number: int) -> None:
        """Add the projection of gradients by a matrix that are sums of outer products, rowsᵀ·columns.

        Args:
            total: what is added to [n, D].
            rows: the first factors [n, T, rows of the matrix], or the same for all n [T, rows].
            columns: the second [n, T, columns of the matrix], or the same for all n [T, columns].
            number: of the parameter.
        """
        part = self._parts[number]
        if isinstance(part, _TwoSided):
            part.add_outer(total, rows, columns)
        else:
            part.add(total, rows.mT @ columns)

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """Project one gradient, given by parameter [D]."""
        total = torch.zeros(1, self.width)
        for number, gradient in enumerate(gradients):
            self.add(total, gradient[None].float().cpu(), number)
        return total[0]


def groups_of(file: Path, least: int) -> list[Group]:
    """Group the episodes of a file by task; tasks with fewer than ``least`` that have a sampled token are skipped.

    Raises:
        UsageError: an episode has several rows.
    """
    tasks: dict[tuple[str, str], list[Trajectory]] = {}
    for record in load(file):
        if len(record.trajectory.rows) > 1:
            raise UsageError(f"{str(file)!r} has episodes of several rows, and estimators are compared on episodes of "
                             "one: name another file")  # fmt: skip
        if record.trajectory.n_sampled:
            tasks.setdefault((record.trajectory.env, record.trajectory.task_id), []).append(record.trajectory)
    return [Group(tuple(rows)) for rows in tasks.values() if len(rows) >= least]


def drawn(group: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw two disjoint groups of ``size`` rows of every task, and return them and the remaining rows."""
    parts: tuple[list[Tensor], ...] = ([], [], [])
    for task in range(int(group.max()) + 1):
        rows = torch.nonzero(group == task)[:, 0]
        mixed = rows[torch.randperm(len(rows), generator=generator)]
        for part, chosen in zip(parts, (mixed[:size], mixed[size : 2 * size], mixed[2 * size :]), strict=True):
            part.append(chosen)
    return torch.cat(parts[0]), torch.cat(parts[1]), torch.cat(parts[2])


def _advantages(recorded: Recorded, batch: Batch, name: str, options: Mapping[str, object]) -> Tensor:
    energy, rewards = recorded.energy[batch.in_time(batch.index)], batch.in_time(batch.rewards)
    return algos.advantage(name, rewards, energy, batch.episode_starts, batch.episode_group, **options)


def gradients_of(recorded: Recorded, rows: Tensor, estimators: Estimators, aggregate: str) -> Tensor:
    """Compute each task's gradient from some of its rows, by each estimator [E, K, D], float64."""
    (batch,) = recorded.batch.balanced(len(recorded.batch.tokens), rows.sort().values.tolist())
    index, layout = batch.in_time(batch.index), Rows.of(batch.episode_starts, batch.rewards)
    tasks = int(recorded.batch.group.max()) + 1
    group = batch.episode_group[layout.row]
    # coefficients divides by the rows of the batch; each task's mean divides by the rows of the task.
    share = coefficients(aggregate, layout, None) * len(batch.episode_group) / batch.episode_group.bincount()[group]
    share *= recorded.weights[index]
    credit = torch.stack([_advantages(recorded, batch, *estimator) * share for estimator in estimators.values()])
    gradients = recorded.gradients
    sums = gradients.new_zeros(len(estimators), tasks, gradients.shape[1], dtype=torch.float64)
    for task in range(tasks):
        here = torch.nonzero(group == task)[:, 0]
        # Products are taken in float32: a copy of the gradients in float64 would take most of the time.
        of_task = gradients[index[here].to(gradients.device)]
        sums[:, task] = (credit[:, here].to(of_task) @ of_task).double()
    return sums


def without_each(values: Tensor) -> Tensor:
    """Sum values over all tasks, and over all but each in turn: [..., K, D] to [..., 1 + K, D]."""
    total = values.sum(-2, keepdim=True)
    return torch.cat([total, total - values], dim=-2)


def scores(recorded: Recorded) -> Tensor:
    """Sum each row's token gradients: the gradient S of its log-prob, projected [R, D]."""
    batch, gradients = recorded.batch, recorded.gradients
    row = Rows.of(batch.starts, batch.rewards).row.to(gradients.device)
    return gradients.new_zeros(len(batch), gradients.shape[1]).index_add(0, row, gradients)


def shares(recorded: Recorded) -> dict[str, float]:
    """Compute the mean return p, and β by the energy W and by ‖S‖², for which W stands.

    β is the mean return weighed by either. ``e`` is the mean of ‖S‖², and ``correlation`` that of both over rows.
    """
    layout = Rows.of(recorded.batch.starts, recorded.batch.rewards)
    ret, energy = layout.sum(recorded.batch.rewards), layout.sum(recorded.energy)
    squared = scores(recorded).double().square().sum(1).cpu()
    correlation = torch.corrcoef(torch.stack([energy, squared]))[0, 1].nan_to_num()
    measured = {"p": ret.mean(), "beta_W": (energy * ret).sum() / energy.sum()}
    measured |= {"beta_S": (squared * ret).sum() / squared.sum(), "e": squared.mean(), "correlation": correlation}
    return {name: float(value) for name, value in measured.items()}


def by_probability(recorded: Recorded) -> list[list[float]]:
    """List ten bins of π, from 0 to 1: tokens, mean norm of a token's gradient, and root of its mean energy.

    Bins without a token are left out; each line begins with the bin's lower edge.
    """
    norms, bins = recorded.gradients.norm(dim=1).cpu(), (recorded.probability * BINS).long().clamp(max=BINS - 1)
    lines = list[list[float]]()
    for number in bins.unique().tolist():
        here = bins == number
        root = recorded.energy[here].mean().sqrt()
        lines.append([number / BINS, int(here.sum()), float(norms[here].mean()), float(root)])
    return lines
