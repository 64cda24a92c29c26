"""Tensors on disk as the ranks hold them: a safetensors file for each rank, and any number of ranks can read them.

Each file has some rows of every tensor, in the order of the ranks: end to end they are the complete tensor. Scalars are
in all files. torch.distributed.checkpoint is not used: in torch 2.13 it writes the same tensors in other bytes each
time, and reads zeros where a rank's file is missing.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from agentrl.models.slices import first_row, local, rank_and_world
from agentrl.runs.files import replace, sync

_FILE = 2**30
"""Bytes of a file of weights, at most, unless one weight alone has more: a rank holds as much when it writes."""


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's rows of tensors into a folder that all ranks see; all of them call this.

    Raises:
        OSError, SafetensorError: the disk does not take them.
    """
    write_file(folder / shard_name(*rank_and_world()), {name: local(tensor) for name, tensor in tensors.items()})


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's own file.

    Raises:
        OSError, SafetensorError: the disk does not take it.
    """
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    # Each rank syncs its own file, since others may be unable to sync files of another machine.
    sync(path)


def plan_files(folder: Path, tensors: Mapping[str, Tensor], world: int) -> list[tuple[Path, list[str]]]:
    """Divide a model's tensors into complete ones per file, as Hugging Face does, and write the index of the files.

    Args:
        folder: of the model.
        tensors: those of the model; only their shapes matter.
        world: number of ranks, each of which is to write a file at least.
    """
    shapes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    total = sum(tensor.nbytes for tensor in shapes.values())
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=min(_FILE, -(-total // world)))
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    replace(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2, sort_keys=True).encode())
    return [(folder / name, names) for name, names in split.filename_to_tensors.items()]


class Shards:
    """The shards that all ranks have written into a folder; their number then may differ from that now.

    Raises:
        ValueError: files are missing, or do not belong together.
        OSError, SafetensorError: a file can't be read, or is no safetensors file.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("*.safetensors"))
        if not paths or [path.name for path in paths] != [shard_name(rank, len(paths)) for rank in range(len(paths))]:
            raise ValueError(f"{folder} lacks files")
        self._files: list[Any] = [safe_open(path, "pt") for path in paths]
        self.names: list[str] = sorted(self._files[0].keys())

    @torch.no_grad()
    def fill(self, name: str, tensor: Tensor) -> None:
        """Read this rank's rows of a tensor; no others are read.

        Raises:
            ValueError: the saved tensor has another shape.
        """
        if not tensor.ndim:
            tensor.copy_(self._files[0].get_tensor(name))
            return
        parts = [file.get_slice(name) for file in self._files]
        shapes = [part.get_shape() for part in parts]
        if {(sum(shape[0] for shape in shapes), *shape[1:]) for shape in shapes} != {(*tensor.shape,)}:
            raise ValueError(f"{name} has another shape than {[*tensor.shape]}")
        own, offset, begin = local(tensor), first_row(tensor), 0
        for part, shape in zip(parts, shapes, strict=True):
            # Both row ranges are of the complete tensor: copy where this file's overlaps this rank's.
            low, high = max(begin, offset), min(begin + shape[0], offset + len(own))
            if low < high:
                own[low - offset : high - offset] = part[low - begin : high - begin].to(own.device)
            begin += shape[0]


def shard_name(rank: int, world: int) -> str:
    """Name the file of a rank."""
    return f"{rank + 1:05d}-of-{world:05d}.safetensors"
