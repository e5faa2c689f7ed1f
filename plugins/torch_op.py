"""`torch.ops.domino.{fused,top_k,pooled}_logit_correction`: the references as torch.library operators, one node in an exported graph."""

from __future__ import annotations

import torch
from torch import Tensor

from domino_deploy.plugins import op, reference


@torch.library.custom_op(f"{op.DOMAIN}::fused_logit_correction", mutates_args=())
def fused_logit_correction(
    base_logits_BV: Tensor, hidden_projection_BR: Tensor, state_projection_BR: Tensor, codebook_VR: Tensor
) -> tuple[Tensor, Tensor]:
    """See `reference.fused_logit_correction`."""
    return reference.fused_logit_correction(base_logits_BV, hidden_projection_BR, state_projection_BR, codebook_VR)


@fused_logit_correction.register_fake
def _(base_logits_BV: Tensor, hidden_projection_BR: Tensor, state_projection_BR: Tensor, codebook_VR: Tensor) -> tuple[Tensor, Tensor]:
    rows = base_logits_BV.shape[0]
    return base_logits_BV.new_empty(rows, dtype=torch.int64), base_logits_BV.new_empty(rows)


@torch.library.custom_op(f"{op.DOMAIN}::top_k_logit_correction", mutates_args=())
def top_k_logit_correction(
    base_logits_BV: Tensor, hidden_projection_BR: Tensor, state_projection_BR: Tensor, codebook_VR: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.top_k_logit_correction`.

    A graph can hold it for k up to `op.MAX_TOP_K` only, the most that TensorRT builds: exporting a larger k is an error.
    """
    return reference.top_k_logit_correction(base_logits_BV, hidden_projection_BR, state_projection_BR, codebook_VR, k)


@top_k_logit_correction.register_fake
def _(
    base_logits_BV: Tensor, hidden_projection_BR: Tensor, state_projection_BR: Tensor, codebook_VR: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (base_logits_BV.shape[0], k)
    return (
        base_logits_BV.new_empty(shape, dtype=torch.int64),
        base_logits_BV.new_empty(shape, dtype=torch.float32),
        base_logits_BV.new_empty(shape, dtype=torch.float32),
    )


@torch.library.custom_op(f"{op.DOMAIN}::pooled_logit_correction", mutates_args=())
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
    return reference.pooled_logit_correction(
        base_logits_BV, hidden_projection_BR, state_projection_BR, codebook_VR, codebook_mean_R, deviations_V, candidates_BK, exact
    )


@pooled_logit_correction.register_fake
def _(
    base_logits_BV: Tensor,
    hidden_projection_BR: Tensor,
    state_projection_BR: Tensor,
    codebook_VR: Tensor,
    codebook_mean_R: Tensor,
    deviations_V: Tensor,
    candidates_BK: Tensor,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = base_logits_BV.shape[0]
    return (
        base_logits_BV.new_empty(rows, dtype=torch.int64),
        base_logits_BV.new_empty(rows, dtype=torch.float32),
        base_logits_BV.new_empty(rows, dtype=torch.bool),
    )
