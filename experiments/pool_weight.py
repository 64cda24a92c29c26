"""How much should a task's own episodes weigh beside those of other tasks? The best weight of the pool, for part B.

The baseline of an episode is that of ``algos.ogb`` with ``pool=κ``, without the episode itself: it is unbiased with
every κ. Let β be a task's best baseline, e the mean energy of its episodes, and s the variance of W·(R − β). To first
order n own episodes and κ mean episodes of others have the excess energy (n·s/e + κ²·e·(β − pool's β)²) / (n + κ)².
Summed over tasks of equal energy it is least for κ = within / between, whatever n is.

Legend: R rows (one episode each), K tasks.
"""

import math
import sys
from collections.abc import Sequence

import torch
from rows import ROOT, digits
from torch import Tensor

from agentrl.algos.advantages import ogb
from agentrl.algos.rows import Rows

sys.path.insert(0, str(ROOT / "scripts"))
from recorded_gradients import Recorded, drawn

KAPPAS = (0.0, 0.25, 1.0, 4.0, 16.0, math.inf)
SIZES = (4, 8)
DRAWS = 200


def measured(recorded: Recorded) -> dict[str, object]:
    """Measure what the best κ is derived from, and the noise by N and κ."""
    layout = Rows.of(recorded.batch.starts, recorded.batch.rewards)
    of_rows = layout.sum(recorded.energy), layout.sum(recorded.batch.rewards), recorded.batch.group
    within, between = variances(*of_rows)
    by_size = {
        str(size): {
            f"{kappa:g}": digits(value, 4) for kappa, value in zip(KAPPAS, noise(*of_rows, size, DRAWS), strict=True)
        }
        for size in SIZES
    }
    return {"within": digits(within, 4), "between": digits(between, 4), "noise": by_size}


def variances(energy: Tensor, returns: Tensor, group: Tensor) -> tuple[float, float]:
    """Compute the variances of a task's estimate of β by one episode, and of β between tasks.

    Args:
        energy: W of each row [R].
        returns: R of each row [R].
        group: task of each row, from 0 to K − 1 [R].

    Returns:
        Their means over tasks, weighed by the energy of each. The second may be negative, as unbiased estimates may.
    """
    count, e, best = _by_task(energy, returns, group)
    residual = energy * (returns - best[group])
    spread = torch.zeros_like(e).index_add(0, group, residual.square()) / (count - 1)
    pool = (e * best).sum() / e.sum()
    within = (spread / e.clamp_min(1e-12)).sum() / e.sum()
    apart = (e * (best - pool).square()).sum() / e.sum()
    return float(within), float(apart - (spread / e.clamp_min(1e-12) / count).sum() / e.sum())


def noise(energy: Tensor, returns: Tensor, group: Tensor, size: int, draws: int) -> list[float]:
    """Compute ``W·(R − b)²`` with the baselines of each κ, as a multiple of that with each task's own β.

    Args:
        energy: W of each row [R].
        returns: R of each row [R].
        group: task of each row, from 0 to K − 1 [R].
        size: episodes of a group; a step has one of each task.
        draws: number of steps.
    """
    best = _by_task(energy, returns, group)[2]
    generator = torch.Generator().manual_seed(size)
    totals = torch.zeros(len(KAPPAS), dtype=torch.float64)
    for _ in range(draws):
        rows = drawn(group, size, generator)[0]
        starts = torch.arange(len(rows) + 1)
        for number, kappa in enumerate(KAPPAS):
            credit = ogb(returns[rows], energy[rows], starts, group[rows], leave_one_out=True, pool=kappa)
            totals[number] += (energy[rows] * credit.square()).mean().double() / draws
    # Every task counts alike in a step, however many rows it has here.
    least = _by_task(energy * (returns - best[group]).square(), returns, group)[1].mean()
    return (totals / float(least)).tolist()


def _by_task(energy: Tensor, returns: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, mean energy and best baseline of each task [K]."""
    count = group.bincount()
    sums: Sequence[Tensor] = [
        torch.zeros(len(count), dtype=energy.dtype).index_add(0, group, values) for values in (energy, energy * returns)
    ]
    return count, sums[0] / count, sums[1] / sums[0].clamp_min(1e-12)
