"""Triton kernels of the logit correction over the whole vocabulary: base + W2 SiLU(z + s), its best tokens, logits never stored.

`correction_tiles_kernel` and `reduce_tiles_kernel` are the halves of a plugin that may launch one kernel (docs/kernels.md); their
parameters keep TensorRT's order: inputs, scalars, outputs.  The truth they are compared with is `reference.py`.  NaN counts as more than
any number, a tie goes to the lowest id.

Shape legend: B batch, R rank, V vocabulary, T tiles of BLOCK_V tokens, K tokens of a top-k, a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from domino_deploy.plugins.triton_primitives import EMPTY_KEY, keep_best, key_id, key_value, products, sort_key


@triton.jit
def correction_tiles_kernel(
    base: tl.tensor,
    z: tl.tensor,
    s: tl.tensor,
    codebook: tl.tensor,
    V: tl.tensor,
    R: tl.tensor,
    tile_values: tl.tensor,
    tile_ids: tl.tensor,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """The best token of every tile and its corrected logit; grid (T, B).

    Args:
        base: [B, V], contiguous, as all others; of any floating type.
        z, s: [B, R].
        codebook: [V, R].
        tile_values: [B, T] float32.
        tile_ids: [B, T] int32.
    """
    # Programs of one tile run next to each other, whatever the batch, so that L2 serves all but the first reading of its rows.
    tiles, batch = tl.num_programs(0), tl.num_programs(1)
    program = tl.program_id(1) * tiles + tl.program_id(0)
    tile, row = program // batch, (program % batch).to(tl.int64)
    ids = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    is_token = ids < V
    start = row * R + tl.zeros([1], tl.int64)
    corrections = products(codebook, R, ids.to(tl.int64), is_token, z, start, s, start, start >= 0, R, True, BLOCK_R)
    logits = tl.load(base + row * V + ids, mask=is_token, other=float("-inf")).to(tl.float32) + tl.sum(corrections, axis=1)
    best = tl.max(sort_key(logits, ids), axis=0)
    tl.store(tile_values + row * tiles + tile, key_value(best))
    tl.store(tile_ids + row * tiles + tile, key_id(best))


@triton.jit
def reduce_tiles_kernel(
    tile_values: tl.tensor, tile_ids: tl.tensor, T: tl.tensor, token_ids: tl.tensor, corrected_logits: tl.tensor, BLOCK_T: tl.constexpr
) -> None:
    """The best of all tiles; grid (B,).

    Args:
        tile_values, tile_ids: of `correction_tiles_kernel`.
        token_ids: [B] int64.
        corrected_logits: [B] float32.
    """
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK_T], EMPTY_KEY, tl.int64)
    for start in range(0, T, BLOCK_T):
        tiles = start + tl.arange(0, BLOCK_T)
        values = tl.load(tile_values + row * T + tiles, mask=tiles < T, other=float("-inf"))
        best = tl.maximum(best, sort_key(values, tl.load(tile_ids + row * T + tiles, mask=tiles < T, other=0x7FFFFFFF)))
    winner = tl.max(best, axis=0)
    tl.store(token_ids + row, key_id(winner).to(tl.int64))
    tl.store(corrected_logits + row, key_value(winner))


@triton.jit
def corrected_tile(
    base: tl.tensor,
    base_stride: tl.tensor,
    z: tl.tensor,
    z_stride: tl.tensor,
    s: tl.tensor,
    s_stride: tl.tensor,
    codebook: tl.tensor,
    codebook_stride: tl.tensor,
    ids: tl.tensor,
    batch: tl.tensor,
    V: tl.tensor,
    R: tl.tensor,
    B: tl.tensor,
    BLOCK_R: tl.constexpr,
) -> tl.tensor:
    """Corrected logits of a tile for the whole batch, float32 [BLOCK_V, B]; -inf for what the vocabulary or the batch does not have."""
    is_token, is_vector = ids < V, batch < B
    corrections = products(
        codebook, codebook_stride, ids.to(tl.int64), is_token, z, batch * z_stride, s, batch * s_stride, is_vector, R, True, BLOCK_R
    )
    is_inside = is_token[:, None] & is_vector[None, :]
    return tl.load(base + batch[None, :] * base_stride + ids[:, None], mask=is_inside, other=float("-inf")).to(tl.float32) + corrections


@triton.jit
def correction_kernel(
    base: tl.tensor,
    base_stride: tl.tensor,
    z: tl.tensor,
    z_stride: tl.tensor,
    s: tl.tensor,
    s_stride: tl.tensor,
    codebook: tl.tensor,
    codebook_stride: tl.tensor,
    V: tl.tensor,
    R: tl.tensor,
    B: tl.tensor,
    keys: tl.tensor,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> None:
    """Raise keys [B] to the best corrected token's `sort_key`; grid (T,), the codebook is read once for the whole batch.

    Strides are those of rows, in elements; elements of a row lie side by side.
    """
    ids = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    batch = tl.arange(0, BLOCK_B).to(tl.int64)
    logits = corrected_tile(base, base_stride, z, z_stride, s, s_stride, codebook, codebook_stride, ids, batch, V, R, B, BLOCK_R)
    keep_best(keys, sort_key(logits, ids[:, None]), batch, batch < B)


@triton.jit
def argmax_kernel(
    base: tl.tensor, row_stride: tl.tensor, step_stride: tl.tensor, V: tl.tensor, keys: tl.tensor, BLOCK_V: tl.constexpr
) -> None:
    """Raise keys [N, B] to the best base logit's `sort_key`, of logits [B, N, V]; grid (tiles, B, N)."""
    row, step = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    ids = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = tl.load(base + row * row_stride + step * step_stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    tl.atomic_max(keys + step * tl.num_programs(1) + row, tl.max(sort_key(logits, ids), axis=0), sem="relaxed")


@triton.jit
def top_k_tiles_kernel(
    base: tl.tensor,
    base_stride: tl.tensor,
    z: tl.tensor,
    z_stride: tl.tensor,
    s: tl.tensor,
    s_stride: tl.tensor,
    codebook: tl.tensor,
    codebook_stride: tl.tensor,
    V: tl.tensor,
    R: tl.tensor,
    B: tl.tensor,
    keys: tl.tensor,
    highest: tl.tensor,
    sums: tl.tensor,
    K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> None:
    """The K best of every tile, and what their softmax needs; grid (T,).

    Args:
        keys: [B, T, K] int64, falling within a tile.
        highest: [B, T] float32, a number that no finite logit of the tile exceeds.
        sums: [B, T] float32, sum of exp(logit - highest).
    """
    tiles, tile = tl.num_programs(0), tl.program_id(0)
    ids = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    batch = tl.arange(0, BLOCK_B).to(tl.int64)
    logits = corrected_tile(base, base_stride, z, z_stride, s, s_stride, codebook, codebook_stride, ids, batch, V, R, B, BLOCK_R)
    best = tl.topk(tl.trans(sort_key(logits, ids[:, None])), K)
    places = keys + (batch[:, None] * tiles + tile) * K + tl.arange(0, K)[None, :]
    tl.store(places, best, mask=(batch < B)[:, None])
    most = tl.max(logits, axis=0)
    most = tl.where(most == float("-inf"), 0.0, most)  # a tile without a token that can be: exp gives zeros, not NaN
    tl.store(highest + batch * tiles + tile, most, mask=batch < B)
    tl.store(sums + batch * tiles + tile, tl.sum(tl.exp(logits - most[None, :]), axis=0), mask=batch < B)


@triton.jit
def top_k_merge_kernel(keys: tl.tensor, count: tl.tensor, merged: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """The K best of every BLOCK keys; keys [B, count], merged [B, programs, K], both int64; grid (programs, B)."""
    row = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(keys + row * count + places, mask=places < count, other=EMPTY_KEY)
    best = tl.topk(block, K)
    tl.store(merged + (row * tl.num_programs(0) + tl.program_id(0)) * K + tl.arange(0, K), best)


@triton.jit
def top_k_finish_kernel(
    keys: tl.tensor,
    highest: tl.tensor,
    sums: tl.tensor,
    T: tl.tensor,
    k: tl.tensor,
    token_ids: tl.tensor,
    corrected_logits: tl.tensor,
    log_probs: tl.tensor,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """Tokens, logits and log-probabilities, all [B, k], of the merged keys [B, K] and the tiles' sums; grid (B,)."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.load(keys + row * K + tl.arange(0, K))
    values = key_value(best)
    top = tl.max(tl.where(values != values, 0.0, values), axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    parts = tl.zeros([BLOCK_T], tl.float32)
    for start in range(0, T, BLOCK_T):
        tiles = start + tl.arange(0, BLOCK_T)
        most = tl.load(highest + row * T + tiles, mask=tiles < T, other=float("-inf"))
        parts += tl.load(sums + row * T + tiles, mask=tiles < T, other=0.0) * tl.exp(most - top)
    places = row * k + tl.arange(0, K)
    is_wanted = tl.arange(0, K) < k
    tl.store(token_ids + places, key_id(best).to(tl.int64), mask=is_wanted)
    tl.store(corrected_logits + places, values, mask=is_wanted)
    tl.store(log_probs + places, values - top - tl.log(tl.sum(parts, axis=0)), mask=is_wanted)


@triton.jit
def unpack_kernel(keys: tl.tensor, token_ids: tl.tensor, corrected_logits: tl.tensor, B: tl.tensor, BLOCK_B: tl.constexpr) -> None:
    """Tokens int64 [B] and corrected logits float32 [B] of keys [B]; grid (1,)."""
    batch = tl.arange(0, BLOCK_B)
    best = tl.load(keys + batch, mask=batch < B, other=0)
    tl.store(token_ids + batch, key_id(best).to(tl.int64), mask=batch < B)
    tl.store(corrected_logits + batch, key_value(best), mask=batch < B)
