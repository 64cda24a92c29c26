"""The scoring head in Triton, for GPUs: float32 and bfloat16, sums always in float32.

Shapes: ``S`` sampled tokens, ``V`` vocabulary, ``d`` hidden size. The forward pass is one kernel: each program takes a
block of tokens through a span of the vocabulary, tile by tile, and the spans' sums are combined afterwards; so a few
tokens keep a GPU as busy as many. The backward pass recomputes one block of logits at a time and turns it into their
gradient at once, in the type of the factors. The block is all that is ever held of [S, V]. It is multiplied twice: for
the weights by the library, for the hidden states by a kernel that accumulates in float32.

The order of every sum is fixed: results are the same from run to run.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentrl.algos import kernels
from agentrl.algos.blocks import Gradients, HeadProblem, Sums, Upstream

_BLOCK_ELEMENTS = 2**26
"""Gradients by logits held at a time: 128 MiB in bfloat16."""
_LEAST_WIDTH = 2**12
"""Vocabulary entries of one block at least, however many tokens: 8 KiB a token, no more than its hidden state takes.

Each block adds to all hidden states' gradients once, which costs little beside computing a block of this width.
"""
_ALIGNED = 128
"""A block's width is a multiple of this, so that its rows begin where wide loads can."""
_SPAN_TILES = 16
"""Most tiles of the vocabulary that one program walks through: few enough to spread evenly over the GPU."""
_WAVES = 4
"""Programs per processor of the GPU, where there are tiles enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """The piece of a matrix product that one program computes, and how."""

    rows: int
    """Rows of the left factor."""
    columns: int
    """Rows of the right factor."""
    depth: int
    """Elements of both factors that are loaded at a time."""
    warps: int
    """Groups of 32 threads."""
    stages: int
    """Loads under way at the same time."""

    def shared_memory(self, width: int) -> int:
        """Compute the bytes that the loads under way take, for factors of ``width`` bytes."""
        return (self.rows + self.columns) * self.depth * width * self.stages


_TILES = {
    torch.bfloat16: (
        _Tile(rows=128, columns=256, depth=64, warps=8, stages=4),
        _Tile(rows=128, columns=256, depth=64, warps=8, stages=3),
        _Tile(rows=128, columns=128, depth=64, warps=8, stages=3),
        _Tile(rows=64, columns=128, depth=32, warps=4, stages=3),
    ),
    torch.float32: (_Tile(rows=64, columns=64, depth=32, warps=4, stages=2),),
}
"""Largest first; a GPU gets the first one that its shared memory holds, or the last."""
_LANGUAGE_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def sums(problem: HeadProblem) -> Sums:
    """Walk once over the vocabulary.

    Args:
        problem: S tokens, V vocabulary entries, in float32 or bfloat16.

    Returns:
        Five float32 vectors [S].
    """
    tokens, vocabulary = problem.hidden.shape[0], problem.weight.shape[0]
    tile, (processors, _) = _tile(_factors(problem), problem.hidden.device), _gpu(problem.hidden.device)
    blocks, tiles = _pieces(tokens, tile.rows), _pieces(vocabulary, tile.columns)
    # Few tokens get short spans, so that there are programs enough for all processors.
    span = min(_SPAN_TILES, max(1, blocks * tiles // (_WAVES * processors)))
    spans = _pieces(tiles, span)
    partial = problem.hidden.new_empty((len(Sums._fields), spans, tokens), dtype=torch.float32)
    _start(
        kernels.walk_span,
        blocks * spans,
        *_operands(problem.hidden, problem.weight, problem.bias),
        *(problem.targets.contiguous(), partial),
        *(tokens, vocabulary, problem.hidden.shape[1], span, spans),
        **_options(problem, tile),
    )
    return _together(Sums(*partial))


def gradients(problem: HeadProblem, upstream: Upstream, wanted: tuple[bool, ...]) -> Gradients:
    """Walk over the vocabulary again, making the logits a second time, block by block.

    Args:
        problem: S tokens, V vocabulary entries, in float32 or bfloat16.
        upstream: the gradients by log-prob and entropy, and the saved results of the forward pass.
        wanted: True for each of hidden, weight and bias that wants a gradient.

    Returns:
        Gradients by hidden, weight and bias.
    """
    hidden, weight, bias = problem.hidden, problem.weight, problem.bias
    factor = _factors(problem)
    rows, states = _coefficients(upstream), hidden.to(factor)
    by_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32) if wanted[0] else None
    by_weight = torch.empty_like(weight) if wanted[1] else None
    by_bias = torch.empty_like(bias) if bias is not None and wanted[2] else None
    # As wide as the memory allows: each block reads and writes all of by_hidden once.
    width = max(_LEAST_WIDTH, _BLOCK_ELEMENTS // max(1, hidden.shape[0]) // _ALIGNED * _ALIGNED)
    for begin in range(0, weight.shape[0], width):
        part = slice(begin, min(begin + width, weight.shape[0]))
        block = _gradient_block(problem, rows, part)
        if by_hidden is not None:
            _add_product(by_hidden, block, weight[part].to(factor))
        if by_weight is not None:
            by_weight[part] = block.T @ states
        if by_bias is not None:
            by_bias[part] = block.sum(0, dtype=torch.float32)
        del block  # before the next one is made: there is never a second one
    return [None if by_hidden is None else by_hidden.to(hidden.dtype), by_weight, by_bias]


def _gradient_block(problem: HeadProblem, rows: Tensor, part: slice) -> Tensor:
    """Compute the gradient by hidden·weightᵀ + bias of some vocabulary entries [S, part], in the factors' type."""
    hidden, weight = problem.hidden, problem.weight[part]
    bias = None if problem.bias is None else problem.bias[part]
    tokens, width = hidden.shape[0], weight.shape[0]
    block = hidden.new_empty((tokens, width), dtype=_factors(problem))
    tile = _tile(block.dtype, block.device)
    _start(
        kernels.gradient_tile,
        _pieces(tokens, tile.rows) * _pieces(width, tile.columns),
        *_operands(hidden, weight, bias),
        *(problem.targets.contiguous(), rows, block, part.start),
        *(tokens, width, hidden.shape[1]),
        **_options(problem, tile),
    )
    return block


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to ``total``, which is float32 whatever the factors are."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    # The library's product would be rounded to bfloat16 before it is added.
    tile = _tile(left.dtype, left.device)
    _start(
        kernels.add_tile,
        _pieces(total.shape[0], tile.rows) * _pieces(total.shape[1], tile.columns),
        *(left, *left.stride(), right, *right.stride(), total),
        *(*total.shape, left.shape[1]),
        **_shape(tile, left.dtype),
    )


