"""What certifies a token without reading the whole codebook: approximate rows of it, and a bound on what the approximation leaves out.

Take w_v for a row of the codebook, q_v for what stands for it, m = SiLU(z + s) and b_v for the base logit.  By Cauchy-Schwarz the
exact logit b_v + w_v m lies within |w_v - q_v| |m| of b_v + q_v m.  Both are computed in float32, each off by at most
c (|b_v| + |w_v| |m|), or |q_v|, where c is `reference.rounding_slack`: that is twice the usual bound, so it holds for tensor cores
too, which may cut off where others round (n additions: n 2**-23), and which are given m up to 2**-20.  With `slack` = 4 c

    error_v |m| (1 + slack) + slack |b_v|,    error_v = |w_v - q_v| (1 + slack) + slack (|w_v| + |q_v|),

bounds the difference of the two computed logits: 2 c of it are needed, the rest pays for the roundings of the bound itself.  A token whose
approximate logit plus that is less than a corrected logit of another token is not the best one.

Shape legend: R rank, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from domino_deploy.plugins import reference

_ROWS_AT_ONCE = 8192  # float64 copies of the codebook are as small as that
_LARGEST_INT8 = 127


@dataclass(frozen=True, kw_only=True)
class Approximation:
    """Of a codebook.

    quantised: int8 [V, R], or None if all rows are approximated by their mean.
    scales: float32 [V], of the quantised rows.
    mean: float32 [R]; zeros with quantised rows.
    errors: float32 [V], error_v.
    """

    quantised: Tensor | None
    scales: Tensor
    mean: Tensor
    errors: Tensor


def slack(rank: int) -> float:
    """4 c (see above)."""
    return 4 * reference.rounding_slack(rank)


def by_int8_rows(codebook_VR: Tensor) -> Approximation:
    """Each row as int8 times a scale, rounded to the nearest; a row that is not finite is never ruled out."""
    vocab_size, rank = codebook_VR.shape
    quantised_VR = torch.empty(vocab_size, rank, dtype=torch.int8, device=codebook_VR.device)
    scales_V, errors_V = (torch.empty(vocab_size, dtype=torch.float32, device=codebook_VR.device) for _ in range(2))
    for start in range(0, vocab_size, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        exact = codebook_VR[rows].double()
        is_finite = exact.isfinite().all(dim=-1)
        exact = torch.where(is_finite[:, None], exact, 0.0)
        scales = (exact.abs().amax(dim=-1) / _LARGEST_INT8).float()
        quantised = (exact / scales.double().clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round()
        quantised = quantised.clamp(-_LARGEST_INT8, _LARGEST_INT8)
        stand_in = quantised * scales.double()[:, None]
        residuals, lengths, stand_in_lengths = (torch.linalg.vector_norm(part, dim=-1) for part in (exact - stand_in, exact, stand_in))
        errors = residuals * (1 + slack(rank)) + slack(rank) * (lengths + stand_in_lengths)
        quantised_VR[rows], scales_V[rows] = quantised.to(torch.int8), scales
        errors_V[rows] = torch.where(is_finite, errors, torch.inf).float()
    return Approximation(quantised=quantised_VR, scales=scales_V, mean=torch.zeros_like(scales_V[:1]).repeat(rank), errors=errors_V)


def by_mean(codebook_mean_R: Tensor, deviations_V: Tensor) -> Approximation:
    """All rows as their mean (`reference.deviations`); |w_v| is at most the deviation and the mean's length together."""
    allowed = slack(codebook_mean_R.shape[0])
    errors_V = deviations_V * (1 + 2 * allowed) + 2 * allowed * torch.linalg.vector_norm(codebook_mean_R)
    return Approximation(quantised=None, scales=deviations_V, mean=codebook_mean_R, errors=errors_V)
