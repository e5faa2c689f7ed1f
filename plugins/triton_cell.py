"""Triton kernels around the correction: the GRU step, a projection, and the first and the last kernel of a block's rollout.

Shape legend: B batch, N proposals, E embedding width, G GRU width, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from domino_deploy.plugins.triton_primitives import EMPTY_KEY, key_id, products, sigmoid, sort_key


@triton.jit
def begin_kernel(
    anchor_ids: tl.tensor,
    keys: tl.tensor,
    thresholds: tl.tensor,
    contenders: tl.tensor,
    B: tl.tensor,
    N: tl.tensor,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Fill what the steps raise: keys and thresholds int64 [N + 1, B], contenders int32 [N, B]; grid (1,).  keys[0] are the anchors."""
    batch, steps = tl.arange(0, BLOCK_B)[None, :], tl.arange(0, BLOCK_N)[:, None]
    is_inside = (batch < B) & (steps <= N)
    anchors = tl.load(anchor_ids + batch, mask=batch < B, other=0).to(tl.int32)
    first = tl.where(steps == 0, sort_key(tl.zeros([BLOCK_N, BLOCK_B], tl.float32), anchors), EMPTY_KEY)
    tl.store(keys + steps * B + batch, first, mask=is_inside)
    tl.store(thresholds + steps * B + batch, tl.full([BLOCK_N, BLOCK_B], EMPTY_KEY, tl.int64), mask=is_inside)
    tl.store(contenders + steps * B + batch, tl.zeros([BLOCK_N, BLOCK_B], tl.int32), mask=is_inside & (steps < N))


@triton.jit
def finish_kernel(
    keys: tl.tensor,
    token_ids: tl.tensor,
    draft_ids: tl.tensor,
    B: tl.tensor,
    N: tl.tensor,
    IS_MAPPED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """The tokens int64 [B, N] of keys int64 [N + 1, B], by way of token_ids int64 [V] with IS_MAPPED; grid (1,)."""
    batch, steps = tl.arange(0, BLOCK_B)[:, None], tl.arange(0, BLOCK_N)[None, :]
    is_inside = (batch < B) & (steps < N)
    drafted = tl.load(keys + (steps + 1) * B + batch, mask=is_inside, other=0)
    tokens = key_id(drafted).to(tl.int64)
    if IS_MAPPED:
        tokens = tl.load(token_ids + tokens, mask=is_inside, other=0)
    tl.store(draft_ids + batch * N + steps, tokens, mask=is_inside)


@triton.jit
def gate(gates: tl.tensor, number: tl.constexpr, BLOCK_G: tl.constexpr) -> tl.tensor:
    """One of four blocks of BLOCK_G rows, [BLOCK_G, B] of [4 * BLOCK_G, B]."""
    blocks = tl.reshape(gates, [4, BLOCK_G, gates.shape[1]])
    return tl.sum(tl.where(tl.arange(0, 4)[:, None, None] == number, blocks, 0.0), axis=0)


@triton.jit
def gru_cell_kernel(
    keys: tl.tensor,
    token_ids: tl.tensor,
    embedding: tl.tensor,
    embedding_stride: tl.tensor,
    w_ih: tl.tensor,
    w_ih_stride: tl.tensor,
    w_hh: tl.tensor,
    w_hh_stride: tl.tensor,
    state: tl.tensor,
    next_state: tl.tensor,
    E: tl.tensor,
    G: tl.tensor,
    V: tl.tensor,
    B: tl.tensor,
    IS_TABLE: tl.constexpr,
    IS_MAPPED: tl.constexpr,
    IS_FIRST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> None:
    """One GRU step on the embedding of the tokens of `keys`; grid (blocks of units,).  torch.nn.GRU's equations, without biases.

    Args:
        keys: int64 [B], of `sort_key`.
        token_ids: with IS_MAPPED, int64, the rows of the embedding that the ids of the keys stand for.
        embedding: [V, E]; with IS_TABLE the embedding times W_ih, [V, 3 G], and w_ih is not read.
        w_ih, w_hh: [3 G, E] and [3 G, G]; gates in the order reset, update, new.
        state, next_state: float32 [B, G]; two buffers, as every program reads the whole old state.  With IS_FIRST the old one is zero.
    """
    lanes = tl.arange(0, 4 * BLOCK_G)  # three gates and an empty one, as blocks are powers of two
    units = tl.program_id(0) * BLOCK_G + lanes % BLOCK_G
    is_row = (units < G) & (lanes < 3 * BLOCK_G)
    rows = (lanes // BLOCK_G * G + units).to(tl.int64)
    batch = tl.arange(0, BLOCK_B).to(tl.int64)
    is_vector = batch < B
    tokens = key_id(tl.load(keys + batch, mask=is_vector, other=0)).to(tl.int64)
    if IS_MAPPED:
        tokens = tl.load(token_ids + tokens, mask=is_vector, other=0)
    starts = tl.minimum(tokens, V - 1) * embedding_stride  # no token reaches outside of the embedding
    if IS_TABLE:
        places = embedding + starts[None, :] + rows[:, None]
        inputs = tl.load(places, mask=is_row[:, None] & is_vector[None, :], other=0.0).to(tl.float32)
    else:
        inputs = products(w_ih, w_ih_stride, rows, is_row, embedding, starts, embedding, starts, is_vector, E, False, BLOCK_C)
    own = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    is_own = (own < G)[:, None] & is_vector[None, :]
    places = batch[None, :] * G + own[:, None]
    if IS_FIRST:
        update = sigmoid(gate(inputs, 1, BLOCK_G))
        new = 2.0 * sigmoid(2.0 * gate(inputs, 2, BLOCK_G)) - 1.0  # tanh
        tl.store(next_state + places, (1.0 - update) * new, mask=is_own)
    else:
        old = products(w_hh, w_hh_stride, rows, is_row, state, batch * G, state, batch * G, is_vector, G, False, BLOCK_C)
        reset, update = sigmoid(gate(inputs + old, 0, BLOCK_G)), sigmoid(gate(inputs + old, 1, BLOCK_G))
        new = 2.0 * sigmoid(2.0 * (gate(inputs, 2, BLOCK_G) + reset * gate(old, 2, BLOCK_G))) - 1.0
        before = tl.load(state + places, mask=is_own, other=0.0)
        tl.store(next_state + places, (1.0 - update) * new + update * before, mask=is_own)


@triton.jit
def projection_kernel(
    weights: tl.tensor,
    row_stride: tl.tensor,
    x: tl.tensor,
    y: tl.tensor,
    W: tl.tensor,
    C: tl.tensor,
    B: tl.tensor,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> None:
    """y = weights x: [W, C] times float32 [B, C], float32 [B, W]; grid (blocks of rows,)."""
    rows = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    batch = tl.arange(0, BLOCK_B).to(tl.int64)
    is_vector = batch < B
    sums = products(weights, row_stride, rows.to(tl.int64), rows < W, x, batch * C, x, batch * C, is_vector, C, False, BLOCK_C)
    tl.store(y + batch[None, :] * W + rows[:, None], sums, mask=(rows < W)[:, None] & is_vector[None, :])
