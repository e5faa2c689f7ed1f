"""The Triton kernels as functions of tensors, with the signatures of `reference.py`; each allocates what it needs.

Rows may be strided, elements of a row lie side by side: other activations are copied, other weights refused.

Shape legend: B batch, R rank, V vocabulary, K candidates or tokens of a top-k.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from domino_deploy.errors import RequestError, listed
from domino_deploy.plugins import triton_bounds as bounds
from domino_deploy.plugins import triton_certified as certified
from domino_deploy.plugins import triton_kernels as kernels
from domino_deploy.plugins import triton_tuning as tuned
from domino_deploy.plugins.triton_primitives import EMPTY_KEY

MAX_TOP_K = 64  # no more than the rows of any tile
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def fused_logit_correction(
    base_logits_BV: Tensor, hidden_projection_BR: Tensor, state_projection_BR: Tensor, codebook_VR: Tensor
) -> tuple[Tensor, Tensor]:
    """One drafted token per row, of the whole vocabulary: token_ids int64 [B] and corrected_logits float32 [B]."""
    rows = _inputs(base_logits_BV, hidden_projection_BR, state_projection_BR, codebook_VR)
    keys = empty_keys(rows[0].shape[0], codebook_VR.device)
    correct(*rows, codebook_VR, keys)
    return _unpacked(keys)


def certified_logit_correction(
    base_logits_BV: Tensor,
    hidden_projection_BR: Tensor,
    state_projection_BR: Tensor,
    codebook_VR: Tensor,
    approximation: bounds.Approximation,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `fused_logit_correction`, by way of the codebook's int8 rows (`triton_bounds.by_int8_rows`).

    Returns:
        token_ids int64 [B], corrected_logits float32 [B], and int32 [B], tokens that had to be corrected exactly.  On a GPU the last
        varies from run to run, as a tile profits from what others have found so far; the first two do not.
    """
    rows = _inputs(base_logits_BV, hidden_projection_BR, state_projection_BR, codebook_VR)
    keys = empty_keys(rows[0].shape[0], codebook_VR.device)
    contenders_B = torch.zeros_like(keys, dtype=torch.int32)
    correct_certified(*rows, codebook_VR, approximation, keys, keys, contenders_B)
    return *_unpacked(keys), contenders_B


