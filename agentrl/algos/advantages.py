"""Advantages: how much better a token did than its group would have.

Shapes: ``S`` sampled tokens of all rows end to end, ``R`` rows. A row is one episode: all of its sampled tokens in
time, whatever pieces the model has read it in (docs/rows.md). ``t`` = 1, 2, … is the ordinal of a token in its row. A
row with no sampled token takes no part and does not count in its group. All take:

    rewards [S]    reward of each token, 0 except on a turn's last one
    energy [S]     token energy ``‖onehot(y) − π‖²`` in [0, 2), as ``head.token_energy`` returns it; OTB and OGB only
    starts [R+1]   offset of each row
    group [R]      the task instance a row belongs to (any integers, in any order)

They return the advantage of each token [S], summed in float64 and rounded to float32 (float64 for float64 rewards), and
raise ValueError for shapes that do not fit, numbers that are not finite, and negative energy or weights.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl.algos.cells import Cells
from agentrl.algos.rows import Rows, check_per_token
from agentrl.errors import ConfigError, UnknownNameError

EnergyKind = Literal["cumulative", "instantaneous", "uniform", "episode"]
Tail = Literal["zero", "own", "carry"]

_ENERGY_EPS = 1e-8
_STD_EPS = 1e-6
_WHITEN_EPS = 1e-8


class Terms(NamedTuple):
    """The terms of the Optimal Token Baseline, A = to_go − baseline; float64, [S] each."""

    realized: Tensor
    """W_t, the realized energy that weighs the row at t in its group's baseline."""
    baseline: Tensor
    """B_t, the same for all rows of a group unless the row's own sample is excluded."""
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
    pool: float = 0.0,
) -> Tensor:
    """Optimal Token Baseline: A_t = G_t − Σ_i W_t^i G_t^i / (Σ_i W_t^i + 1e-8), over the group's rows alive at t.

    W_t is the realized energy, the sum of the row's token energies up to and including t; G_t the reward-to-go.
    A group of one row has no baseline without a pool.

    Options:
        energy_kind: ``"cumulative"``: W_t as above; ``"instantaneous"``: W_t = w_t; ``"uniform"``: W_t = 1, so the
            baseline is the plain mean of the rows alive at t; ``"episode"``: W_t = W_T, the energy of the whole row,
            so with ``tail="carry"`` and rewards at the end alone the baseline is one for all t.
        leave_one_out: Leave the row's own sample out of its baseline: exactly unbiased, more variance.
        tail: Where one row of the group is left, and none of the pool: ``"zero"``: B = 0; ``"own"``: B = G, so A = 0;
            ``"carry"``: finished rows stay in the group with their last energy and their full return.
        weights: Importance weight ρ of each token [S]: w ← ρ²w before it is summed. Not for ``"uniform"``: W_t is 1.
        pool: κ ≥ 0, for so many mean rows of the step's other groups in the sums over the group's rows: κ/n·Σ_j W_t^j
            and κ/n·Σ_j W_t^j G_t^j, over the n rows j of other groups alive at t (with ``"carry"``: all). With
            ``inf`` they alone make the baseline, which is exactly unbiased, also for groups of one; where none is
            left, or the step has no other group, the row's own group does, without the row.

    Raises:
        UnknownNameError: an energy kind or tail that does not exist.
        ConfigError: a negative pool.

    Source: arXiv 2602.07078, the Optimal Token Baseline and its Logit-Gradient Proxy. The pool and the energy of
    a whole row are ours.
    """
    terms = otb_terms(
        rewards, energy, starts, group,
        energy_kind=energy_kind, leave_one_out=leave_one_out, tail=tail, weights=weights, pool=pool,
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
    pool: float,
) -> Terms:
    """Compute the terms of ``otb`` from the same arguments."""
    rows, member = _read(rewards, starts, group)
    to_go = rows.suffix_sum(rewards)
    realized = _realized_energy(rows, energy, weights, energy_kind)
    baseline = _baseline(rows, member, realized, to_go, leave_one_out=leave_one_out, tail=tail, pool=pool)
    return Terms(realized, baseline, to_go)


