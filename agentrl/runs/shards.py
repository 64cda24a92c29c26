"""Tensors on disk as the ranks hold them: a safetensors file for each rank, and any number of ranks can read them.

Each file has some rows of every tensor, in the order of the ranks: end to end they are the complete tensor. Scalars are
in all files. torch.distributed.checkpoint is not used: in torch 2.13 it writes the same tensors in other bytes each
time, and reads zeros where a rank's file is missing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentrl.runs.files import sync


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's rows of tensors into a folder that all ranks see; all of them call this.

    Raises:
        OSError, SafetensorError: the disk does not take them.
    """
    path = folder / shard_name(*_rank_and_world())
    save_file({name: _local(tensor).contiguous() for name, tensor in tensors.items()}, path)
    # Each rank syncs its own file, since others may be unable to sync files of another machine.
    sync(path)


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
        local, offset, begin = _local(tensor), _first_row(tensor), 0
        for part, shape in zip(parts, shapes, strict=True):
            # Both row ranges are of the complete tensor: copy where this file's overlaps this rank's.
            low, high = max(begin, offset), min(begin + shape[0], offset + len(local))
            if low < high:
                local[low - offset : high - offset] = part[low - begin : high - begin].to(local.device)
            begin += shape[0]


def shard_name(rank: int, world: int) -> str:
    """Name the file of a rank."""
    return f"{rank + 1:05d}-of-{world:05d}.safetensors"


def _rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _first_row(tensor: Tensor) -> int:
    """Compute this rank's first row: FSDP2 splits as ``torch.chunk`` does."""
    if not isinstance(tensor, DTensor):
        return 0
    rank, world = _rank_and_world()
    return min(len(tensor), rank * -(-len(tensor) // world))


def _local(tensor: Tensor) -> Tensor:
    detached: Any = tensor.detach()
    return detached.to_local() if isinstance(tensor, DTensor) else detached
