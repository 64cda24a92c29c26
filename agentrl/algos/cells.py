"""The cells (group, t) of a step, and exact sums over a cell's rows and over those of all other groups.

Shapes: ``S`` sampled tokens of all rows end to end, ``R`` rows, ``K`` cells. ``t`` = 1, 2, … is the ordinal of a
sampled token in its row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl.algos.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """The pairs (group, t) that hold at least one token, numbered group by group: ``K`` of them.

    Example:
        Rows of 2 and 1 tokens in group 0, and one of 3 in group 1::

            spans.starts = [0, 2, 5]
            cell         = [0, 1, 0, 2, 3, 4]
            size         = [2, 2, 1, 1, 1]
    """

    spans: Rows
    """The groups as rows of cells: G groups, K cells."""
    cell: Tensor
    """The cell of each token [S]."""
    size: Tensor
    """Number of rows with a sampled token in the cell's group [K], float64."""
    first_free: Tensor
    """The cell after the last token of each row with a sampled token; it may lie outside the row's group."""
    stays: Tensor
    """True where that cell still belongs to the row's group, that is, a longer row exists; same shape."""
    until: Tensor
    """The last t of the row's group; same shape."""

    @classmethod
    def of(cls, rows: Rows, member: Tensor) -> "Cells":
        """Number the cells of ``rows``, whose groups are ``member``, numbered from 0 [R]."""
        n_groups = int(member.max()) + 1 if member.numel() else 0
        # A group has as many cells as its longest row has tokens, so K ≤ S; a table of all groups × t may not be.
        longest = torch.zeros(n_groups, dtype=torch.int64, device=member.device)
        longest = longest.scatter_reduce(0, member, rows.lengths, "amax")
        starts = torch.cat([longest.new_zeros(1), longest.cumsum(0)])
        present = rows.lengths > 0
        sizes = torch.zeros(n_groups, dtype=torch.float64, device=member.device)
        sizes = sizes.index_add(0, member, present.double())
        spans = Rows.of(starts, torch.empty(int(starts[-1]), device=member.device))
        row_starts = starts[member]
        until = longest[member]
        return cls(
            spans=spans,
            # Token j of a row lies in cell j of its group: shift the row's tokens to where the group's cells begin.
            cell=(row_starts - rows.starts[:-1])[rows.row] + torch.arange(rows.row.numel(), device=member.device),
            size=sizes[spans.row],
            first_free=(row_starts + rows.lengths)[present],
            stays=(rows.lengths < until)[present],
            until=until[present],
        )

    def sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` [S] over each cell [K]."""
        return torch.zeros_like(self.size).index_add(0, self.cell, values)

    def carried(self, values: Tensor) -> Tensor:
        """Sum over each cell one value per row that ended before it [K]; ``values`` has the shape of first_free."""
        # Each ended row enters once, in the first cell without a token of its own; a prefix sum carries it on.
        ended = torch.zeros_like(self.size).index_add(0, self.first_free[self.stays], values[self.stays])
        return self.spans.prefix_sum(ended)

    def elsewhere(self, values: Tensor) -> Tensor:
        """Sum ``values`` [K] over the cells of the other groups at the cell's t [K]."""
        ordinal = self.spans.ordinal
        order = torch.argsort(ordinal, stable=True)
        starts = pad(torch.bincount(ordinal)[1:].cumsum(0), (1, 0))
        # The sum over the groups before plus the sum over those after. The sum over all groups less the own one would
        # cancel: a pool that is small beside the own group would lose its digits.
        sums = _before(values[order], starts) + _before(values[order].flip(0), starts[-1] - starts.flip(0)).flip(0)
        return torch.empty_like(values).index_copy(0, order, sums)

    def ended(self, values: Tensor) -> Tensor:
        """Sum over each cell one value per row whose group has no cell at that t any more [K]; see ``carried``."""
        ordinal = self.spans.ordinal
        totals = values.new_zeros(int(ordinal.max()) + 1 if ordinal.numel() else 0).index_add(0, self.until, values)
        return totals.cumsum(0)[ordinal - 1]


def _before(values: Tensor, starts: Tensor) -> Tensor:
    """Sum the values before each value in its row."""
    rows = Rows.of(starts, values)
    return torch.where(rows.ordinal > 1, rows.prefix_sum(values).roll(1), 0.0)