def _start(kernel: Any, programs: int, tensor: Tensor, *arguments: Tensor | float, **options: Any) -> None:
    """Start ``programs`` programs of a kernel on the GPU of its first argument; a GPU refuses to start none."""
    if programs:
        with torch.cuda.device_of(tensor):
            kernel[(programs,)](tensor, *arguments, **options)


def _pieces(whole: int, piece: int) -> int:
    """Divide, rounding up."""
    return -(-whole // piece)


def _coefficients(upstream: Upstream) -> Tensor:
    """Stack the inputs of each token's gradient [5, S], in the order that the kernel reads them."""
    slope = torch.zeros_like(upstream.level) if upstream.slope is None else upstream.slope
    return torch.stack([upstream.highest, upstream.by_logp, upstream.level, slope, upstream.shift])


def _together(partial: Sums) -> Sums:
    """Combine the sums of the spans [spans, S] into one [S]."""
    # The same rescaling as when m moves within a span.
    highest = partial.highest.amax(0)
    moved = partial.highest - highest
    shrink = moved.exp()
    return Sums(
        highest=highest,
        s1=(partial.s1 * shrink).sum(0),
        s2=(partial.s2 * shrink.square()).sum(0),
        s3=((partial.s3 + moved * partial.s1) * shrink).sum(0),
        picked=partial.picked.sum(0),
    )


def _operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
    """Return the first arguments of a kernel that makes logits; without a bias any tensor stands in for it."""
    return hidden, *hidden.stride(), weight, *weight.stride(), hidden if bias is None else bias.contiguous()


def _options(problem: HeadProblem, tile: _Tile) -> dict[str, Any]:
    """Return the compile-time options of a kernel that makes logits."""
    return {
        "cap": problem.softcap or 1.0,
        "coldness": 1.0 / problem.temperature,
        "HAS_CAP": problem.softcap is not None,
        "HAS_BIAS": problem.bias is not None,
        **_shape(tile, _factors(problem)),
    }


def _shape(tile: _Tile, factor: torch.dtype) -> dict[str, Any]:
    """Return a tile as a kernel's options."""
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        # In products the interpreter takes bfloat16 for whole numbers; widened, the products are the same.
        "FACTOR": tl.float32 if INTERPRETED else _LANGUAGE_TYPES[factor],
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _factors(problem: HeadProblem) -> torch.dtype:
    """Return the type that both factors are multiplied in."""
    return torch.promote_types(problem.hidden.dtype, problem.weight.dtype)


def _tile(factors: torch.dtype, device: torch.device) -> _Tile:
    """Return the largest tile of the factors' type that the GPU can hold."""
    (_, room), choice = _gpu(device), _TILES[factors]
    return next((tile for tile in choice if tile.shared_memory(factors.itemsize) <= room), choice[-1])


@cache
def _gpu(device: torch.device) -> tuple[int, int]:
    """Return how many programs a GPU runs at the same time, and the bytes of shared memory that one may have.

    On a CPU the interpreter takes the first tile of the table, one at a time.
    """
    if device.type == "cpu":
        return 1, 2**31
    driver: Any = triton.runtime.driver.active
    properties = driver.utils.get_device_properties(device.index)
    return properties["multiprocessor_count"], properties["max_shared_mem"]


INTERPRETED = not isinstance(cast(object, kernels.walk_span), triton.JITFunction)
"""True where Triton was imported with TRITON_INTERPRET=1, which runs the kernels on a CPU, for tests."""
