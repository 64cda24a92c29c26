"""Score a batch: run the model over it and compute the statistics of its sampled tokens.

The forward pass stops at the last hidden state, and only the positions that predict a sampled token meet the
vocabulary: prompt, template and tool tokens have no logits, so they can have no gradient there.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from agentrl.algos.head import TokenStats, token_stats
from agentrl.batch import Batch
from agentrl.models.attention import PackedRows
from agentrl.models.logits import logit_divisor, softcap_of
from agentrl.segments import shared_length

_T = TypeVar("_T")


def hidden_states(model: PreTrainedModel, batch: Batch, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute the hidden states that predict the batch's sampled tokens [S, d], in ``dtype``.

    Tokens that rows share up to where they fork, such as a group's prompt, are computed once.

    Args:
        model: loaded by ``load_model``.
        batch: rows of any number.
        dtype: of the computation.
    """
    computed, source, rows = _once(batch)
    options: dict[str, Any] = {
        "input_ids": batch.tokens[computed][None],
        "position_ids": batch.positions[computed][None],
        "use_cache": False,
        "agentrl_plan": rows,
    }
    out: Any = computing_in(dtype, model, lambda: model.base_model(**options))
    # The hidden state before a token predicts it. Before a row's first sampled token it is the hidden state of the
    # prompt's last token, which may have been computed in another row.
    return out.last_hidden_state[0].index_select(0, source[batch.sampled - 1])


def computing_in(dtype: torch.dtype, model: PreTrainedModel, work: Callable[[], _T]) -> _T:
    """Do ``work`` while all weights but the head's are in ``dtype``, and return its result.

    Gradients pass through the cast, to the float32 weights that the optimizer moves. ``work`` must include a backward
    pass that computes activations again.
    """
    if dtype == model.dtype:
        return work()
    weights = {f"model.{name}": weight.to(dtype) for name, weight in model.base_model.named_parameters()}
    return functional_call(_Work(model.base_model), weights, (work,))


class _Work(nn.Module):
    """A module around a model, with which ``functional_call`` replaces the model's weights during any work."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], _T]) -> _T:
        return work()


def _once(batch: Batch) -> tuple[Tensor, Tensor, PackedRows]:
    """Deduplicate the tokens that rows have in common up to where they fork: the model computes each of them once.

    A row that another one begins with takes no part of its own: the longer row computes it.

    Returns:
        The positions in T that the model computes [C], for each position the index in C of the computed one [T], and
        the rows that attend.
    """
    starts, device = batch.row_starts.tolist(), batch.tokens.device
    twin, forks = torch.arange(starts[-1]), _forks(batch)
    for before, row, shared in forks:
        twin[starts[row] :][:shared] = twin[starts[before] :][:shared]
    lengths = [end - begin for begin, end in pairwise(starts)]
    contained = {before for before, row, shared in forks if before != row and shared == lengths[before]}
    attending = [row for row in range(len(lengths)) if row not in contained]
    # Of equal positions the first one of an attending row stands for all. So a row's own tokens come after those that
    # it shares.
    position = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in attending])
    rank = torch.full_like(twin, len(twin)).scatter_reduce_(0, twin[position], torch.arange(len(position)), "amin")[
        twin
    ]
    computed, source = rank.unique(return_inverse=True)
    row_starts = torch.tensor([0, *accumulate(lengths[row] for row in attending)])
    rows = PackedRows(row_starts.to(device), source[position].to(device))
    return position[computed].to(device), source.to(device), rows


def _forks(batch: Batch) -> list[tuple[int, int, int]]:
    """Return the rows in sorted order, each as (row before it, row, number of tokens that the two share).

    In this order, no row before a row has more in common with it than the row right before it. The first row comes
    after itself and shares none.
    """
    rows = [part.tolist() for part in batch.tokens.split(batch.row_starts.diff().tolist())]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    forks = [(before, row, shared_length(rows[before], rows[row])) for before, row in pairwise(order)]
    return [(order[0], order[0], 0), *forks]


def new_tokens(batch: Batch) -> list[tuple[int, int]]:
    """Return for each row, in some order, the number of its first tokens that other rows have too, and its length."""
    lengths = batch.row_starts.diff().tolist()
    return [(shared, lengths[row]) for _, row, shared in _forks(batch)]


def score(
    model: PreTrainedModel, batch: Batch, *, temperature: float, dtype: torch.dtype = torch.float32
) -> TokenStats:
    """Compute log-prob, entropy and Σπ² of every sampled token, under the distribution it was sampled from.

    Args:
        model: loaded by :func:`load_model`.
        batch: rows of any number [T tokens, S of them sampled].
        temperature: the sampling temperature.
        dtype: of the computation; sums of the head are in float32 whatever it is.

    Returns:
        Three float32 tensors [S]; log-prob and entropy carry gradients where grad mode is on.
    """
    head: Any = model.get_output_embeddings()
    hidden = hidden_states(model, batch, dtype=dtype)
    # The head divides logits by one number: the temperature times the scale that the model itself divides by.
    return token_stats(
        hidden, head.weight.to(dtype), batch.tokens[batch.sampled],
        temperature=temperature * logit_divisor(model), bias=None if head.bias is None else head.bias.to(dtype),
        softcap=softcap_of(model),
    )  # fmt: skip
