"""The Triton form of the scoring head, in a process of its own: Triton reads how it is to run when it is imported."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from agentrl.algos.head import token_stats

from ..conftest import python
from .scoring import inputs

CHECKS = Path(__file__).with_name("check_kernels.py")


def check(**env: str) -> None:
    """Run the checks and show what failed."""
    assert " passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS), **env).stdout


@pytest.fixture
def triton(require):
    require(find_spec("triton") is not None, "needs the triton package")


@pytest.mark.ci
@pytest.mark.slow
def test_kernels_on_the_interpreter(triton):
    check(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")


@pytest.mark.gpu
def test_kernels_on_a_gpu(triton, require):
    require(torch.cuda.is_available(), "needs a CUDA device")
    check(TRITON_INTERPRET="0")


@pytest.mark.gpu
def test_on_a_gpu_the_form_is_triton(triton, require):
    require(torch.cuda.is_available(), "needs a CUDA device")
    hidden, weight, targets = (tensor.cuda() for tensor in inputs(50, 300, 16, dtype=torch.bfloat16))
    auto, triton_form = (token_stats(hidden, weight, targets, form=form) for form in ("auto", "triton"))
    assert all(torch.equal(left, right) for left, right in zip(auto, triton_form, strict=True))
    for left, right in zip(auto, token_stats(hidden, weight, targets, form="torch"), strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=0)


def test_triton_wants_a_gpu(triton, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a GPU, and hidden is on cpu: pass form='torch'"):
        token_stats(*inputs(2, 5, 3), form="triton")


ONES = {"walk_span": ("hidden_step", "weight_step"), "add_tile": ("left_step", "right_step")}
POINTERS = dict.fromkeys(("hidden", "weight", "bias", "block", "left", "right"), "*bf16") | {
    "targets": "*i64",
    **dict.fromkeys(("partial", "coefficients", "total"), "*fp32"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.ci) for name in ("walk_span", "gradient_tile")), "add_tile"]
)
def test_kernels_compile_for_a_gpu_that_is_not_here(triton, monkeypatch, tmp_path, name):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from agentrl.algos import kernels, launch

    kernel, tile = getattr(kernels, name), launch._TILES[torch.bfloat16][0]
    fixed = launch._shape(tile, torch.bfloat16) | dict.fromkeys(ONES.get(name, ONES["walk_span"]), 1)
    fixed |= {"HAS_CAP": True, "HAS_BIAS": True}
    types = {"cap": "fp32", "coldness": "fp32"} | POINTERS | dict.fromkeys(fixed, "constexpr")
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    # What a launch finds out by itself: rows begin at multiples of 16 bytes.
    wide = {(index,): [["tt.divisibility", 16]] for index, kind in enumerate(signature.values()) if kind != "constexpr"}
    source = ASTSource(kernel, signature, {name: fixed[name] for name in signature if name in fixed}, wide)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma" in made.asm["ptx"], "products go to the matrix units"
    assert made.metadata.shared <= tile.shared_memory(2) <= 227 * 1024, "what an H100 lends to a program"
