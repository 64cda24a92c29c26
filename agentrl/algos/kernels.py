"""The scoring head's Triton kernels: the work of one program on a GPU. ``launch.py`` starts them.

A program computes ``ROWS`` × ``COLUMNS`` of a matrix product, loading ``DEPTH`` elements of each row at a time, in
the type ``FACTOR``, with sums in float32, and uses the result while it is in registers. A matrix takes three arguments:
a pointer, the stride from row to row, and the stride from one element of a row to the next: hence the long signatures.

Rows and columns past the end are wrapped around rather than masked, which keeps loads wide; they are never stored.
"""

# A kernel's arguments have types of Triton's own, which it gives no names to, and its built-in functions claim never to
# return: as Python they only raise.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

_GROUP = tl.constexpr(16)
"""Blocks of tokens that run side by side and meet the same weights while these are in the cache."""


@triton.jit
def _place(row_blocks, others):
    """Return this program's block of rows and its index among the ``others``: groups of neighbours share both."""
    group = _GROUP * others
    first_row = tl.program_id(0) // group * _GROUP
    within = tl.program_id(0) % group
    size = tl.minimum(row_blocks - first_row, _GROUP)
    return first_row + within % size, within // size


@triton.jit
def _product(
    left, left_row, left_step, right, right_row, right_step, rows, columns, depth,
    DEPTH: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Σ_k left[i, k]·right[j, k] for some rows i of the one factor and j of the other, in float32."""
    step = tl.arange(0, DEPTH)
    # 64 bits: the offset of a row in a large weight exceeds 32.
    left += rows.to(tl.int64)[:, None] * left_row + step[None, :] * left_step
    right += columns.to(tl.int64)[None, :] * right_row + step[:, None] * right_step
    total = tl.zeros((rows.shape[0], columns.shape[0]), tl.float32)
    for begin in range(0, depth, DEPTH):
        inside = begin + step < depth
        left_part = tl.load(left, mask=inside[None, :], other=0.0).to(FACTOR)
        right_part = tl.load(right, mask=inside[:, None], other=0.0).to(FACTOR)
        # Plain float32 products: TensorFloat-32, Triton's own choice, would keep three digits.
        total = tl.dot(left_part, right_part, total, input_precision="ieee")
        left += DEPTH * left_step
        right += DEPTH * right_step
    return total


@triton.jit
def _tanh(x):
    """The hyperbolic tangent: a series where 1 − e^(−2x) would cancel."""
    square = x * x
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    power = tl.exp(-2.0 * tl.abs(x))
    bent = (1.0 - power) / (1.0 + power)
    return tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0.0, -bent, bent))


@triton.jit
def _logits(
    hidden, hidden_row, hidden_step, weight, weight_row, weight_step, bias, rows, columns, depth, cap, coldness,
    HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr, DEPTH: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Compute one tile of logits."""
    z = _product(
        hidden, hidden_row, hidden_step, weight, weight_row, weight_step, rows, columns, depth, DEPTH, FACTOR
    )  # fmt: skip
    if HAS_BIAS:
        z += tl.load(bias + columns).to(tl.float32)[None, :]
    if HAS_CAP:
        z = cap * _tanh(z / cap)
    return z * coldness


@triton.jit(do_not_specialize=["tokens", "span", "spans"])
def walk_span(
    hidden, hidden_row, hidden_step, weight, weight_row, weight_step, bias, targets, partial,
    tokens, vocabulary, depth, span, spans, cap, coldness,
    HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Walk a block of tokens through a span of the vocabulary: m, S1, S2, S3 and the target's logit, if it is there."""
    row_block, part = _place(tl.cdiv(tokens, ROWS), spans)
    rows = row_block * ROWS + tl.arange(0, ROWS)
    target = tl.load(targets + rows, mask=rows < tokens, other=-1)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    s1 = tl.zeros((ROWS,), tl.float32)
    s2 = tl.zeros((ROWS,), tl.float32)
    s3 = tl.zeros((ROWS,), tl.float32)
    picked = tl.zeros((ROWS,), tl.float32)
    for begin in range(part * span * COLUMNS, tl.minimum((part + 1) * span * COLUMNS, vocabulary), COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        z = _logits(
            hidden, hidden_row, hidden_step, weight, weight_row, weight_step, bias, rows % tokens,
            columns % vocabulary, depth, cap, coldness, HAS_CAP, HAS_BIAS, DEPTH, FACTOR,
        )  # fmt: skip
        picked += tl.sum(tl.where(columns[None, :] == target[:, None], z, 0.0), 1)
        # Entries beyond the vocabulary must not count, not even as 0, which is high where all logits are low.
        inside = (columns < vocabulary)[None, :]
        z = tl.where(inside, z, float("-inf"))
        top = tl.maximum(highest, tl.max(z, 1))
        # Before the first tile m is −∞, and Δ·S1 = −∞·0 would be NaN.
        moved = tl.where(highest == float("-inf"), 0.0, highest - top)
        shrink = tl.exp(moved)
        above = z - top[:, None]
        powers = tl.exp(above)
        # Beyond the vocabulary z−m is −∞ and its power 0, whose product would be NaN: hence 0 in its place.
        s3 = (s3 + moved * s1) * shrink + tl.sum(tl.where(inside, above, 0.0) * powers, 1)
        s1 = s1 * shrink + tl.sum(powers, 1)
        s2 = s2 * shrink * shrink + tl.sum(powers * powers, 1)
        highest = top
    # partial is [5, spans, tokens]: no two programs share a cell, so nothing depends on their order.
    at = partial + part * tokens + rows
    tl.store(at, highest, mask=rows < tokens)
    tl.store(at + spans * tokens, s1, mask=rows < tokens)
    tl.store(at + 2 * spans * tokens, s2, mask=rows < tokens)
    tl.store(at + 3 * spans * tokens, s3, mask=rows < tokens)
    tl.store(at + 4 * spans * tokens, picked, mask=rows < tokens)


@triton.jit(do_not_specialize=["tokens"])
def gradient_tile(
    hidden, hidden_row, hidden_step, weight, weight_row, weight_step, bias, targets, coefficients, block, begin,
    tokens, width, depth, cap, coldness, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Compute the gradient by hidden·weightᵀ + bias of one tile of a block [tokens, width]; see ``Upstream``."""
    row_block, part = _place(tl.cdiv(tokens, ROWS), tl.cdiv(width, COLUMNS))
    rows = row_block * ROWS + tl.arange(0, ROWS)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    z = _logits(
        hidden, hidden_row, hidden_step, weight, weight_row, weight_step, bias, rows % tokens,
        columns % width, depth, cap, coldness, HAS_CAP, HAS_BIAS, DEPTH, FACTOR,
    )  # fmt: skip
    row_there = rows < tokens
    target = tl.load(targets + rows, mask=row_there, other=-1) - begin
    highest = tl.load(coefficients + rows, mask=row_there, other=0.0)
    by_logp = tl.load(coefficients + tokens + rows, mask=row_there, other=0.0)
    level = tl.load(coefficients + 2 * tokens + rows, mask=row_there, other=0.0)
    slope = tl.load(coefficients + 3 * tokens + rows, mask=row_there, other=0.0)
    shift = tl.load(coefficients + 4 * tokens + rows, mask=row_there, other=0.0)
    above = z - highest[:, None]
    grad = -tl.exp(above) * (slope[:, None] * (above + shift[:, None]) + level[:, None])
    grad += tl.where(columns[None, :] == target[:, None], by_logp[:, None], 0.0)
    if HAS_CAP:
        # tanh(x/c), read back from the logit that it became.
        bent = z / (cap * coldness)
        grad *= 1.0 - bent * bent
    at = block + rows.to(tl.int64)[:, None] * width + columns[None, :]
    inside = row_there[:, None] & (columns < width)[None, :]
    tl.store(at, grad * coldness, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def add_tile(
    left, left_row, left_step, right, right_step, right_row, total, tokens, width, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Add one tile of left·right to ``total`` [tokens, width]."""
    row_block, part = _place(tl.cdiv(tokens, ROWS), tl.cdiv(width, COLUMNS))
    rows = row_block * ROWS + tl.arange(0, ROWS)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    product = _product(
        left, left_row, left_step, right, right_row, right_step, rows % tokens, columns % width, depth, DEPTH, FACTOR
    )  # fmt: skip
    at = total + rows.to(tl.int64)[:, None] * width + columns[None, :]
    inside = (rows < tokens)[:, None] & (columns < width)[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0.0) + product, mask=inside)
