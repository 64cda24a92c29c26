"""Weights in safetensors files, of which a process reads only the rows that it keeps."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from agentrl.errors import UsageError


class Slices:
    """The weights of a model in Hugging Face's layout.

    Args:
        path: a folder, or the model's name on the Hugging Face hub.

    Raises:
        OSError: it has no safetensors files.
        ValueError, SafetensorError: they are damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._files: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in _files(self._path):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # it can't be iterated over
                    self._files[name], self._shapes[name] = file, tuple(opened.get_slice(name).get_shape())

    def misfit(self, model: PreTrainedModel) -> str:
        """Return why a model's weights can't be read row by row, in words that follow its name; empty if they can."""
        if is_converted(model) or getattr(model.config, "quantization_config", None):
            return "has weights that transformers converts as it loads them"
        # Of tied weights the files need to hold the earliest only.
        names = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
        if lacking := sorted(names.values() - self._files.keys()):
            return f"has no {lacking[0]} in its files"
        other = (name for name, tensor in self._of(model).items() if self._shapes[name] != tuple(tensor.shape))
        return next((f"has another {name} in its files than config.json describes" for name in other), "")

    def rows(self, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        """Read some rows of a tensor, all by default; those of a scalar are the scalar."""
        # The pages of a file count as this process's memory while it is open.
        with safe_open(self._files[name], "pt") as opened:
            return opened.get_slice(name)[begin:end] if self._shapes[name] else opened.get_tensor(name)

    def fill_model(self, model: nn.Module) -> None:
        """Set a model's weights and buffers, or this rank's rows of them; adapters stay as they are.

        Raises:
            UsageError: a weight is not finite, or the files hold different weights for two that are tied.
        """
        self.fill(self._of(model))

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Set tensors, or this rank's rows of them, by their names in the files; see ``fill_model``."""
        filled = dict[int, str]()
        for name, tensor in tensors.items():
            own, begin = local(tensor), first_row(tensor)
            values = self.rows(name, begin, begin + len(own) if own.ndim else None)
            if not values.isfinite().all():
                raise UsageError(not_finite(name, self._path))
            if tied := filled.get(id(tensor)):
                if not torch.equal(own, values.to(own)):
                    raise UsageError(
                        f"{self._path!r} ties {name} to {tied}, and holds other weights for it: set "
                        "tie_word_embeddings=false in its config.json"
                    )
            else:
                own.copy_(values)
                filled[id(tensor)] = name

    def _of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a model's tensors by their names in the files, under which a layer with adapters has none."""
        named = ((saved_name(name), tensor) for name, tensor in model.state_dict(keep_vars=True).items())
        return {name: tensor for name, tensor in named if name in self._files}


def path_of(model: nn.Module) -> str:
    """Return where the weights lie of a model that was made without them; empty for any other."""
    path: Any = getattr(model, "agentrl_path", "")
    return path


def saved_name(name: str) -> str:
    """Return the name in a model's files of a weight that may lie beside adapters."""
    return name.replace(".base_layer.", ".")


def is_converted(model: PreTrainedModel) -> bool:
    """Return True if the model's files hold other tensors than the model, which transformers makes these of."""
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def not_finite(name: str, path: str | Path) -> str:
    """Return the error of a weight that holds NaN or infinity."""
    return (
        f"the weights {name} of {str(path)!r} hold NaN or infinity: they are damaged, or training has diverged; "
        "take an earlier checkpoint, or another model"
    )


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def first_row(tensor: Tensor) -> int:
    """Return this rank's first row of a tensor: FSDP2 splits as ``torch.chunk`` does."""
    if not isinstance(tensor, DTensor):
        return 0
    rank, world = rank_and_world()
    return min(len(tensor), rank * -(-len(tensor) // world))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor."""
    detached: Any = tensor.detach()
    return detached.to_local() if isinstance(tensor, DTensor) else detached


def _files(path: str) -> list[str]:
    """Locate a model's files, as transformers does; those of the hub are downloaded."""
    try:
        return [str(cached_file(path, SAFE_WEIGHTS_NAME))]
    except OSError:
        index = json.loads(Path(str(cached_file(path, SAFE_WEIGHTS_INDEX_NAME))).read_text(encoding="utf-8"))
        return [str(cached_file(path, name)) for name in sorted(set(index["weight_map"].values()))]
