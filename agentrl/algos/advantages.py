"""Advantages: how much better a token did than its group would have.

Shapes: ``S`` sampled tokens of all rows end to end, ``R`` rows (one episode each). ``t`` = 1, 2, … is the ordinal of a
sampled token in its episode. A row with no sampled token takes no part and does not count in its group. All take:

    rewards [S]    reward of each token, 0 except on a turn's last one
    energy [S]     token energy ``‖onehot(y) − π‖²`` in [0, 2), as ``head.token_energy`` gives it; OTB and OGB only
    starts [R+1]   offset of each row
    group [R]      the task instance a row belongs to (any integers, in any order)

They return the advantage of each token [S], summed in float64 and rounded to float32 (float64 for float64 rewards), and
raise ValueError for shapes that do not fit, numbers that are not finite, and negative energy or weights. An episode
that was cut into neighbouring rows is credited whole by giving the offsets of whole episodes: tokens lie end to end.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from agentrl.algos.rows import Rows, check_tokens
from agentrl.errors import UnknownNameError

EnergyKind = Literal["cumulative", "instantaneous", "uniform"]
Tail = Literal["zero", "own", "carry"]

_ENERGY_KINDS = ("cumulative", "instantaneous", "uniform")
_TAILS = ("zero", "own", "carry")
_ENERGY_EPS = 1e-8
_STD_EPS = 1e-6
_WHITEN_EPS = 1e-8


class Terms(NamedTuple):
    """What the Optimal Token Baseline subtracts from what: A = to_go − baseline; float64, [S] each."""

    realized: Tensor
    """W_t, the realized energy that weighs the row at t in its group's baseline."""
    baseline: Tensor
    """B_t, which all rows of a group have in common unless the row's own sample is left out."""
    to_go: Tensor
    """G_t, the reward from here to the row's end."""


def otb(
    rewards: Tensor,
    energy: Tensor,
    starts: Tensor,
    group: Tensor,
    *,
    energy_kind: EnergyKind = "cumulative",
    leave_one_out: bool = False,
    tail: Tail = "zero",
    weights: Tensor | None = None,
) -> Tensor:
    """Optimal Token Baseline: A_t = G_t − Σ_i W_t^i G_t^i / (Σ_i W_t^i + 1e-8), over the group's rows alive at t.

    W_t is the realized energy, the sum of the row's token energies up to and including t; G_t the reward-to-go.
    A group of one row has no baseline.

    Options:
        energy_kind: ``"cumulative"``: W_t as above; ``"instantaneous"``: W_t = w_t; ``"uniform"``: W_t = 1, so the
            baseline is the plain mean of the rows alive at t.
        leave_one_out: Leave the row's own sample out of its baseline: exactly unbiased, more variance.
        tail: Where one row of the group is left: ``"zero"``: B = 0; ``"own"``: B = G, so A = 0; ``"carry"``:
            finished rows stay in the group with their last energy and their full return.
        weights: Importance weight ρ of each token [S]: w ← ρ²w before it is summed. Not for ``"uniform"``: W_t is 1.

    Raises:
        UnknownNameError: an energy kind or tail that does not exist.

    Source: arXiv 2602.07078, the Optimal Token Baseline and its Logit-Gradient Proxy.
    """
    terms = otb_terms(
        rewards, energy, starts, group,
        energy_kind=energy_kind, leave_one_out=leave_one_out, tail=tail, weights=weights,
    )  # fmt: skip
    return _like(terms.to_go - terms.baseline, rewards)


def otb_terms(
    rewards: Tensor,
    energy: Tensor,
    starts: Tensor,
    group: Tensor,
    *,
    energy_kind: EnergyKind,
    leave_one_out: bool,
    tail: Tail,
    weights: Tensor | None,
) -> Terms:
    """The terms of ``otb``, from the same arguments."""
    if tail not in _TAILS:
        raise UnknownNameError("tail", tail, _TAILS)
    rows, member = _read(rewards, starts, group)
    to_go = rows.suffix_sum(rewards)
    realized = _realized_energy(rows, energy, weights, energy_kind)
    cells = _Cells.of(rows, member)
    total, weighted, alive = _group_sums(rows, cells, realized, to_go, carry=tail == "carry")
    # The group's sums less the row's own term are the sums over the other rows.
    own = realized if leave_one_out else torch.zeros_like(realized)
    # The difference of two large sums may be a rounding error below 0, which the ε could not make positive.
    others = (total[cells.cell] - own).clamp_min(0.0)
    baseline = (weighted[cells.cell] - own * to_go) / (others + _ENERGY_EPS)
    # `tail` decides only where other rows have finished; a group that began with one row never had a baseline.
    lone = to_go if tail == "own" else torch.zeros_like(to_go)
    baseline = torch.where(alive[cells.cell] < 2, lone, baseline)
    baseline = torch.where(cells.size[cells.cell] < 2, 0.0, baseline)
    return Terms(realized, baseline, to_go)


