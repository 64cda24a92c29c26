"""The model as the trainer sees it: a batch in, statistics of its sampled tokens out.

The forward pass stops at the last hidden state, and only the positions that predict a sampled token meet the
vocabulary: prompt, template and tool tokens have no logits, so they can have no gradient there.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentrl.algos.head import TokenStats, token_stats
from agentrl.attention import NAME, PackedRows
from agentrl.batch import Batch
from agentrl.errors import UsageError
from agentrl.linear import use_fast_linear
from agentrl.logits import logit_divisor, logits_of, softcap_of


def load_model(path: str | Path, *, device: str = "cpu") -> PreTrainedModel:
    """Load a causal language model, its weights in float32, from a folder or by its name on the Hugging Face hub.

    Raises:
        UsageError: there is no model at ``path``, its weights are not finite, or it can't be trained here.
    """
    try:
        AutoConfig.from_pretrained(path)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=NAME)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"no model can be loaded from {str(path)!r}: {str(error).splitlines()[0]}") from error
    if broken := next((name for name, weights in model.named_parameters() if not weights.isfinite().all()), ""):
        raise UsageError(
            f"the weights {broken} of {str(path)!r} hold NaN or infinity: they are damaged, or training has diverged; "
            "take an earlier checkpoint, or another model"
        )
    model = model.to(device)
    use_fast_linear(model)
    _check_rows(model)
    return model


@torch.no_grad()
def _check_rows(model: Any) -> None:
    """Refuse a model that does what packed rows or the scoring head can't do.

    One that carries a state from token to token, as Mamba does, would carry it from row to row; one that changes its
    logits in a way of its own would be scored under another distribution.
    """
    tokens = torch.arange(2, device=model.device).repeat(2)
    plan = PackedRows(torch.tensor([0, 2, 4], device=model.device))
    options = {"input_ids": tokens[None], "position_ids": tokens[None], "use_cache": False, "agentrl_plan": plan}
    name = type(model).__name__
    hidden = model.base_model(**options).last_hidden_state
    if not torch.allclose(hidden[0, :2], hidden[0, 2:], atol=1e-3, rtol=1e-3):
        raise UsageError(f"{name} carries a state from one token to the next beside attention, which agentrl can't do")
    if not torch.allclose(model(**options).logits.float(), logits_of(model, hidden), atol=1e-2, rtol=1e-2):
        raise UsageError(f"{name} changes its logits in a way of its own, which agentrl can't do")


def cast_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy of a model with its weights in ``dtype``, as an engine wants it.

    Buffers, such as the frequencies of the positions, keep their precision.
    """
    copied = copy.deepcopy(model)
    for weights in copied.parameters():
        weights.data = weights.data.to(dtype)
    copied.config.dtype = dtype
    return copied


def hidden_states(model: PreTrainedModel, batch: Batch, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The hidden states that predict the batch's sampled tokens [S, d], computed in ``dtype``.

    A prompt that rows share is computed once.
    """
    kept, source = _once(batch)
    options: dict[str, Any] = {
        "input_ids": batch.tokens[kept][None],
        "position_ids": batch.positions[kept][None],
        "use_cache": False,
        "agentrl_plan": PackedRows(batch.row_starts, source),
    }
    if dtype == model.dtype:
        out = model.base_model(**options)
    else:
        # Gradients pass through the cast, to the float32 weights that the optimizer moves.
        weights = {name: weight.to(dtype) for name, weight in model.base_model.named_parameters()}
        out: Any = functional_call(model.base_model, weights, kwargs=options)
    return out.last_hidden_state[0].index_select(0, source[batch.sampled - 1])


def _once(batch: Batch) -> tuple[Tensor, Tensor]:
    """The places whose tokens must be computed [C], and for every place the one among them that it shares [T].

    A row shares what comes before its first sampled token with the first row of its group, where the two are alike.
    """
    begins, place = batch.row_starts[:-1], torch.arange(len(batch.tokens), device=batch.tokens.device)
    row = torch.repeat_interleave(torch.arange(len(batch), device=place.device), batch.row_starts.diff())
    # A row without a sampled token shares nothing; it may be the last one, so there must be a place to look up.
    first = torch.cat([batch.sampled, batch.row_starts[-1:]])[batch.starts[:-1]] - begins
    prompt = torch.where(batch.starts.diff() > 0, first, 0)
    leader = (batch.group[:, None] == batch.group).int().argmax(1)
    alike = batch.positions < torch.minimum(prompt, prompt[leader])[row]
    twin = torch.where(alike, place + (begins[leader] - begins)[row], place)
    differ = torch.zeros_like(begins).index_add(0, row, (batch.tokens[twin] != batch.tokens).long())
    twin = torch.where(differ[row] > 0, place, twin)
    kept = twin == place
    return place[kept], (kept.cumsum(0) - 1)[twin]


def score(
    model: PreTrainedModel, batch: Batch, *, temperature: float, dtype: torch.dtype = torch.float32
) -> TokenStats:
    """Log-prob, entropy and Σπ² of every sampled token, under the distribution it was sampled from.

    Args:
        model: loaded by :func:`load_model`.
        batch: rows of any number [T tokens, S of them sampled].
        temperature: the sampling temperature.
        dtype: of the computation; sums of the head are in float32 whatever it is.

    Returns:
        Three float32 tensors [S]; log-prob and entropy carry gradients where grad mode is on.
    """
    head: Any = model.get_output_embeddings()
    return token_stats(
        hidden_states(model, batch, dtype=dtype), head.weight.to(dtype), batch.tokens[batch.sampled],
        temperature=temperature * logit_divisor(model), bias=None if head.bias is None else head.bias.to(dtype),
        softcap=softcap_of(model),
    )  # fmt: skip
