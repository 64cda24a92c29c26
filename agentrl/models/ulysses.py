"""Sequence parallelism: ranks share the tokens of a pack, and exchange them for heads where rows attend.

That is Ulysses (arXiv 2309.14509): all layers but attention work token by token, and attention head by head.

Legend: C tokens that the model computes, P ranks that share them, H query heads, K key heads, D head size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from agentrl.models.attention import AttentionPlan, How


class TokenShare:
    """This rank's share of each pack's tokens.

    Args:
        group: the ranks that share them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def part(self, tokens: Tensor) -> tuple[Tensor, int]:
        """Cut this rank's part out of [C], the same number on each rank, with the first token as padding.

        Returns:
            The part [C/P], and the place of its first token.
        """
        size = self._group.size()
        each = -(-len(tokens) // size)
        begin = self._group.rank() * each
        return pad(tokens, (0, each * size - len(tokens)))[begin : begin + each], begin

    def plan(self, rows: AttentionPlan, count: int) -> AttentionPlan:
        """Let the ranks' parts attend as ``rows`` says for all ``count`` tokens."""
        return _SharedRows(rows, count, self._group)


class _SharedRows:
    """Rows whose tokens are spread over ranks: each rank has all tokens of some heads while they attend."""

    def __init__(self, rows: AttentionPlan, count: int, group: dist.ProcessGroup) -> None:
        self._rows, self._count, self._group = rows, count, group

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Attention of one layer: ``query`` [C/P, H, D], ``key`` and ``value`` [C/P, K, D] to [C/P, H, D]."""
        size, heads = self._group.size(), key.shape[1]
        if heads % size:
            # Where key heads are fewer than ranks, or can't be dealt evenly, several ranks get the same key head.
            copies = size // heads if size % heads == 0 else query.shape[1] // heads
            key, value = (tensor.repeat_interleave(copies, 1) for tensor in (key, value))
        q, k, v = (self._to_heads(tensor)[: self._count] for tensor in (query, key, value))
        out = self._rows.attend(layer, q, k, v, how)
        return self._to_tokens(pad(out, (0, 0, 0, 0, 0, size * len(query) - self._count)))

    def _to_heads(self, tensor: Tensor) -> Tensor:
        """[C/P, H, D] to [C, H/P, D]."""
        return self._exchanged(tensor.unflatten(1, (self._group.size(), -1)).movedim(1, 0)).flatten(0, 1)

    def _to_tokens(self, tensor: Tensor) -> Tensor:
        """[C, H/P, D] to [C/P, H, D]."""
        return self._exchanged(tensor.unflatten(0, (self._group.size(), -1))).movedim(0, 1).flatten(1, 2)

    def _exchanged(self, tensor: Tensor) -> Tensor:
        exchanged: Tensor = _Exchange.apply(tensor, self._group)
        return exchanged


class _Exchange(torch.autograd.Function):
    """Send the i-th of P equal parts to rank i; the gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        sent = tensor.contiguous()
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        return got

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _Exchange.forward(ctx, grad_outputs[0], ctx.group), None