def group_mean(rewards: Tensor, starts: Tensor, group: Tensor, *, std: bool = False) -> Tensor:
    """Group mean: A = R − mean(R) of the row's group on every token: Dr.GRPO; with ``std``, over std(R) + 1e-6: GRPO.

    R is the row's return. The standard deviation has ddof 1. A group of one row has no baseline and no scale.

    Source: arXiv 2402.03300 (GRPO), arXiv 2503.20783 (Dr.GRPO).
    """
    returns = _Returns.of(rewards, starts, group)
    centred = returns.ret - returns.baseline(returns.present)
    if std:
        # Rows without a token have no part in the sum, and a group of one row is not divided: its std would be 0/0.
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


def ogb(
    rewards: Tensor,
    energy: Tensor,
    starts: Tensor,
    group: Tensor,
    *,
    leave_one_out: bool = False,
    pool: float = 0.0,
) -> Tensor:
    """Optimal Group Baseline: A = R − Σ W_T^i R^i / (Σ W_T^i + 1e-8) on every token, W_T the row's total energy.

    The options are those of ``otb``, with rows in place of their tokens at t.

    Source: arXiv 2602.07078, the group-level form. The pool is ours.
    """
    returns = _Returns.of(rewards, starts, group)
    check_per_token("energy", energy, rewards, least=0.0)
    takes_part = returns.present > 0
    total, ret = returns.rows.sum(energy)[takes_part], returns.ret[takes_part]
    # The shared code takes tokens: here each row is one token, with the row's total energy and return.
    rows = Rows.of(pad(takes_part.cumsum(0), (1, 0)), ret)
    baseline = torch.zeros_like(returns.ret)
    baseline[takes_part] = _baseline(
        rows, returns.member, total, ret, leave_one_out=leave_one_out, tail="zero", pool=pool
    )
    return returns.spread(returns.ret - baseline, rewards)


def reinforce_pp(rewards: Tensor, starts: Tensor, group: Tensor) -> Tensor:
    """REINFORCE++: returns whitened over the batch, A = (R − mean) / (std + 1e-8) on every token.

    Mean and (population) standard deviation are taken over tokens, so a row counts as often as it is long. Groups
    play no part.

    Source: arXiv 2501.03262.
    """
    returns = _Returns.of(rewards, starts, group)
    # Every token carries its row's return: so mean and std over tokens weigh a row by its length.
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
class _Returns:
    """The returns of rows, in float64, for the estimators that have one baseline per row."""

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
        """Sum ``values`` [R] over each row's group; every row gets the sum [R]."""
        return torch.zeros_like(values).index_add(0, self.member, values)[self.member]

    def baseline(self, weight: Tensor) -> Tensor:
        """Compute the mean return of each row's group, weighted per row, 0 for groups of one [R]."""
        total = self.group_sum(weight)
        mean = self.group_sum(weight * self.ret) / torch.where(total > 0, total, 1.0)
        return torch.where(self.size < 2, 0.0, mean)

    def spread(self, values: Tensor, rewards: Tensor) -> Tensor:
        """Copy one value per row to every token of the row [S]."""
        return _like(values[self.rows.row], rewards)


def _read(rewards: Tensor, starts: Tensor, group: Tensor) -> tuple[Rows, Tensor]:
    """Check the arguments that every estimator takes; return the rows, and their groups numbered from 0 [R]."""
    check_per_token("rewards", rewards, rewards)
    rows = Rows.of(starts, rewards)
    if group.shape != rows.lengths.shape or group.is_floating_point():
        raise ValueError(f"group must be one integer per row, [{rows.lengths.numel()}], "
                         f"not {group.dtype} {list(group.shape)}")  # fmt: skip
    # Numbered without gaps, groups can index tensors of one entry per group.
    _, member = torch.unique(group.to(rewards.device), return_inverse=True)
    return rows, member


