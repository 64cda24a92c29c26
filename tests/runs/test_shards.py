"""Files of several ranks: what does not belong together, or to these tensors, is refused. Ranks are tested in train."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.runs.shards import Shards, shard_name, write_shards

WHOLE = {"a": torch.arange(15.0).view(5, 3), "b": torch.arange(2.0), "step": torch.tensor(7.0)}
CUTS = {"a": (3, 2, 0), "b": (1, 1, 0)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three ranks' files: of five rows, of two, and of none."""
    parts = {name: WHOLE[name].split(sizes) for name, sizes in CUTS.items()}
    for rank in range(3):
        own = {name: parts[name][rank].contiguous() for name in CUTS} | {"step": WHOLE["step"]}
        save_file(own, tmp_path / shard_name(rank, 3))
    return tmp_path


def read(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    saved = Shards(folder)
    tensors = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        saved.fill(name, tensor)
    return tensors


SHAPES = {name: tuple(tensor.shape) for name, tensor in WHOLE.items()}


def test_rows_of_all_files_are_the_whole(folder: Path) -> None:
    assert Shards(folder).names == sorted(WHOLE)
    assert all(torch.equal(tensor, WHOLE[name]) for name, tensor in read(folder, SHAPES).items())


def test_the_same_tensors_are_the_same_bytes(tmp_path: Path) -> None:
    files: list[bytes] = []
    for number in range(5):
        (tmp_path / str(number)).mkdir()
        write_shards(tmp_path / str(number), WHOLE)
        files.append((tmp_path / str(number) / shard_name(0, 1)).read_bytes())
    assert len(set(files)) == 1
    assert all(torch.equal(tensor, WHOLE[name]) for name, tensor in read(tmp_path / "0", SHAPES).items())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / shard_name(0, 3)).unlink(), "lacks files"),
        (lambda folder: (folder / shard_name(2, 3)).unlink(), "lacks files"),
        (lambda folder: [file.unlink() for file in folder.iterdir()], "lacks files"),
        (shutil.rmtree, "lacks files"),
        (lambda folder: shutil.copy(folder / shard_name(0, 3), folder / shard_name(0, 1)), "lacks files"),
        (lambda folder: shutil.copy(folder / shard_name(0, 3), folder / shard_name(2, 3)), "a has another shape"),
        (lambda folder: save_file({"b": WHOLE["b"]}, folder / shard_name(1, 3)), "does not contain tensor"),
        (lambda folder: (folder / shard_name(1, 3)).write_bytes(b"PK"), "header"),
    ],
)
def test_files_that_do_not_belong_together(folder: Path, spoil: Callable[[Path], object], words: str) -> None:
    spoil(folder)
    with pytest.raises(Exception, match=words):
        read(folder, SHAPES)


@pytest.mark.parametrize("shape", [(6, 3), (4, 3), (5, 2), (5, 1), (5,), (5, 3, 1), ()])
def test_tensors_of_another_shape(folder: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        read(folder, {"a": shape})