def group_mean(rewards: Tensor, starts: Tensor, group: Tensor, *, std: bool = False) -> Tensor:
    """Group mean: A = R − mean(R) of the row's group on every token: Dr.GRPO; with ``std``, over std(R) + 1e-6: GRPO.

    R is the row's whole return. The standard deviation has ddof 1. A group of one row has no baseline and no scale.

    Source: arXiv 2402.03300 (GRPO), arXiv 2503.20783 (Dr.GRPO).
    """
    returns = _Returns.of(rewards, starts, group)
    centred = returns.ret - returns.baseline(returns.present)
    if std:
        variance = returns.group_sum(centred.square() * returns.present) / (returns.size - 1).clamp_min(1)
        centred = torch.where(returns.size < 2, centred, centred / (variance.sqrt() + _STD_EPS))
    return returns.spread(centred, rewards)


def rloo(rewards: Tensor, starts: Tensor, group: Tensor) -> Tensor:
    """REINFORCE leave-one-out: A = R − mean return of the group's other rows, on every token.

    Source: arXiv 2402.14740.
    """
    returns = _Returns.of(rewards, starts, group)
    # A group of one has a sum of 0 over its others: the clamp makes its baseline 0 rather than 0/0.
    others = returns.group_sum(returns.ret * returns.present) - returns.ret
    return returns.spread(returns.ret - others / (returns.size - 1).clamp_min(1), rewards)


def opo(rewards: Tensor, starts: Tensor, group: Tensor) -> Tensor:
    """OPO: A = R − Σ L^i R^i / Σ L^i on every token, the group's mean return weighted by sampled length L.

    Source: arXiv 2505.23585.
    """
    returns = _Returns.of(rewards, starts, group)
    return returns.spread(returns.ret - returns.baseline(returns.rows.lengths.double()), rewards)


def ogb(rewards: Tensor, energy: Tensor, starts: Tensor, group: Tensor) -> Tensor:
    """Optimal Group Baseline: A = R − Σ W_T^i R^i / (Σ W_T^i + 1e-8) on every token, W_T the row's total energy.

    Source: arXiv 2602.07078, the group-level form.
    """
    returns = _Returns.of(rewards, starts, group)
    check_tokens("energy", energy, rewards, least=0.0)
    return returns.spread(returns.ret - returns.baseline(returns.rows.sum(energy), eps=_ENERGY_EPS), rewards)


def reinforce_pp(rewards: Tensor, starts: Tensor, group: Tensor) -> Tensor:
    """REINFORCE++: returns whitened over the whole batch, A = (R − mean) / (std + 1e-8) on every token.

    Mean and (population) standard deviation are taken over tokens, so a row counts as often as it is long. Groups
    play no part.

    Source: arXiv 2501.03262.
    """
    returns = _Returns.of(rewards, starts, group)
    lengths = returns.rows.lengths.double()
    n_tokens = lengths.sum().clamp_min(1)
    centred = returns.ret - (returns.ret * lengths).sum() / n_tokens
    std = ((centred.square() * lengths).sum() / n_tokens).sqrt()
    return returns.spread(centred / (std + _WHITEN_EPS), rewards)


