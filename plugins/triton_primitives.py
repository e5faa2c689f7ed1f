"""What the Triton kernels are made of: keys that sort as argmax does, and a block of a matrix times the batch's vectors.

Shape legend: B batch, W rows of a weight matrix, C its columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

# `sort_key(-inf, 2**31 - 1)`: less than the key of any token.
EMPTY_KEY = tl.constexpr(-0x7F80000100000000)


@triton.jit
def sort_key(values: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """float32 values and int32 ids >= 0 as int64 that sort as argmax does: NaN first, then the value, then the lowest id."""
    values = tl.where(values == 0.0, 0.0, values)  # -0.0 is a tie with 0.0
    bits = values.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # of two negative floats the greater has the smaller bits
    ordered = tl.where(values != values, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def key_value(keys: tl.tensor) -> tl.tensor:
    """The float32 of `sort_key`; NaN for any NaN."""
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_id(keys: tl.tensor) -> tl.tensor:
    """The int32 id of `sort_key`."""
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def vectors(
    x: tl.tensor,
    x_starts: tl.tensor,
    y: tl.tensor,
    y_starts: tl.tensor,
    is_vector: tl.tensor,
    columns: tl.tensor,
    C: tl.tensor,
    IS_BOTTLENECK: tl.constexpr,
) -> tl.tensor:
    """Some columns of the batch's vectors, float32 [B, columns]: x, or SiLU(x + y) where IS_BOTTLENECK; zeros outside.

    Args:
        x_starts, y_starts: where each vector starts, in elements, int64 [B].
        is_vector: [B], false for rows of the block that the batch does not have.
    """
    is_inside = is_vector[:, None] & (columns < C)[None, :]
    values = tl.load(x + x_starts[:, None] + columns[None, :], mask=is_inside, other=0.0).to(tl.float32)
    if IS_BOTTLENECK:
        values += tl.load(y + y_starts[:, None] + columns[None, :], mask=is_inside, other=0.0).to(tl.float32)
        values = values * sigmoid(values)
    return values


@triton.jit
def products(
    weights: tl.tensor,
    row_stride: tl.tensor,
    rows: tl.tensor,
    is_row: tl.tensor,
    x: tl.tensor,
    x_starts: tl.tensor,
    y: tl.tensor,
    y_starts: tl.tensor,
    is_vector: tl.tensor,
    C: tl.tensor,
    IS_BOTTLENECK: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> tl.tensor:
    """Rows of a matrix times the batch's vectors (`vectors`), float32 [W, B], as exact as sums in float32 are.

    A single vector is multiplied on the ordinary cores.  For a batch, float32 weights go through exact products; others, which are
    TF32 numbers as they are, through tensor cores, with each vector as the sum of two TF32 numbers: that leaves out 2**-20 of it.

    Args:
        rows: int64 [W].
        is_row: [W], false for rows that are not read; their products are 0.
    """
    sums = tl.zeros([rows.shape[0], x_starts.shape[0]], tl.float32)
    for start in range(0, C, BLOCK_C):
        columns = start + tl.arange(0, BLOCK_C)
        inputs = vectors(x, x_starts, y, y_starts, is_vector, columns, C, IS_BOTTLENECK)
        places = weights + rows[:, None] * row_stride + columns[None, :]
        block = tl.load(places, mask=is_row[:, None] & (columns < C)[None, :], other=0)
        if x_starts.shape[0] == 1:
            sums += tl.sum(block.to(tl.float32) * inputs, axis=1)[:, None]
        elif block.dtype == tl.float32:
            sums = tl.dot(block, tl.trans(inputs), sums, input_precision="ieee")
        else:
            high = (inputs.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)  # TF32 has 13 bits less
            low = tl.where(inputs == high, 0.0, inputs - high)
            sums = tl.dot(block.to(tl.float32), tl.trans(high), sums, input_precision="tf32")
            sums = tl.dot(block.to(tl.float32), tl.trans(low), sums, input_precision="tf32")
    return sums


@triton.jit
def keep_best(keys: tl.tensor, best: tl.tensor, batch: tl.tensor, is_vector: tl.tensor) -> None:
    """Raise keys[b] to the best of the block's keys, [W, B], for each row b of the batch."""
    tl.atomic_max(keys + batch, tl.max(best, axis=0), mask=is_vector, sem="relaxed")
