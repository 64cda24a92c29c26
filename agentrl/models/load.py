"""Load a model that can be trained here, and copy it for an engine."""

import copy
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from agentrl.errors import UsageError, first_line
from agentrl.models.attention import NAME, BucketedRows
from agentrl.models.linear import use_fast_linear
from agentrl.models.logits import logits_of
from agentrl.models.lora import base_of, load_adapters, merge
from agentrl.models.norm import use_fast_norms
from agentrl.models.slices import Slices, not_finite, path_of

ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest error of a log-prob that rounding explains, by the type of computation, in nats.

Seen on a CPU, the standard deviation over 2,048 tokens or more and the largest: float32 4.5e-7 and 4.5e-6 with the
quickstart's model, 3.5e-6 and 1.7e-5 with 8 layers of width 512; bfloat16 0.0044 and 0.038, 0.0081 and 0.047, and with
LoRA adapters, which the engine has merged into rounded weights, 0.015 and 0.17 (docs/precision_and_memory.md).
"""
_ALIGNED = 64
"""Bytes, at multiples of which PyTorch allocates."""


def quiet() -> None:
    """Silence the progress bars and notes of transformers, which would interrupt ours."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def load_model(path: str | Path, *, device: str = "cpu") -> PreTrainedModel:
    """Load a causal language model, its weights in float32, from a folder or by its name on the Hugging Face hub.

    A folder of LoRA adapters gives the model that they belong to with the adapters added to its weights.

    Raises:
        UsageError: there is no model at ``path``, its weights are not finite, or it can't be trained here.
    """
    if (base := base_of(path)) is not None:
        if base_of(base) is not None:
            raise UsageError(f"the adapters in {str(path)!r} belong to {base!r}, which holds adapters and no model")
        model = load_model(base, device=device)
        load_adapters(model, Path(path))
        merge(model)
        return model
    try:
        AutoConfig.from_pretrained(path)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=NAME)
    except Exception as error:  # transformers raises many types of errors for files that are not its own
        raise UsageError(f"no model can be loaded from {str(path)!r}: {first_line(error)}") from error
    if broken := next((name for name, weights in model.named_parameters() if not weights.isfinite().all()), ""):
        raise UsageError(not_finite(broken, path))
    model = model.to(device)
    # Weights of a file begin where its header ends. MKL sums in another order where memory is not aligned, and a
    # resumed run must compute the same bits as one that was never stopped.
    for weights in model.parameters():
        if weights.data_ptr() % _ALIGNED:
            weights.data = weights.data.clone()
    use_fast_linear(model)
    use_fast_norms(model)
    _check_rows(model)
    return model


def load_skeleton(path: str | Path) -> tuple[PreTrainedModel | None, str]:
    """Make a model without its weights, of which several ranks then read a share each.

    Returns:
        The model, whose weights have no memory; or None, and why its files can't be read by shares.
    """
    if base_of(path) is not None:
        return None, "has adapters to be merged"
    from accelerate import init_empty_weights

    try:
        config = AutoConfig.from_pretrained(path)
        # Buffers, such as the frequencies of the positions, are computed: files do not hold them.
        with init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=NAME)
        model.tie_weights()
        slices = Slices(path)
    except Exception as error:  # as in load_model, which says what is wrong where it can't load the model either
        return None, f"has no safetensors files that can be read here ({first_line(error)})"
    if why := slices.misfit(model):
        return None, why
    with suppress(OSError):  # most models have none
        model.generation_config = GenerationConfig.from_pretrained(path)
    use_fast_linear(model)
    use_fast_norms(model)
    # Absolute, since other ranks may run in another folder.
    model.agentrl_path = str(Path(path).resolve() if Path(path).exists() else path)
    return model.eval(), ""


def empty_copy(model: PreTrainedModel, device: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Copy a model with weights of no particular value, on the device ``meta`` without memory."""

    def empty(weight: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(torch.empty_like(weight, device=device, dtype=dtype), requires_grad=weight.requires_grad)

    memo: dict[int, Any] = {id(weight): empty(weight) for weight in model.parameters()}
    memo |= {id(buffer): buffer.to("cpu" if device == "meta" else device) for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


@torch.no_grad()
def _check_rows(model: Any) -> None:
    """Refuse a model that packed rows or the scoring head can't compute.

    A model with a state from token to token, as Mamba's, would carry the state from row to row. A model that changes
    its logits in its own way would be scored under another distribution.
    """
    tokens = torch.arange(2, device=model.device).repeat(2)
    # The plan by PyTorch, so that loading a model compiles no C code.
    plan = BucketedRows(torch.tensor([0, 2, 4], device=model.device), torch.arange(4, device=model.device))
    options = {"input_ids": tokens[None], "position_ids": tokens[None], "use_cache": False, "agentrl_plan": plan}
    name = type(model).__name__
    hidden = model.base_model(**options).last_hidden_state
    off, far = (1e-3, 1e-2) if model.dtype == torch.float32 else (0.05, 0.1)
    # The same two tokens in two rows: only a state that crosses the rows makes them differ.
    if not torch.allclose(hidden[0, :2], hidden[0, 2:], atol=off, rtol=off):
        raise UsageError(f"{name} carries a state from one token to the next beside attention, which agentrl can't do")
    if not torch.allclose(model(**options).logits.float(), logits_of(model, hidden).float(), atol=far, rtol=far):
        raise UsageError(f"{name} changes its logits in a way of its own, which agentrl can't do")


def make_repeatable(repeatable: bool) -> None:
    """Have this process use repeatable kernels only, or any; PyTorch warns where there is no repeatable one."""
    if repeatable:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(repeatable, warn_only=True)


def cast_copy(model: PreTrainedModel, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Copy a model with its weights in ``dtype``, as an engine needs it.

    Buffers, such as the frequencies of the positions, keep their precision. The weights of a skeleton are read, onto
    ``device``.

    Raises:
        UsageError: weights that are read are not finite, or the model can't be trained here.
    """
    if path := path_of(model):
        copied = empty_copy(model, device, dtype)
        Slices(path).fill_model(copied)
        _check_rows(copied)
        copied.config.dtype = dtype
        return copied
    copied = copy.deepcopy(model)
    for weights in copied.parameters():
        weights.data = weights.data.to(dtype)
    copied.config.dtype = dtype
    return copied
