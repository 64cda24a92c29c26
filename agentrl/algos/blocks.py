"""The scoring head in PyTorch, one block of logits at a time: for any device and any floating point type.

Shapes: ``S`` sampled tokens, ``V`` vocabulary, ``d`` hidden size. Logits exist one block at a time, never ``[S, V]``:
the vocabulary is walked in tiles with a running maximum m and three running sums per token,

    S1 = Σ e^(z−m),   S2 = Σ e^(2(z−m)),   S3 = Σ (z−m)·e^(z−m),

rescaled when m moves. The backward pass makes the blocks again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.models.linear import linear

_BLOCK_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
"""Logits held at a time: 16 MiB on a CPU, and on a GPU 256 MiB, to keep it busy."""
_TILE = {"cpu": 2**13, "cuda": 2**15}
"""Vocabulary entries of one tile: a vocabulary below that is one tile, and no sum is ever rescaled."""
_WIDE_RESULTS = "dtype" in torch.ops.aten.mm.overloads()
"""True where a GPU's product of bfloat16 factors can be returned in float32: from PyTorch 2.8 on."""

Gradients = list[Tensor | None]
"""By hidden [S, d], weight [V, d] and bias [V]: each in its own type, or None where it is not wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadProblem:
    """The head's inputs: they define the distributions π = softmax(cap(hidden·weightᵀ + bias) / temperature)."""

    hidden: Tensor
    """Hidden states [S, d]."""
    weight: Tensor
    """Output embedding [V, d]."""
    bias: Tensor | None
    """Bias of the logits [V], or None."""
    targets: Tensor
    """Sampled token ids [S], int64."""
    temperature: float
    """The sampling temperature."""
    softcap: float | None
    """The bound of the logits before the temperature, or None."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of logits and sums: float32, or float64 where an input is."""
        return torch.promote_types(torch.promote_types(self.hidden.dtype, self.weight.dtype), torch.float32)


