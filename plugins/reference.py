"""The fused logit correction in plain PyTorch: the truth that every other form is compared with.

Shape legend: B batch, R rank, V vocabulary, K candidates.
"""

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


def candidates(base_logits: Tensor, size: int) -> Tensor:
    """The pool of each row of logits [..., V]: ids of the `size` highest, ties to the lowest id; int64 [..., size], rising."""
    order = torch.sort(base_logits, dim=-1, descending=True, stable=True).indices
    return order[..., :size].sort(dim=-1).values


def pooled_logit_correction(
    base_logits_BV: Tensor,
    hidden_projection_BR: Tensor,
    state_projection_BR: Tensor,
    codebook_VR: Tensor,
    codebook_norms_V: Tensor,
    candidates_BK: Tensor,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One drafted token per row out of its candidates, and whether a token outside of them could have won.  All in fp32.

    With m = SiLU(z + s), a token v has at most base_v + |w_v| |m| (Cauchy-Schwarz).  A row is certified if that, for every
    token outside its pool, is less than the best corrected logit inside; less, since a tie may go to the outside token.

    Both sides of the comparison give way by what rounding can add up to, so that it holds for the logits as computed by
    `fused_logit_correction` in fp32, whatever the order of its sums (`rounding_slack`).

    Args:
        base_logits_BV: of any floating type, as z, s and the codebook.
        hidden_projection_BR: z.
        state_projection_BR: s.
        codebook_VR: W2.
        codebook_norms_V: |w_v|, Euclidean, float32.
        candidates_BK: int64, rising, K >= 1.
        exact: where any row is not certified, take all rows' tokens from the full vocabulary.

    Returns:
        token_ids [B], int64: argmax of the corrected logits, ties to the lowest id.
        corrected_logits [B]: its corrected logit, float32.
        uncertified [B], bool: true where the pool does not settle it, whatever `exact` says.
    """
    base_logits_BV = base_logits_BV.float()
    bottleneck_BR = F.silu(hidden_projection_BR.float() + state_projection_BR.float())
    corrections_BK = (codebook_VR[candidates_BK].float() @ bottleneck_BR[:, :, None])[:, :, 0]
    corrected_BK = base_logits_BV.gather(-1, candidates_BK) + corrections_BK
    place_B1 = corrected_BK.argmax(dim=-1, keepdim=True)
    token_ids_B, best_B = candidates_BK.gather(-1, place_B1)[:, 0], corrected_BK.gather(-1, place_B1)[:, 0]

    slack = rounding_slack(codebook_VR.shape[1])
    length_B = torch.linalg.vector_norm(bottleneck_BR, dim=-1)
    bounds_BV = base_logits_BV + codebook_norms_V * (length_B * (1 + 4 * slack))[:, None]
    outside_B = bounds_BV.scatter(-1, candidates_BK, torch.finfo(torch.float32).min).amax(dim=-1)
    could_be_B = outside_B + slack * outside_B.abs()
    surely_is_B = best_B - slack * (best_B.abs() + 2 * codebook_norms_V[token_ids_B] * length_B)
    uncertified_B = ~(could_be_B < surely_is_B)  # written so that NaN is uncertified
    if exact and uncertified_B.any():
        token_ids_B, best_B = fused_logit_correction(base_logits_BV, hidden_projection_BR, state_projection_BR, codebook_VR)
    return token_ids_B, best_B, uncertified_B


def rounding_slack(rank: int) -> float:
    """c such that no corrected logit, computed in fp32, is off by more than c (|base_v| + |w_v| |m|).

    A sum of n rounded products is off by at most n u / (1 - n u) times the sum of their magnitudes, u = 2**-24 (Higham,
    Accuracy and Stability of Numerical Algorithms, section 3.1); that sum is at most |w_v| |m|.  Here n is the rank, one for
    the base logit, and some for SiLU.  Twice that also covers the second order and the few roundings of the bound itself.

    To spare passes over the vocabulary, |base_v| is not added up token by token: it is at most |bound_v| + |w_v| |m|.  So a
    bound x = base_v + (1 + 4 c) |w_v| |m| becomes x + c |x|, which rises with x and can wait until the largest is known; of the
    4 c, 2 c pay for |base_v|, the rest for the norms, which are sums of squares with an error of (rank / 2 + 2) u each.
    """
    return (rank + 8) * 2.0**-23
