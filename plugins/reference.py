"""The logit correction in plain PyTorch: the truth that every other form is compared with.

Shape legend: B batch, R rank, V vocabulary, K candidates, T tiles of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from domino_deploy.errors import RequestError
from domino_deploy.plugins import op


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


def top_k_logit_correction(
    base_logits_BV: Tensor, hidden_projection_BR: Tensor, state_projection_BR: Tensor, codebook_VR: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The k best tokens of each row, all in fp32.

    NaN counts as more than any number, so a row that holds one says so: NaN comes first, and its log-probabilities are all NaN.

    Returns:
        token_ids [B, K], int64: by corrected logit, falling, ties to the lowest id.
        corrected_logits [B, K]: theirs, float32.
        log_probs [B, K]: their log-softmax over the whole vocabulary, float32.

    Raises:
        RequestError: k is not in 1..V.
    """
    vocab_size = base_logits_BV.shape[-1]
    if not 1 <= k <= vocab_size:
        raise RequestError(f"Top-k correction: expected k from 1 to the vocabulary's {vocab_size}, found {k}. Choose a k in that range.")
    corrected_BV = corrected_logits(base_logits_BV.float(), hidden_projection_BR, state_projection_BR, codebook_VR)
    token_ids_BK = torch.sort(corrected_BV, dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    log_probs_BV = F.log_softmax(corrected_BV, dim=-1)
    return token_ids_BK, corrected_BV.gather(-1, token_ids_BK), log_probs_BV.gather(-1, token_ids_BK)


def logit_correction_tiles(
    base_logits_BV: Tensor, hidden_projection_BR: Tensor, state_projection_BR: Tensor, codebook_VR: Tensor
) -> tuple[Tensor, Tensor]:
    """The best token of each tile of `op.TILE_SIZE` tokens, in fp32; the best of these is the token of `fused_logit_correction`.

    NaN counts as more than any number.

    Returns:
        tile_values [B, T], float32: the highest corrected logit of the tile.
        tile_ids [B, T], int32: its token, counted in the whole vocabulary, ties to the lowest id.
    """
    corrected_BV = corrected_logits(base_logits_BV.float(), hidden_projection_BR, state_projection_BR, codebook_VR)
    best = [tile.max(dim=-1) for tile in corrected_BV.split(op.TILE_SIZE, dim=-1)]
    ids = [tile.indices + number * op.TILE_SIZE for number, tile in enumerate(best)]
    return torch.stack([tile.values for tile in best], dim=-1), torch.stack(ids, dim=-1).to(torch.int32)


def candidates(base_logits: Tensor, size: int) -> Tensor:
    """The pool of each row of logits [..., V]: ids of the `size` highest, ties to the lowest id; int64 [..., size], rising."""
    order = torch.sort(base_logits, dim=-1, descending=True, stable=True).indices
    return order[..., :size].sort(dim=-1).values


def deviations(codebook_VR: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of the rows [R], and how far each row is from it [V] (Euclidean); float32."""
    mean_R = codebook_VR.float().mean(dim=0)
    return mean_R, torch.linalg.vector_norm(codebook_VR.float() - mean_R, dim=-1)


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
    """One drafted token per row out of its candidates, and whether a token outside of them could have won.  All in fp32.

    With m = SiLU(z + s) and any vector a, a token v has at most base_v + a m + |w_v - a| |m| (Cauchy-Schwarz).  The rows' mean is
    taken for a: rows share most of their length, which moves all logits alike and decides nothing.  A row of the batch is
    certified if that bound, for every token outside its pool, is less than the best corrected logit inside; less, since a tie
    may go to the outside token.

    Both sides of the comparison give way by what rounding can add up to, so that it holds for the logits as computed by
    `fused_logit_correction` in fp32, whatever the order of its sums (`rounding_slack`).

    Args:
        base_logits_BV: of any floating type, as z, s and the codebook.
        hidden_projection_BR: z.
        state_projection_BR: s.
        codebook_VR: W2.
        codebook_mean_R: a, float32 (`deviations`).
        deviations_V: |w_v - a|, float32.
        candidates_BK: int64, rising, K >= 1.
        exact: look at the tokens whose bound does not rule them out as well, so that the token is the whole vocabulary's.

    Returns:
        token_ids [B], int64: argmax of the corrected logits, ties to the lowest id.
        corrected_logits [B]: its corrected logit, float32.
        uncertified [B], bool: true where the pool does not settle it, whatever `exact` says.
    """
    base_logits_BV, codebook_VR = base_logits_BV.float(), codebook_VR.float()
    bottleneck_BR = F.silu(hidden_projection_BR.float() + state_projection_BR.float())
    corrected_BK = base_logits_BV.gather(-1, candidates_BK) + (codebook_VR[candidates_BK] @ bottleneck_BR[:, :, None])[:, :, 0]
    place_B1 = corrected_BK.argmax(dim=-1, keepdim=True)
    token_ids_B, best_B = candidates_BK.gather(-1, place_B1)[:, 0], corrected_BK.gather(-1, place_B1)[:, 0]

    slack = rounding_slack(codebook_VR.shape[1])
    length_B = torch.linalg.vector_norm(bottleneck_BR, dim=-1)
    shared_B, shared_size_B = bottleneck_BR @ codebook_mean_R, torch.linalg.vector_norm(codebook_mean_R) * length_B
    bounds_BV = base_logits_BV + deviations_V * (length_B * (1 + 4 * slack))[:, None]
    bounds_BV = bounds_BV.scatter(-1, candidates_BK, torch.finfo(torch.float32).min)
    could_be_BV = bounds_BV + slack * bounds_BV.abs()
    surely_is_B = best_B - shared_B - slack * (best_B.abs() + 2 * deviations_V[token_ids_B] * length_B + 5 * shared_size_B)
    could_win_BV = ~(could_be_BV < surely_is_B[:, None])  # written so that NaN could
    uncertified_B = could_win_BV.any(dim=-1)
    if exact and uncertified_B.any():
        others = could_win_BV.any(dim=0).nonzero()[:, 0]
        others_best_B, place_B = (base_logits_BV[:, others] + bottleneck_BR @ codebook_VR[others].T).max(dim=-1)
        wins_B = (others_best_B > best_B) | ((others_best_B == best_B) & (others[place_B] < token_ids_B))
        token_ids_B, best_B = torch.where(wins_B, others[place_B], token_ids_B), torch.where(wins_B, others_best_B, best_B)
    return token_ids_B, best_B, uncertified_B


def rounding_slack(rank: int) -> float:
    """c such that no corrected logit, computed in fp32, is off by more than c (|base_v| + |w_v| |m|).

    A sum of n rounded products is off by at most n u / (1 - n u) times the sum of their magnitudes, u = 2**-24 (Higham,
    Accuracy and Stability of Numerical Algorithms, section 3.1); that sum is at most |w_v| |m|.  Here n is the rank, one for
    the base logit, and some for SiLU.  Twice that also covers the second order and the few roundings of the bound itself.

    To spare passes over the vocabulary, |base_v| is not added up token by token.  With d = |w_v - a| |m|, it is at most |x| + d
    for a bound x = base_v + (1 + 4 c) d, which becomes x + c |x|; that rises with x, so the largest x decides.  Of the 4 c, 2 c pay
    for |base_v|, the rest for the deviations and |m|, which are roots of sums with an error of (rank / 2 + 2) u each.  And as
    |w_v| |m| is at most d + |a| |m|, c |a| |m| is paid once for the outside token, twice for the pool's best, once for a m and once
    for the rounding of w_v - a.
    """
    return (rank + 8) * 2.0**-23
