"""Score a batch: run the model over it and give the statistics of its sampled tokens.

The forward pass stops at the last hidden state, and only the positions that predict a sampled token meet the
vocabulary: prompt, template and tool tokens have no logits, so they can have no gradient there.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from agentrl.algos.head import TokenStats, token_stats
from agentrl.batch import Batch
from agentrl.models.attention import AttentionPlan, PackedRows
from agentrl.models.logits import logit_divisor, softcap_of
from agentrl.models.ulysses import TokenShare

_T = TypeVar("_T")


def hidden_states(
    model: PreTrainedModel, batch: Batch, *, dtype: torch.dtype = torch.float32, share: TokenShare | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the hidden states that predict the batch's sampled tokens, in ``dtype``.

    What rows share up to where they fork, such as a group's prompt, is computed once.

    Args:
        model: loaded by ``load_model``.
        batch: rows of any number.
        dtype: of the computation.
        share: the tokens are shared with other ranks, all of which call this.

    Returns:
        Which sampled tokens this rank has, all of them without a ``share`` [S], and their hidden states [S, d].
    """
    computed, source = _once(batch)
    rows: AttentionPlan = PackedRows(batch.row_starts, source)
    # The hidden state before a token predicts it. That of a row's first sampled token is the last of the prompt, which
    # may have been computed in another row.
    places, first_computed = source[batch.sampled - 1], 0
    if share is not None:
        rows = share.plan(rows, len(computed))
        computed, first_computed = share.part(computed)
    own = torch.nonzero((places >= first_computed) & (places < first_computed + len(computed)))[:, 0]
    options: dict[str, Any] = {
        "input_ids": batch.tokens[computed][None],
        "position_ids": batch.positions[computed][None],
        "use_cache": False,
        "agentrl_plan": rows,
    }
    out: Any = computing_in(dtype, model, lambda: model.base_model(**options))
    return own, out.last_hidden_state[0].index_select(0, places[own] - first_computed)


def computing_in(dtype: torch.dtype, model: PreTrainedModel, work: Callable[[], _T]) -> _T:
    """Do ``work`` while the weights of all but the head are in ``dtype``; give its result.

    Gradients pass through the cast, to the float32 weights that the optimizer moves. A backward pass that computes
    activations again belongs into ``work`` too.
    """
    if dtype == model.dtype:
        return work()
    weights = {f"model.{name}": weight.to(dtype) for name, weight in model.base_model.named_parameters()}
    return functional_call(_Work(model.base_model), weights, (work,))


class _Work(nn.Module):
    """Lets ``functional_call`` replace a model's weights during any work, not only the model's own forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], _T]) -> _T:
        return work()


def _once(batch: Batch) -> tuple[Tensor, Tensor]:
    """Deduplicate what rows have in common up to where they fork: the model then computes each such token once.

    Returns:
        The places in T that the model computes [C], and for each place the index in C of the one that stands for it
        [T].
    """
    starts, device = batch.row_starts.tolist(), batch.tokens.device
    twin = torch.arange(starts[-1])
    for before, row, shared in _forks(batch):
        twin[starts[row] :][:shared] = twin[starts[before] :][:shared]
    # The first of equal positions stands for all: so a row's own tokens come after those that it shares.
    position = torch.arange(len(twin))
    representative = (
        torch.full_like(position, len(position)).scatter_reduce_(0, twin, position, "amin")[twin].to(device)
    )
    is_first = representative == position.to(device)
    return torch.nonzero(is_first)[:, 0], (is_first.cumsum(0) - 1)[representative]


def _forks(batch: Batch) -> list[tuple[int, int, int]]:
    """Give the rows in sorted order, each after the row before it and with the number of tokens that they share.

    The first comes after itself and shares none. Of all rows before a row the one right before it has most in common.
    """
    rows = [part.tolist() for part in batch.tokens.split(batch.row_starts.diff().tolist())]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    forks = [(order[0], order[0], 0)]
    for before, row in pairwise(order):
        pairs = zip(rows[before], rows[row], strict=False)
        shared = next((position for position, (left, right) in enumerate(pairs) if left != right), len(rows[before]))
        forks.append((before, row, shared))
    return forks


def new_tokens(batch: Batch) -> list[tuple[int, int]]:
    """Give, for each row in some order, how many tokens it begins with that others had before it, and its length."""
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
    return score_share(model, batch, temperature=temperature, dtype=dtype)[1]


def score_share(
    model: PreTrainedModel, batch: Batch, *, temperature: float, dtype: torch.dtype, share: TokenShare | None = None
) -> tuple[Tensor, TokenStats]:
    """Do what :func:`score` does for the sampled tokens that this rank has of a ``share``, and say which they are."""
    head: Any = model.get_output_embeddings()
    own, hidden = hidden_states(model, batch, dtype=dtype, share=share)
    # The head divides logits by one number: the temperature times the scale that the model itself divides by.
    return own, token_stats(
        hidden, head.weight.to(dtype), batch.tokens[batch.sampled[own]],
        temperature=temperature * logit_divisor(model), bias=None if head.bias is None else head.bias.to(dtype),
        softcap=softcap_of(model),
    )  # fmt: skip
