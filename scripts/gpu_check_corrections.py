"""The forms of the logit correction that there are kernels for, random inputs for them, and float64 to compare them with.

Shape legend: B batch, R rank, V vocabulary, T tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpu_check_context import Context
from torch import Tensor

from domino_deploy.plugins import op, reference, triton_bounds, triton_kernels, triton_ops, triton_tuning
from domino_deploy.plugins.trt_plugin_kernels import DEFAULT_TACTIC, TACTICS

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FORMS = ("tiles", "fused", "certified", "pooled")
POOL = 64  # candidates; published trees get no better beyond 64 (DominoTree's figures)

# Token ids int64 [B] and corrected logits float32 [B].
Launch = Callable[[], tuple[Tensor, Tensor]]


class CheckFailed(Exception):
    """Results that are not what they must be, one line each."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Inputs: base [B, V], z and s [B, R], all float32; codebook [V, R]."""

    base: Tensor
    z: Tensor
    s: Tensor
    codebook: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.base, self.z, self.s, self.codebook

    @property
    def bytes(self) -> int:
        """Read once each, and a token id with its logit written per row."""
        return sum(tensor.nbytes for tensor in self.tensors) + 12 * len(self.base)


def random_correction(context: Context, batch: int, vocab_size: int, dtype: torch.dtype, seed: int = 0) -> Correction:
    """Base logits with a standard deviation of 2, corrections with one of about 1."""
    random, rank = context.generator(seed), context.sizes.rank

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=context.device, generator=random)

    codebook = (normal(vocab_size, rank) * 2 * rank**-0.5).to(dtype)
    return Correction(base=2 * normal(batch, vocab_size), z=normal(batch, rank), s=normal(batch, rank), codebook=codebook)


def forms_of(inputs: Correction) -> Mapping[str, Launch]:
    """Every kernel's way to the whole vocabulary's best token, by the names in `FORMS`; what a form prepares once is prepared here."""
    approximation = triton_bounds.by_int8_rows(inputs.codebook)
    mean_and_deviations = reference.deviations(inputs.codebook)
    candidates = reference.candidates(inputs.base, min(POOL, inputs.base.shape[1]))
    launch_tiles, launch_reduction = tiles_then_reduction(inputs)

    def tiles() -> tuple[Tensor, Tensor]:
        launch_tiles()
        return launch_reduction()

    return {
        "tiles": tiles,
        "fused": lambda: triton_ops.fused_logit_correction(*inputs.tensors),
        "certified": lambda: triton_ops.certified_logit_correction(*inputs.tensors, approximation)[:2],
        "pooled": lambda: triton_ops.pooled_logit_correction(*inputs.tensors, *mean_and_deviations, candidates, True)[:2],
    }


def tiles_then_reduction(inputs: Correction, tactic: int = DEFAULT_TACTIC) -> tuple[Launch, Launch]:
    """The two launches of the plugin's kernels; outputs start as NaN and -1, so that what is not written shows."""
    (batch, vocab), rank = inputs.base.shape, inputs.z.shape[1]
    tiles, like = triton_tuning.blocks(vocab, op.TILE_SIZE), inputs.base
    values, ids = like.new_full((batch, tiles), torch.nan), like.new_full((batch, tiles), -1, dtype=torch.int32)
    best, tokens = like.new_full((batch,), torch.nan), like.new_full((batch,), -1, dtype=torch.int64)

    def launch_tiles() -> tuple[Tensor, Tensor]:
        triton_kernels.correction_tiles_kernel[(tiles, batch)](
            *(*inputs.tensors, vocab, rank, values, ids),
            BLOCK_V=op.TILE_SIZE,
            BLOCK_R=TACTICS[tactic].rank_block,
            num_warps=TACTICS[tactic].num_warps,
        )
        return ids, values

    def launch_reduction() -> tuple[Tensor, Tensor]:
        triton_kernels.reduce_tiles_kernel[(batch,)](values, ids, tiles, tokens, best, BLOCK_T=triton_tuning.REDUCED_TILES)
        return tokens, best

    return launch_tiles, launch_reduction


def plain_correction(inputs: Correction) -> Tensor:
    """The correction as PyTorch users write it, products in the codebook's dtype: token ids [B]."""
    bottleneck = F.silu(inputs.z + inputs.s).to(inputs.codebook.dtype)
    return (inputs.base + F.linear(bottleneck, inputs.codebook)).argmax(dim=-1)


def exact_logits(inputs: Correction) -> tuple[Tensor, Tensor]:
    """Corrected logits in float64 [B, V], and how far fp32 arithmetic may be off (`reference.rounding_slack`)."""
    bottleneck, codebook = F.silu(inputs.z.double() + inputs.s.double()), inputs.codebook.double()
    lengths = torch.linalg.vector_norm(bottleneck, dim=-1)[:, None] * torch.linalg.vector_norm(codebook, dim=-1)
    slack = reference.rounding_slack(codebook.shape[1])
    return inputs.base.double() + bottleneck @ codebook.T, slack * (inputs.base.double().abs() + lengths)