def none(rewards: Tensor, starts: Tensor, group: Tensor) -> Tensor:
    """No baseline: A_t = G_t, the return from the token on. Groups play no part.

    Source: REINFORCE, Williams 1992.
    """
    rows, _ = _read(rewards, starts, group)
    return _like(rows.suffix_sum(rewards), rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """The pairs (group, t) that hold at least one token, numbered group by group: ``K`` of them."""

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

    @classmethod
    def of(cls, rows: Rows, member: Tensor) -> "_Cells":
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
        return cls(
            spans=spans,
            # Token j of a row lies in cell j of its group: shift the row's tokens to where the group's cells begin.
            cell=(row_starts - rows.starts[:-1])[rows.row] + torch.arange(rows.row.numel(), device=member.device),
            size=sizes[spans.row],
            first_free=(row_starts + rows.lengths)[present],
            stays=(rows.lengths < longest[member])[present],
        )

    def sum(self, values: Tensor) -> Tensor:
        """Sum of ``values`` [S] over each cell [K]."""
        return torch.zeros_like(self.size).index_add(0, self.cell, values)

    def carried(self, values: Tensor) -> Tensor:
        """Sum over each cell of one value per row that finished before it [K]; ``values`` is shaped as first_free."""
        # Each finished row enters once, in the first cell without a token of its own; a prefix sum carries it on.
        ended = torch.zeros_like(self.size).index_add(0, self.first_free[self.stays], values[self.stays])
        return self.spans.prefix_sum(ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Returns:
    """Whole returns, row by row and in float64, for the estimators that have one baseline per row."""

    rows: Rows
    """The batch's rows."""
    member: Tensor
    """The group of each row, numbered from 0 [R]."""
    ret: Tensor
    """The return of each row [R]."""
    present: Tensor
    """1 where the row has a sampled token, else 0 [R]."""

    @classmethod
    def of(cls, rewards: Tensor, starts: Tensor, group: Tensor) -> "_Returns":
        rows, member = _read(rewards, starts, group)
        return cls(rows=rows, member=member, ret=rows.sum(rewards), present=(rows.lengths > 0).double())

    @property
    def size(self) -> Tensor:
        """Number of such rows in the row's group [R]."""
        return self.group_sum(self.present)

    def group_sum(self, values: Tensor) -> Tensor:
        """Sum of ``values`` [R] over each row's group, back on every row [R]."""
        return torch.zeros_like(values).index_add(0, self.member, values)[self.member]

    def baseline(self, weight: Tensor, *, eps: float = 0.0) -> Tensor:
        """Mean return of each row's group under a ``weight`` per row, 0 for groups of one [R]."""
        total = self.group_sum(weight) + eps
        mean = self.group_sum(weight * self.ret) / torch.where(total > 0, total, 1.0)
        return torch.where(self.size < 2, 0.0, mean)

    def spread(self, values: Tensor, rewards: Tensor) -> Tensor:
        """One value per row on every token of it [S]."""
        return _like(values[self.rows.row], rewards)


def _read(rewards: Tensor, starts: Tensor, group: Tensor) -> tuple[Rows, Tensor]:
    """Check the arguments that every estimator takes; return the rows, and their groups numbered from 0 [R]."""
    check_tokens("rewards", rewards, rewards)
    rows = Rows.of(starts, rewards)
    if group.shape != rows.lengths.shape or group.is_floating_point():
        raise ValueError(f"group must be one integer per row, [{rows.lengths.numel()}], "
                         f"not {group.dtype} {list(group.shape)}")  # fmt: skip
    # Numbered without gaps, groups can index tensors of one entry per group.
    _, member = torch.unique(group.to(rewards.device), return_inverse=True)
    return rows, member


def _realized_energy(rows: Rows, energy: Tensor, weights: Tensor | None, kind: EnergyKind) -> Tensor:
    """W_t of each token [S], in float64."""
    if kind not in _ENERGY_KINDS:
        raise UnknownNameError("energy kind", kind, _ENERGY_KINDS)
    check_tokens("energy", energy, rows.row, least=0.0)
    if weights is not None:
        check_tokens("weights", weights, rows.row, least=0.0)
    if kind == "uniform":
        return torch.ones_like(energy, dtype=torch.float64)
    weighted = energy.double() if weights is None else energy.double() * weights.double().square()
    return weighted if kind == "instantaneous" else rows.prefix_sum(weighted).clamp_min(0.0)


def _group_sums(
    rows: Rows, cells: _Cells, realized: Tensor, to_go: Tensor, *, carry: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """ΣW, ΣWG and the number of rows that they sum over, of each cell [K]; ``carry`` keeps finished rows in."""
    total, weighted = cells.sum(realized), cells.sum(realized * to_go)
    if not carry:
        return total, weighted, cells.sum(torch.ones_like(realized))
    present = rows.lengths > 0
    # A finished row stays with the energy of its last token and the return from its first.
    kept = realized[rows.starts[1:][present] - 1]
    returns = to_go[rows.starts[:-1][present]]
    return total + cells.carried(kept), weighted + cells.carried(kept * returns), cells.size


def _like(values: Tensor, rewards: Tensor) -> Tensor:
    return values.to(torch.promote_types(rewards.dtype, torch.float32))