def _realized_energy(rows: Rows, energy: Tensor, weights: Tensor | None, kind: EnergyKind) -> Tensor:
    """Compute W_t of each token [S], in float64."""
    if kind not in get_args(EnergyKind):
        raise UnknownNameError("energy kind", kind, get_args(EnergyKind))
    check_per_token("energy", energy, rows.row, least=0.0)
    if weights is not None:
        check_per_token("weights", weights, rows.row, least=0.0)
    if kind == "uniform":
        return torch.ones_like(energy, dtype=torch.float64)
    # Off-policy the squared norm of a token's gradient is weighed by ρ², as the gradient itself is by ρ.
    weighted = energy.double() if weights is None else energy.double() * weights.double().square()
    if kind == "episode":
        return rows.sum(weighted)[rows.row]
    # Prefix sums of zeros may be rounding errors below 0, which no weight of a mean may be.
    return weighted if kind == "instantaneous" else rows.prefix_sum(weighted).clamp_min(0.0)


class _Sums(NamedTuple):
    """Sums over some of the rows of each cell [K]."""

    energy: Tensor
    """ΣW."""
    weighted: Tensor
    """ΣWG."""
    alive: Tensor
    """The number of these rows, float64."""


def _baseline(
    rows: Rows,
    member: Tensor,
    realized: Tensor,
    to_go: Tensor,
    *,
    leave_one_out: bool,
    tail: Tail,
    pool: float,
) -> Tensor:
    """Compute B_t of each token [S] from W_t and G_t."""
    if tail not in get_args(Tail):
        raise UnknownNameError("tail", tail, get_args(Tail))
    if not pool >= 0:
        raise ConfigError(f"pool counts mean rows of other groups: it must be 0 or more, inf included, not {pool}")
    cells = Cells.of(rows, member)
    cell = cells.cell
    group, others = _sums(rows, cells, realized, to_go, tail, pool)
    ones = torch.ones_like(cells.size)
    # κ mean rows of the pool weigh as κ/n times the sums over its n rows. ``own_share`` and ``pool_share`` are the
    # factors of the group's sums and of the pool's.
    own_share, pool_share = ones, pool / others.alive.clamp_min(1)
    if pool == math.inf:
        # The pool alone makes the baseline. Where it has no row, the own group does: without the row itself, so that
        # the baseline is still unbiased.
        own_share, pool_share = (others.alive == 0).double(), ones
    # The group's sums less the row's own term are the sums over its other rows.
    own = realized if leave_one_out or pool == math.inf else torch.zeros_like(realized)
    # The difference of two large sums may be a rounding error below 0, which the ε could not make positive.
    total = own_share[cell] * (group.energy[cell] - own).clamp_min(0.0) + (pool_share * others.energy)[cell]
    weighted = own_share[cell] * (group.weighted[cell] - own * to_go) + (pool_share * others.weighted)[cell]
    baseline = weighted / (total + _ENERGY_EPS)
    # `tail` decides only where other rows have ended; a row that began alone has baseline 0.
    lone = to_go if tail == "own" else torch.zeros_like(to_go)
    baseline = torch.where((group.alive + others.alive < 2)[cell], lone, baseline)
    size = (rows.lengths > 0).sum().expand_as(cells.size) if pool else cells.size
    return torch.where((size < 2)[cell], 0.0, baseline)


def _sums(rows: Rows, cells: Cells, realized: Tensor, to_go: Tensor, tail: Tail, pool: float) -> tuple[_Sums, _Sums]:
    """Sum over each cell's rows, and over rows of the other groups at its t; without a ``pool`` these sums are 0."""
    group = [cells.sum(terms) for terms in (realized, realized * to_go, torch.ones_like(realized))]
    ends: list[Tensor] = []
    if tail == "carry":
        present = rows.lengths > 0
        # A finished row stays with the energy of its last token and the return from its first.
        last_energy = realized[rows.starts[1:][present] - 1]
        ends = [last_energy, last_energy * to_go[rows.starts[:-1][present]], torch.ones_like(last_energy)]
        group = [terms + cells.carried(end) for terms, end in zip(group, ends, strict=True)]
    others = [cells.elsewhere(terms) if pool else torch.zeros_like(terms) for terms in group]
    if pool and ends:
        others = [terms + cells.ended(end) for terms, end in zip(others, ends, strict=True)]
    return _Sums(*group), _Sums(*others)


def _like(values: Tensor, rewards: Tensor) -> Tensor:
    return values.to(torch.promote_types(rewards.dtype, torch.float32))
