"""Attention over packed rows in C, forward and backward (``agentrl/native/attention.c``).

Legend: C input tokens, R rows, H query heads, K key heads, D head size.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentrl.native import Unavailable
from agentrl.native.build import Library, library

_INTS = ("rows", "trees", "heads", "kheads", "D", "window", "threads")
_PLACES = ("source", "begin", "end", "shared", "tree")
_TENSORS = ("q", "k", "v", "dout", "out", "sums", "dq", "dk", "dv")


class _Pack(ctypes.Structure):
    """``Pack`` of attention.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _INTS),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_void_p) for name in (*_PLACES, *_TENSORS)),
    )


@cache
def compiled() -> Library | None:
    """Return the compiled code; None where there is none, which is asked once."""
    try:
        return library()
    except Unavailable:
        return None


def computes(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether attention of such tensors is computed in C: float32 on a CPU, where there is a compiler."""
    return device.type == "cpu" and dtype == torch.float32 and compiled() is not None


def name_of(device: torch.device, dtype: torch.dtype) -> str:
    """Name what computes attention of such tensors; its bits follow from that."""
    code = compiled() if computes(device, dtype) else None
    return "PyTorch" if code is None else f"native {code.digest}"


class NativeRows:
    """Rows laid end to end, each attending causally to itself only; see ``PackedRows``.

    Args:
        row_starts: int64 [R+1], offsets of the rows.
        source: index of the input token at each place of the rows, int64 [places].
    """

    def __init__(self, row_starts: Tensor, source: Tensor) -> None:
        begin, end = row_starts[:-1], row_starts[1:]
        # Tokens are numbered in the order of the rows, so a row's own tokens have numbers above all before it.
        highest = source.cummax(0).values
        new = torch.ones_like(source)
        new[1:] = source[1:] > highest[:-1]
        news = torch.cat((new.new_zeros(1), new.cumsum(0)))
        shared = end - begin - (news[end] - news[begin])
        # Rows that share tokens share their first one: the rows of such a tree become neighbours, in their order.
        rows = torch.nonzero(end - begin > shared)[:, 0]
        firsts, order = source[begin[rows]].sort(stable=True)
        rows = rows[order]
        sizes = firsts.unique_consecutive(return_counts=True)[1]
        tree = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
        self._count, self._rows, self._trees = int(highest[-1]) + 1, len(rows), len(sizes)
        self._places = [part.contiguous() for part in (source, begin[rows], end[rows], shared[rows], tree)]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention of one layer: ``query`` [C, H, D], ``key`` and ``value`` [C, K, D] to [C, H, D], float32.

        Raises:
            MemoryError: there is no memory for it, here or in the backward pass.
        """
        assert len(query) == len(key) == len(value) == self._count, "every token has a place in a row"
        assert query.shape[2] == key.shape[2] == value.shape[2] and query.shape[1] % key.shape[1] == 0
        return _Attend.apply(query, key, value, self, scale, window or 0, softcap or 0.0)

    def call(self, backward: bool, how: tuple[float, int, float], **tensors: Tensor) -> None:
        """Call attention.c's attend."""
        code = compiled()
        assert code is not None
        (_, heads, size), kheads, (scale, window, softcap) = tensors["q"].shape, tensors["k"].shape[1], how
        pack = _Pack(
            rows=self._rows, trees=self._trees, heads=heads, kheads=kheads, D=size, window=window, scale=scale,
            softcap=softcap, threads=torch.get_num_threads(),
            **{name: part.data_ptr() for name, part in zip(_PLACES, self._places, strict=True)},
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        )  # fmt: skip
        if code.calls.attend(ctypes.byref(pack), ctypes.c_int64(backward)):
            raise MemoryError("there is no memory for attention")


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: NativeRows, *how: Any) -> Tensor:
        q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
        out, sums = torch.empty_like(q), q.new_empty(q.shape[:2])
        rows.call(False, how, q=q, k=k, v=v, out=out, sums=sums)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.rows, ctx.how = rows, how
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch's decorator has no types
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
        inputs = {"q": q, "k": k, "v": v, "out": out, "sums": sums, "dout": grad.contiguous()}
        ctx.rows.call(True, ctx.how, **inputs, dq=dq, dk=dk, dv=dv)
        return dq, dk, dv, None, None, None, None
