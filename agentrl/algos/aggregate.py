"""From one loss per token to one number, for a whole minibatch or for its packs one after the other.

Shapes: ``S`` sampled tokens of all rows end to end, ``R`` rows, ``starts`` [R+1] the offset of each row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl.algos.rows import Rows
from agentrl.errors import ConfigError, UnknownNameError

Aggregate = Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "token_sum_const"]

AGGREGATES: tuple[Aggregate, ...] = ("seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "token_sum_const")


@dataclass(frozen=True, slots=True, kw_only=True)
class Carry:
    """What rows bring along that go on with an episode begun in earlier rows; 0 for a row that begins one.

    Example:
        An episode of 5 tokens, d = [.02, .045, −.01, .06, −.20], cut after the third::

            log_ratio = [0, .055]    tokens = [0, 3]    total = [5, 5]
    """

    log_ratio: Tensor
    """Cumulative log ratio at the end of the episode's earlier rows [R], in nats."""
    tokens: Tensor
    """Sampled tokens in the episode's earlier rows [R]."""
    total: Tensor | None = None
    """Sampled tokens of the whole episode [R], so that its rows share the place of one; None: each row is one."""

    def check(self, rows: Rows) -> None:
        """Insist that there is one number per row.

        Raises:
            ValueError: a tensor is not [R], is not finite or counts fewer tokens than there are.
        """
        for name, values in (("log_ratio", self.log_ratio), ("tokens", self.tokens), ("total", self.total)):
            if values is not None and (values.shape != rows.lengths.shape or not bool(values.isfinite().all())):
                raise ValueError(f"carry.{name} must be one finite number per row, [{rows.lengths.numel()}]")
        if bool((self.tokens < 0).any()):
            raise ValueError("carry.tokens must not be negative")
        if self.total is not None and bool((self.total.to(rows.starts) < self.tokens.to(rows.starts)).any()):
            raise ValueError("carry.total must count the earlier rows' tokens too")
        if self.total is not None and bool((self.total.to(rows.starts) < rows.lengths).any()):
            raise ValueError("carry.total must count the row's own tokens too")


def episode_ordinal(rows: Rows, carry: Carry | None = None) -> Tensor:
    """``t`` of each token within its episode [S], counted from 1 on through the rows that ``carry`` joins, int64.

    Args:
        rows: The rows of the tokens.
        carry: What rows bring along that go on with an episode of earlier rows.

    Returns:
        One ordinal per token [S].
    """
    return rows.ordinal if carry is None else rows.ordinal + carry.tokens.to(rows.starts)[rows.row]


def coefficients(aggregate: Aggregate, rows: Rows, max_tokens: int | None, carry: Carry | None = None) -> Tensor:
    """The factor of each token's loss in the aggregated loss [S], float64.

    ``N`` below is the number of rows with a sampled token and ``n`` the row's sampled tokens:
    ``seq_mean_token_mean``: 1/(N·n); ``token_mean``: 1/S; ``seq_mean_token_sum``: 1/N;
    ``token_sum_const``: 1/(N·max_tokens).

    Args:
        aggregate: How to aggregate.
        rows: The rows of the tokens.
        max_tokens: The constant length that ``token_sum_const`` divides by; the others take none.
        carry: Of rows that are parts of episodes; with its ``total``, n and N count whole episodes.

    Returns:
        One factor per token [S].

    Raises:
        UnknownNameError: an aggregation that does not exist.
        ConfigError: ``max_tokens`` is missing or not positive.
    """
    size = _size(aggregate, rows, carry)
    whole = torch.where(size > 0, size, 1.0)
    if aggregate == "seq_mean_token_mean":
        lengths = rows.lengths if carry is None or carry.total is None else carry.total.to(rows.starts)
        return (1.0 / (whole * lengths))[rows.row]
    factor = 1.0 / whole
    if aggregate == "token_sum_const":
        if max_tokens is None or max_tokens < 1:
            raise ConfigError("aggregate token_sum_const needs max_tokens, the sampled tokens an episode may have")
        factor = factor / max_tokens
    return factor.expand(rows.row.numel())


def pack_shares(
    aggregate: Aggregate, packs: Sequence[Tensor], carries: Sequence[Carry | None] | None = None
) -> list[float]:
    """What each pack's loss counts for, so that Σ share·loss(pack) is the loss of the whole minibatch.

    Args:
        aggregate: How each pack's loss is aggregated.
        packs: The row offsets ``starts`` [R+1] of each pack of the minibatch.
        carries: What each pack's rows carry in, if any.

    Returns:
        One share per pack; they sum to 1, or are all 0 where no pack has a sampled token.

    Raises:
        UnknownNameError: an aggregation that does not exist.
        ValueError: a pack's ``starts`` are no offsets, or there is not one carry per pack.

    Example:
        >>> pack_shares("token_mean", [torch.tensor([0, 3]), torch.tensor([0, 0, 1])])
        [0.75, 0.25]
    """
    sizes: list[float] = []
    for starts, carry in zip(packs, carries if carries is not None else [None] * len(packs), strict=True):
        rows = Rows.of(starts, torch.empty(int(starts[-1]), device=starts.device))
        sizes.append(float(_size(aggregate, rows, carry)))
    whole = sum(sizes)
    return [size / whole if whole else 0.0 for size in sizes]


def _size(aggregate: Aggregate, rows: Rows, carry: Carry | None) -> Tensor:
    """What the aggregation divides by and what adds up over packs: tokens, or rows with a sampled token [], float64."""
    if aggregate not in AGGREGATES:
        raise UnknownNameError("aggregation", aggregate, AGGREGATES)
    if carry is not None:
        carry.check(rows)
    lengths = rows.lengths.double()
    if aggregate == "token_mean":
        return lengths.sum()
    if carry is None or carry.total is None:
        return (lengths > 0).double().sum()
    return (lengths / carry.total.to(lengths).clamp_min(1)).sum()