def pooled_logit_correction(
    base_logits_BV: Tensor,
    hidden_projection_BR: Tensor,
    state_projection_BR: Tensor,
    codebook_VR: Tensor,
    codebook_mean_R: Tensor,
    deviations_V: Tensor,
    candidates_BK: Tensor,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.pooled_logit_correction`."""
    rows = _inputs(base_logits_BV, hidden_projection_BR, state_projection_BR, codebook_VR)
    keys, thresholds = (empty_keys(rows[0].shape[0], codebook_VR.device) for _ in range(2))
    contenders_B = torch.zeros_like(keys, dtype=torch.int32)
    correct_pool(*rows, codebook_VR, candidates_BK.contiguous(), thresholds)
    marks_BV = torch.zeros(rows[0].shape, dtype=torch.int8, device=codebook_VR.device).scatter_(-1, candidates_BK, 1)
    approximation = bounds.by_mean(codebook_mean_R.float(), deviations_V.float())
    correct_certified(*rows, codebook_VR, approximation, thresholds, keys, contenders_B, marks_BV, is_exact=exact)
    return *_unpacked(keys if exact else thresholds), contenders_B > 0


def top_k_logit_correction(
    base_logits_BV: Tensor, hidden_projection_BR: Tensor, state_projection_BR: Tensor, codebook_VR: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.top_k_logit_correction`; k is at most `MAX_TOP_K`.

    Raises:
        RequestError: k is not in 1..`MAX_TOP_K`, or more than the vocabulary, or inputs that do not fit together.
    """
    base, z, s = _inputs(base_logits_BV, hidden_projection_BR, state_projection_BR, codebook_VR)
    rank = codebook_VR.shape[1]
    batch, vocab_size = base.shape
    most = min(MAX_TOP_K, vocab_size)
    if not 1 <= k <= most:
        raise RequestError(f"Top-k correction by Triton: expected k from 1 to {most}, found {k}. Choose a k in that range.")
    tuning, width = tuned.tuning(batch).correction, tuned.power_of_two(k)
    tiles = tuned.blocks(vocab_size, tuning.rows)
    keys = torch.empty(batch, tiles, width, dtype=torch.int64, device=base.device)
    highest, sums = (torch.empty(batch, tiles, dtype=torch.float32, device=base.device) for _ in range(2))
    kernels.top_k_tiles_kernel[(tiles,)](
        *_strided(base, z, s, codebook_VR),
        vocab_size,
        rank,
        batch,
        keys,
        highest,
        sums,
        K=width,
        BLOCK_V=tuning.rows,
        BLOCK_R=tuning.columns,
        BLOCK_B=tuned.batch_block(batch),
        num_warps=tuning.warps,
    )
    while keys.shape[1] > 1:
        programs = tuned.blocks(keys.shape[1] * width, tuned.MERGED_KEYS)
        merged = torch.empty(batch, programs, width, dtype=torch.int64, device=base.device)
        kernels.top_k_merge_kernel[(programs, batch)](keys, keys.shape[1] * width, merged, K=width, BLOCK=tuned.MERGED_KEYS)
        keys = merged
    token_ids = torch.empty(batch, k, dtype=torch.int64, device=base.device)
    logits, log_probs = (torch.empty(batch, k, dtype=torch.float32, device=base.device) for _ in range(2))
    kernels.top_k_finish_kernel[(batch,)](keys, highest, sums, tiles, k, token_ids, logits, log_probs, K=width, BLOCK_T=tuned.REDUCED_TILES)
    return token_ids, logits, log_probs


def empty_keys(batch: int, device: torch.device) -> Tensor:
    """int64 [B], less than the key of any token."""
    return torch.full((batch,), EMPTY_KEY.value, dtype=torch.int64, device=device)


def correct(base_BV: Tensor, z_BR: Tensor, s_BR: Tensor, codebook_VR: Tensor, keys_B: Tensor) -> None:
    """Launch `correction_kernel`."""
    (batch, vocab_size), rank = base_BV.shape, codebook_VR.shape[1]
    tuning = tuned.tuning(batch).correction
    kernels.correction_kernel[(tuned.blocks(vocab_size, tuning.rows),)](
        *_strided(base_BV, z_BR, s_BR, codebook_VR),
        vocab_size,
        rank,
        batch,
        keys_B,
        BLOCK_V=tuning.rows,
        BLOCK_R=tuning.columns,
        BLOCK_B=tuned.batch_block(batch),
        num_warps=tuning.warps,
    )


def correct_pool(base_BV: Tensor, z_BR: Tensor, s_BR: Tensor, codebook_VR: Tensor, candidates_BK: Tensor, keys_B: Tensor) -> None:
    """Launch `pool_kernel`."""
    (batch, size), tuning = candidates_BK.shape, tuned.ONE.correction
    certified.pool_kernel[(tuned.blocks(size, tuned.POOL_CANDIDATES), batch)](
        *_strided(base_BV, z_BR, s_BR, codebook_VR),
        candidates_BK,
        candidates_BK.stride(0),
        codebook_VR.shape[1],
        size,
        keys_B,
        BLOCK_K=tuned.POOL_CANDIDATES,
        BLOCK_R=tuning.columns,
        num_warps=tuning.warps,
    )


def correct_certified(
    base_BV: Tensor,
    z_BR: Tensor,
    s_BR: Tensor,
    codebook_VR: Tensor,
    approximation: bounds.Approximation,
    thresholds_B: Tensor,
    keys_B: Tensor,
    contenders_B: Tensor,
    marks_BV: Tensor | None = None,
    *,
    is_exact: bool = True,
) -> None:
    """Launch `certified_kernel`."""
    (batch, vocab_size), rank = base_BV.shape, codebook_VR.shape[1]
    tuning = tuned.tuning(batch).correction
    certified.certified_kernel[(tuned.blocks(vocab_size, tuning.rows),)](
        *_strided(base_BV, z_BR, s_BR, codebook_VR),
        approximation.scales if approximation.quantised is None else approximation.quantised,
        approximation.scales,
        approximation.mean,
        approximation.errors,
        contenders_B if marks_BV is None else marks_BV,
        bounds.slack(rank),
        vocab_size,
        rank,
        batch,
        thresholds_B,
        keys_B,
        contenders_B,
        IS_QUANTISED=approximation.quantised is not None,
        IS_POOL_MARKED=marks_BV is not None,
        IS_EXACT=is_exact,
        BLOCK_V=tuning.rows,
        BLOCK_R=tuning.columns,
        BLOCK_B=tuned.batch_block(batch),
        num_warps=tuning.warps,
    )


def check_can_run(device: torch.device) -> None:
    """Refuse what Triton cannot run on.

    Raises:
        RequestError: tensors in host memory in a process in which Triton does not interpret.
    """
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise RequestError(
            f"Triton kernels: expected tensors on a GPU, found {device}. Move them there, or set TRITON_INTERPRET=1 before Python starts"
            " to have the kernels interpreted, which is slow and for tests."
        )


def _strided(*tensors: Tensor) -> list[Any]:
    """Each tensor, followed by its row stride."""
    return [part for tensor in tensors for part in (tensor, tensor.stride(0))]


def _inputs(base_BV: Tensor, z_BR: Tensor, s_BR: Tensor, codebook_VR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Base logits, z and s as the kernels take them.

    Raises:
        RequestError: shapes, types or strides that do not fit, all of them.
    """
    check_can_run(codebook_VR.device)
    batch, (vocab_size, rank) = base_BV.shape[0], codebook_VR.shape
    expected = {"base_logits": (base_BV, vocab_size), "hidden_projection": (z_BR, rank), "state_projection": (s_BR, rank)}
    problems = [
        f"{name}: expected [{batch}, {width}] of a floating type, found {list(tensor.shape)} of {tensor.dtype}"
        for name, (tensor, width) in expected.items()
        if tensor.shape != (batch, width) or tensor.dtype not in FLOATS
    ]
    if not 1 <= batch <= tuned.MOST_ROWS:
        problems.append(f"batch: expected 1 to {tuned.MOST_ROWS} rows, found {batch}")
    if codebook_VR.stride(1) != 1 or codebook_VR.dtype not in FLOATS:
        problems.append(f"codebook: expected rows of contiguous floats, found {codebook_VR.dtype} with strides {codebook_VR.stride()}")
    if problems:
        raise RequestError(listed("The logit correction cannot run on these inputs:", problems, "Correct them."))
    base_BV, z_BR, s_BR = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (base_BV, z_BR, s_BR))
    return base_BV, z_BR, s_BR


def _unpacked(keys_B: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and logits float32 [B]."""
    token_ids_B, logits_B = torch.empty_like(keys_B), torch.empty_like(keys_B, dtype=torch.float32)
    kernels.unpack_kernel[(1,)](keys_B, token_ids_B, logits_B, keys_B.shape[0], BLOCK_B=tuned.MOST_ROWS)
    return token_ids_B, logits_B
