"""Rows of sampled tokens laid end to end, and exact sums along each row.

A row here is one episode: all of its sampled tokens in time, whatever pieces the model has read it in.

Shapes: ``S`` sampled tokens of all rows end to end, ``R`` rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Offsets of the rows, and the row of each token.

    Example:
        Three rows, the second without a sampled token::

            starts  = [0, 3, 3, 5]
            lengths = [3, 0, 2]
            row     = [0, 0, 0, 2, 2]
            ordinal = [1, 2, 3, 1, 2]
    """

    starts: Tensor
    """Offset of each row, and the end of the last [R+1], int64."""
    lengths: Tensor
    """Sampled tokens of each row [R], int64."""
    row: Tensor
    """The row of each token [S], int64."""

    @classmethod
    def of(cls, starts: Tensor, like: Tensor) -> "Rows":
        """Check ``starts`` against the tensor ``like`` [S], whose rows they are the offsets of.

        Raises:
            ValueError: ``starts`` [R+1] is no list of offsets that begins at 0, never falls and ends at S.
        """
        if starts.ndim != 1 or starts.numel() == 0 or starts.dtype not in _INTEGERS:
            raise ValueError(f"starts must be integer offsets [R+1], not {_describe(starts)}")
        offsets = starts.to(device=like.device, dtype=torch.int64)
        lengths = offsets.diff()
        begin, end, falls = int(offsets[0]), int(offsets[-1]), bool((lengths < 0).any())
        if begin != 0 or end != like.numel() or falls:
            raise ValueError(f"starts must rise from 0 to {like.numel()}, the number of tokens, not {begin} to {end}")
        index = torch.arange(lengths.numel(), device=like.device)
        return cls(starts=offsets, lengths=lengths, row=torch.repeat_interleave(index, lengths, output_size=end))

    @property
    def ordinal(self) -> Tensor:
        """``t`` of each token within its row [S], counted from 1, int64."""
        return torch.arange(1, self.row.numel() + 1, device=self.row.device) - self.starts[self.row]

    def sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` [S] over each row [R], in float64; differentiable."""
        totals = torch.zeros(self.lengths.numel(), dtype=torch.float64, device=values.device)
        return totals.index_add(0, self.row, values.double())

    def prefix_sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` [S] along each row, up to and including each token [S], in float64.

        One running sum serves all rows: a reset slot before each row subtracts the previous row's total. So a row that
        begins with values near 0 keeps their precision, whatever rows come before it.
        """
        n_rows, n_tokens = self.lengths.numel(), self.row.numel()
        resets = self.starts[:-1] + torch.arange(n_rows, device=values.device)
        slots = torch.arange(1, n_tokens + 1, device=values.device) + self.row
        laid_out = torch.zeros(n_tokens + n_rows, dtype=torch.float64, device=values.device)
        laid_out[slots] = values.double()
        laid_out[resets[1:]] = -self.sum(values)[:-1]
        running = laid_out.cumsum(0)
        # Totals and running sums round in different orders, so a reset may leave a small rest: it is subtracted too.
        return running[slots] - running[resets][self.row]

    def suffix_sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` [S] from each token, which is included, to the end of its row [S], in float64."""
        # Total less prefix, plus the token's own value: this saves a second pass over a reversed tensor.
        return self.sum(values)[self.row] - self.prefix_sum(values) + values


def check_per_token(name: str, values: Tensor, like: Tensor, *, least: float | None = None) -> None:
    """Check that there is one finite number per sampled token.

    Args:
        name: What the message calls the tensor.
        values: The tensor to check [S].
        like: Any tensor of the right shape and device [S].
        least: The smallest value allowed; None for any.

    Raises:
        ValueError: wrong shape or device, not a floating type, NaN or infinite, or below ``least``.
    """
    if values.ndim != 1 or values.shape != like.shape or values.device != like.device:
        raise ValueError(f"{name} must be one number per sampled token, [{like.numel()}] on {like.device}, "
                         f"not {_describe(values)}")  # fmt: skip
    if not values.is_floating_point():
        raise ValueError(f"{name} must be floating point, not {values.dtype}")
    if values.numel() == 0:
        return
    low, high = (float(bound) for bound in torch.aminmax(values.detach()))
    # One test for three faults: NaN spreads through aminmax, and inf - inf is NaN.
    if not (high - low) < float("inf") or low in (float("inf"), float("-inf")):
        raise ValueError(f"{name} must be finite; it reaches from {low} to {high}")
    if least is not None and low < least:
        raise ValueError(f"{name} must be at least {least}; it falls to {low}")


def _describe(values: Tensor) -> str:
    return f"{values.dtype} {list(values.shape)} on {values.device}"
