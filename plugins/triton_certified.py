"""Triton kernels that find the token of the whole vocabulary without reading most of the codebook.

Each token has an approximate corrected logit and a bound on its error; only tokens whose upper bound reaches the best known lower bound
are corrected exactly, by the very sums that `triton_kernels.py` adds up.  The proof of the bounds is in `triton_bounds.py`.

Shape legend: B batch, R rank, V vocabulary, K candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from domino_deploy.plugins.triton_primitives import EMPTY_KEY, keep_best, key_value, products, sort_key, vectors


@triton.jit
def length_and_mean(
    z: tl.tensor,
    z_starts: tl.tensor,
    s: tl.tensor,
    s_starts: tl.tensor,
    is_vector: tl.tensor,
    mean: tl.tensor,
    R: tl.tensor,
    BLOCK_R: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """|m| and mean . m of the bottlenecks m = SiLU(z + s), float32 [B] each."""
    squares, shared = tl.zeros([z_starts.shape[0]], tl.float32), tl.zeros([z_starts.shape[0]], tl.float32)
    for start in range(0, R, BLOCK_R):
        columns = start + tl.arange(0, BLOCK_R)
        bottleneck = vectors(z, z_starts, s, s_starts, is_vector, columns, R, True)
        squares += tl.sum(bottleneck * bottleneck, axis=1)
        shared += tl.sum(bottleneck * tl.load(mean + columns, mask=columns < R, other=0.0)[None, :], axis=1)
    return tl.sqrt(squares), shared


@triton.jit
def certified_kernel(
    base: tl.tensor,
    base_stride: tl.tensor,
    z: tl.tensor,
    z_stride: tl.tensor,
    s: tl.tensor,
    s_stride: tl.tensor,
    codebook: tl.tensor,
    codebook_stride: tl.tensor,
    quantised: tl.tensor,
    scales: tl.tensor,
    mean: tl.tensor,
    errors: tl.tensor,
    candidates: tl.tensor,
    slack: tl.tensor,
    V: tl.tensor,
    R: tl.tensor,
    B: tl.tensor,
    thresholds: tl.tensor,
    keys: tl.tensor,
    contenders: tl.tensor,
    IS_QUANTISED: tl.constexpr,
    IS_POOL_MARKED: tl.constexpr,
    IS_EXACT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_B: tl.constexpr,
) -> None:
    """Raise keys [B] to the best corrected token's `sort_key`; grid (tiles,).

    Args:
        base, z, s, codebook: as of `correction_kernel`.
        quantised: int8 [V, R]; with IS_QUANTISED a correction is about scales[v] * quantised[v] . m.
        scales: float32 [V].
        mean: float32 [R]; without IS_QUANTISED it is about mean . m.
        errors: float32 [V]: it is off by no more than errors[v] |m|, rounding included.
        candidates: with IS_POOL_MARKED, int8 [B, V], not 0 for tokens that `contenders` does not count.
        slack: of the base logit's size, what rounding can add up to.
        thresholds: int64 [B], keys of corrected tokens; may be `keys`, and so rise while the kernel runs.
        contenders: int32 [B], raised by the number of tokens that the bound does not rule out.
        IS_EXACT: false to count them only.
    """
    ids = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    batch = tl.arange(0, BLOCK_B).to(tl.int64)
    is_token, is_vector = ids < V, batch < B
    is_inside = is_token[:, None] & is_vector[None, :]
    z_starts, s_starts, rows = batch * z_stride, batch * s_stride, ids.to(tl.int64)
    logits = tl.load(base + batch[None, :] * base_stride + ids[:, None], mask=is_inside, other=float("-inf")).to(tl.float32)
    length, shared = length_and_mean(z, z_starts, s, s_starts, is_vector, mean, R, BLOCK_R)
    # An infinite base logit takes part as it is; infinity times the slack would make its bounds NaN, and the token a contender always.
    bounds = tl.load(errors + ids, mask=is_token, other=0.0)[:, None] * (length * (1.0 + slack))[None, :]
    bounds += slack * tl.where(tl.abs(logits) < float("inf"), tl.abs(logits), 0.0)
    threshold = key_value(tl.load(thresholds + batch, mask=is_vector, other=0))
    if IS_QUANTISED:
        approximate = products(quantised, R, rows, is_token, z, z_starts, s, s_starts, is_vector, R, True, BLOCK_R)
        about = logits + tl.load(scales + ids, mask=is_token, other=0.0)[:, None] * approximate
        lowest = about - bounds
        lowest = tl.where(tl.abs(lowest) < float("inf"), lowest, float("-inf"))  # NaN, and sums that overflow, rule nothing out
        local = tl.max(lowest, axis=0)
        threshold = tl.where(local > threshold, local, threshold)
    else:
        about = logits + shared[None, :]
    could_win = ((about + bounds < threshold[None, :]) == 0) & is_inside  # so that NaN could
    counted = could_win
    if IS_POOL_MARKED:
        counted = could_win & (tl.load(candidates + batch[None, :] * V + ids[:, None], mask=is_inside, other=1) == 0)
    count = tl.sum(counted.to(tl.int32), axis=0)
    tl.atomic_add(contenders + batch, count, mask=count > 0, sem="relaxed")
    is_row = tl.max(could_win.to(tl.int32), axis=1) > 0
    if IS_EXACT and tl.max(is_row.to(tl.int32), axis=0) > 0:
        corrections = products(codebook, codebook_stride, rows, is_row, z, z_starts, s, s_starts, is_vector, R, True, BLOCK_R)
        exact = tl.where(is_row[:, None], logits + corrections, float("-inf"))
        keep_best(keys, sort_key(exact, ids[:, None]), batch, is_vector)


@triton.jit
def pool_kernel(
    base: tl.tensor,
    base_stride: tl.tensor,
    z: tl.tensor,
    z_stride: tl.tensor,
    s: tl.tensor,
    s_stride: tl.tensor,
    codebook: tl.tensor,
    codebook_stride: tl.tensor,
    candidates: tl.tensor,
    candidates_stride: tl.tensor,
    R: tl.tensor,
    K: tl.tensor,
    keys: tl.tensor,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """Raise keys [B] to the best corrected candidate's `sort_key`; candidates int64 [B, K], grid (blocks of candidates, B)."""
    row = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    is_candidate = places < K
    ids = tl.load(candidates + row * candidates_stride + places, mask=is_candidate, other=0)
    one = tl.zeros([1], tl.int64)
    corrections = products(
        codebook, codebook_stride, ids, is_candidate, z, row * z_stride + one, s, row * s_stride + one, one == 0, R, True, BLOCK_R
    )
    logits = tl.load(base + row * base_stride + ids, mask=is_candidate, other=float("-inf")).to(tl.float32) + tl.sum(corrections, axis=1)
    # A missing candidate has the id 0; the logit -inf alone would let it win where all others have that too.
    best = tl.max(tl.where(is_candidate, sort_key(logits, ids.to(tl.int32)), EMPTY_KEY), axis=0)
    tl.atomic_max(keys + row, best, sem="relaxed")
