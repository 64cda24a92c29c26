"""From one loss per token to one number, for a minibatch or for its packs one after the other.

Shapes: ``S`` sampled tokens of all rows end to end, ``R`` rows, ``starts`` [R+1] the offset of each row.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from agentrl.algos.rows import Rows
from agentrl.errors import ConfigError, UnknownNameError

Aggregate = Literal["seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "token_sum_const"]

AGGREGATES: tuple[Aggregate, ...] = get_args(Aggregate)


def coefficients(aggregate: Aggregate, rows: Rows, max_tokens: int | None) -> Tensor:
    """Compute the factor of each token's loss in the aggregated loss [S], float64.

    ``N`` below is the number of rows with a sampled token and ``n`` the row's sampled tokens:
    ``seq_mean_token_mean``: 1/(N·n); ``token_mean``: 1/S; ``seq_mean_token_sum``: 1/N;
    ``token_sum_const``: 1/(N·max_tokens).

    Args:
        aggregate: How to aggregate.
        rows: The rows of the tokens.
        max_tokens: The constant length that ``token_sum_const`` divides by; the others take none.

    Returns:
        One factor per token [S].

    Raises:
        UnknownNameError: an aggregation that does not exist.
        ConfigError: ``max_tokens`` is missing or not positive.
    """
    size = _size(aggregate, rows)
    divisor = torch.where(size > 0, size, 1.0)
    if aggregate == "seq_mean_token_mean":
        # Rows without a token divide by 0 here, but no token indexes them.
        return (1.0 / (divisor * rows.lengths))[rows.row]
    factor = 1.0 / divisor
    if aggregate == "token_sum_const":
        if max_tokens is None or max_tokens < 1:
            raise ConfigError("aggregate token_sum_const needs max_tokens, the sampled tokens an episode may have")
        factor = factor / max_tokens
    return factor.expand(rows.row.numel())


def pack_shares(aggregate: Aggregate, packs: Sequence[Tensor]) -> list[float]:
    """Compute the share of each pack, so that Σ share·loss(pack) is the loss of the minibatch.

    Args:
        aggregate: How each pack's loss is aggregated.
        packs: The row offsets ``starts`` [R+1] of each pack of the minibatch.

    Returns:
        One share per pack; they sum to 1, or are all 0 where no pack has a sampled token.

    Raises:
        UnknownNameError: an aggregation that does not exist.
        ValueError: a pack's ``starts`` are no offsets.

    Example:
        >>> pack_shares("token_mean", [torch.tensor([0, 3]), torch.tensor([0, 0, 1])])
        [0.75, 0.25]
    """
    sizes: list[float] = []
    for starts in packs:
        rows = Rows.of(starts, torch.empty(int(starts[-1]), device=starts.device))
        sizes.append(float(_size(aggregate, rows)))
    # A pack's loss divides by the pack's size; times its share, it divides by the minibatch's.
    total = sum(sizes)
    return [size / total if total else 0.0 for size in sizes]


def _size(aggregate: Aggregate, rows: Rows) -> Tensor:
    """Sum the aggregation's divisor, which adds up over packs: tokens, or rows with a sampled token [], float64."""
    if aggregate not in AGGREGATES:
        raise UnknownNameError("aggregation", aggregate, AGGREGATES)
    lengths = rows.lengths.double()
    if aggregate == "token_mean":
        return lengths.sum()
    return (lengths > 0).double().sum()
