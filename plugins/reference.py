"""The fused logit correction in plain PyTorch: the truth that every other form is compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def corrected_logits(base_logits: Tensor, hidden_projection: Tensor, state_projection: Tensor, codebook_VR: Tensor) -> Tensor:
    """base + W2 SiLU(z + s), in the base logits' dtype, computed in fp32 (Domino, arXiv 2605.29707, section 5).

    Args:
        base_logits: [..., V].
        hidden_projection: z = W1[:, :M] h, [..., R].
        state_projection: s = W1[:, M:] state, [..., R].
        codebook_VR: W2.
    """
    bottleneck = F.silu(hidden_projection.float() + state_projection.float())
    return (base_logits.float() + bottleneck @ codebook_VR.float().T).to(base_logits.dtype)


def fused_logit_correction(
    base_logits_BV: Tensor, hidden_projection_BR: Tensor, state_projection_BR: Tensor, codebook_VR: Tensor
) -> tuple[Tensor, Tensor]:
    """One drafted token per row.

    Returns:
        token_ids [B], int64: argmax of the corrected logits, ties to the lowest id.
        corrected_logits [B]: its corrected logit, in the base logits' dtype.
    """
    corrected_BV = corrected_logits(base_logits_BV, hidden_projection_BR, state_projection_BR, codebook_VR)
    token_ids_B = corrected_BV.argmax(dim=-1)
    return token_ids_B, torch.gather(corrected_BV, -1, token_ids_B[:, None])[:, 0]