class Sums(NamedTuple):
    """The results of one walk over the vocabulary for each token, 5 × [S]."""

    highest: Tensor
    """The highest logit m."""
    s1: Tensor
    """Σ e^(z-m), at least 1."""
    s2: Tensor
    """Σ e^(2(z-m)), at least 1."""
    s3: Tensor
    """Σ (z-m)·e^(z-m), at most 0."""
    picked: Tensor
    """The logit of the sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """The inputs of the backward pass, [S] each.

    With q = z − m, ∂L/∂z = onehot(y)·by_logp − e^q·(slope·(q + shift) + level): the gradient onehot(y) − π of ln π_y
    and the gradient −π(ln π + H) of the entropy, with π = e^q/S1 written out. No large number, such
    as ln Σ e^z where all logits are low, is rounded before it is subtracted.
    """

    highest: Tensor
    """The highest logit m."""
    by_logp: Tensor
    """Gradient of the loss by the log-prob."""
    level: Tensor
    """``by_logp`` / S1."""
    slope: Tensor | None
    """Gradient of the loss by the entropy, / S1; None where the loss does not use the entropy."""
    shift: Tensor
    """Entropy, less ln S1."""


def sums(problem: HeadProblem) -> Sums:
    """Walk once over the vocabulary.

    Args:
        problem: S tokens, V vocabulary entries.

    Returns:
        Five vectors [S] in ``problem.dtype``.
    """
    walk = _Walk(problem)
    shape = problem.hidden.shape[:1]
    totals = Sums(*(problem.hidden.new_zeros(shape, dtype=problem.dtype) for _ in Sums._fields))
    for tile, weight in walk.tiles():
        for chunk in walk.chunks():
            _add_block(totals, walk, chunk, tile, walk.logits(chunk, tile, weight))
    return totals


def gradients(problem: HeadProblem, upstream: Upstream, wanted: tuple[bool, ...]) -> Gradients:
    """Walk over the vocabulary again, making the blocks of logits a second time.

    Args:
        problem: S tokens, V vocabulary entries.
        upstream: the gradients by log-prob and entropy, and the saved results of the forward pass.
        wanted: True for each of hidden, weight and bias that wants a gradient.

    Returns:
        Gradients by hidden, weight and bias.
    """
    walk, hidden, weight = _Walk(problem), problem.hidden, problem.weight
    by_hidden = torch.zeros_like(hidden, dtype=problem.dtype) if wanted[0] else None
    by_weight = torch.empty_like(weight) if wanted[1] else None
    by_bias = torch.empty_like(problem.bias) if problem.bias is not None and wanted[2] else None
    for tile, factor in walk.tiles():
        # Summed over the chunks in the wide type, and rounded to the weight's own type only once.
        tile_weight = torch.zeros_like(factor, dtype=problem.dtype)
        tile_bias = tile_weight.new_zeros(factor.shape[0])
        for chunk in walk.chunks():
            grad = walk.logit_gradient(chunk, tile, factor, upstream)
            if by_bias is not None:
                tile_bias += grad.sum(0)
            grad = grad.to(walk.factor_dtype)
            if by_hidden is not None:
                by_hidden[chunk] += walk.product(grad, factor)
            if by_weight is not None:
                tile_weight += walk.product(grad.T, hidden[chunk].to(walk.factor_dtype))
        if by_weight is not None:
            by_weight[tile] = tile_weight
        if by_bias is not None:
            by_bias[tile] = tile_bias
    return [None if by_hidden is None else by_hidden.to(hidden.dtype), by_weight, by_bias]


def _add_block(totals: Sums, walk: "_Walk", chunk: slice, tile: slice, block: Tensor) -> None:
    """Add one block of logits to the running sums; overwrites ``block``."""
    highest, s1, s2, s3, picked = (part[chunk] for part in totals)
    index, inside = walk.in_tile(chunk, tile)
    # Picked before sub_ below overwrites the logits.
    picked += torch.where(inside, block.gather(1, index)[:, 0], 0.0)
    top = block.amax(1)
    # m has no value before the first tile, and e^Δ, Δ·S1 would be NaN there.
    top = top if tile.start == 0 else torch.maximum(top, highest)
    moved = torch.zeros_like(top) if tile.start == 0 else highest - top
    shrink = moved.exp()
    powers = block.sub_(top[:, None]).exp()
    # S3 first: its rescaling, (z−m') = (z−m) + Δ, needs S1 under the old maximum.
    s3.copy_((s3 + moved * s1) * shrink + block.mul_(powers).sum(1))
    s1.mul_(shrink).add_(powers.sum(1))
    s2.mul_(shrink.square()).add_(powers.square_().sum(1))
    highest.copy_(top)


@dataclass(frozen=True, slots=True)
class _Walk:
    """One walk over the blocks of [S, V]: tiles of the vocabulary outside, chunks of tokens inside.

    In this order a tile of narrow weights is widened once, and its gradient is finished before the next tile's begins.
    """

    problem: HeadProblem
    """The head's inputs."""

    @property
    def factor_dtype(self) -> torch.dtype:
        """The type of the factors in products: a GPU multiplies bfloat16 with float32 sums, elsewhere they are widened.

        float16 is widened everywhere: the gradient of a mean over many tokens is below what it can hold.
        """
        hidden, weight = self.problem.hidden, self.problem.weight
        narrow = hidden.is_cuda and _WIDE_RESULTS and hidden.dtype == weight.dtype == torch.bfloat16
        return hidden.dtype if narrow else self.problem.dtype

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield each tile of the vocabulary, with its weights as a factor [tile, d]."""
        weight = self.problem.weight
        size = _TILE[weight.device.type]
        for begin in range(0, weight.shape[0], size):
            tile = slice(begin, min(begin + size, weight.shape[0]))
            yield tile, weight[tile].to(self.factor_dtype)

    def chunks(self) -> Iterator[slice]:
        """Yield runs of tokens, each as long as fits into a block with one tile."""
        device = self.problem.hidden.device.type
        size = max(1, _BLOCK_ELEMENTS[device] // min(self.problem.weight.shape[0], _TILE[device]))
        for begin in range(0, self.problem.hidden.shape[0], size):
            yield slice(begin, begin + size)

    def logits(self, chunk: slice, tile: slice, weight: Tensor) -> Tensor:
        """Compute one block of logits [chunk, tile]."""
        block = self.product(self.problem.hidden[chunk].to(self.factor_dtype), weight.T)
        if self.problem.bias is not None:
            block.add_(self.problem.bias[tile])
        if self.problem.softcap is not None:
            block.div_(self.problem.softcap).tanh_().mul_(self.problem.softcap)
        return block if self.problem.temperature == 1.0 else block.div_(self.problem.temperature)

    def product(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply matrices, with sums and result in the problem's type."""
        if left.dtype == self.problem.dtype:
            return linear(left, right.T)
        return torch.mm(left, right, out_dtype=self.problem.dtype)

    def in_tile(self, chunk: slice, tile: slice) -> tuple[Tensor, Tensor]:
        """Return each token's target as an index into the tile [chunk, 1], and True where it is in the tile [chunk]."""
        index = self.problem.targets[chunk] - tile.start
        # gather and scatter need a valid index even for targets outside the tile; the mask discards those.
        return index.clamp(0, tile.stop - tile.start - 1)[:, None], (index >= 0) & (index < tile.stop - tile.start)

    def logit_gradient(self, chunk: slice, tile: slice, weight: Tensor, upstream: Upstream) -> Tensor:
        """Compute the gradient by hidden·weightᵀ + bias of one block [chunk, tile]."""
        block = self.logits(chunk, tile, weight)
        above = block - upstream.highest[chunk, None]
        powers = above.exp()
        if upstream.slope is None:
            # Without the entropy's gradient the slope is 0, and a pass over the block is saved.
            grad = powers.mul_(-upstream.level[chunk, None])
        else:
            above.add_(upstream.shift[chunk, None]).mul_(upstream.slope[chunk, None]).add_(upstream.level[chunk, None])
            grad = powers.mul_(above).neg_()
        index, inside = self.in_tile(chunk, tile)
        grad.scatter_add_(1, index, torch.where(inside, upstream.by_logp[chunk], 0.0)[:, None])
        return self._chain(grad, block)

    def _chain(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient by the logits into the gradient by the products, in place; overwrites ``logits``."""
        softcap, temperature = self.problem.softcap, self.problem.temperature
        # d/dx c·tanh(x/c) = 1 − tanh², with tanh = z·temperature/c read back from the logits.
        if softcap is not None:
            grad.mul_(logits.mul_(temperature / softcap).square_().neg_().add_(1.0))
        return grad if temperature == 1.0 else grad.div_(temperature)
