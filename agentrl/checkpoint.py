"""Checkpoints: written beside, synced, then renamed, so that a kill at any instant leaves the last whole one.

Seeds derive from the run's seed and the step, so weights, optimizer and step number are all that a run goes on from.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.errors import RunFolderError

_STATE = "trainer.json"
_OPTIMIZER = "optimizer.pt"


def save_checkpoint(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    state: dict[str, object],
) -> None:
    """Write a checkpoint that ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` load.

    Args:
        path: the checkpoint's folder; one that is there already is left as it is.
        model: its weights, as safetensors.
        tokenizer: with its chat template.
        optimizer: its state, for going on.
        state: plain data, such as the step.
    """
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    if optimizer is not None:
        torch.save(optimizer.state_dict(), temporary / _OPTIMIZER)
    (temporary / _STATE).write_text(json.dumps(state), encoding="utf-8")
    for file in temporary.iterdir():
        _sync(file)
    _sync(temporary)
    temporary.rename(path)
    _sync(path.parent)


def load_state(path: Path) -> dict[str, Any]:
    """The plain data of a checkpoint.

    Raises:
        RunFolderError: ``path`` is no checkpoint of a run.
    """
    try:
        return json.loads((path / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{str(path)!r} is no checkpoint of a run: {error}") from error


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """Take over the optimizer's state of a checkpoint, if it has one."""
    if (path / _OPTIMIZER).exists():
        optimizer.load_state_dict(torch.load(path / _OPTIMIZER, weights_only=True))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
