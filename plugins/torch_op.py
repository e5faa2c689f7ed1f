"""`torch.ops.domino.fused_logit_correction`: the reference as a torch.library operator, one node in an exported graph."""

from __future__ import annotations

import torch
from torch import Tensor

from domino_deploy.plugins import reference


@torch.library.custom_op("domino::fused_logit_correction", mutates_args=())
def fused_logit_correction(
    base_logits_BV: Tensor, hidden_projection_BR: Tensor, state_projection_BR: Tensor, codebook_VR: Tensor
) -> tuple[Tensor, Tensor]:
    """See `reference.fused_logit_correction`."""
    return reference.fused_logit_correction(base_logits_BV, hidden_projection_BR, state_projection_BR, codebook_VR)


@fused_logit_correction.register_fake
def _(base_logits_BV: Tensor, hidden_projection_BR: Tensor, state_projection_BR: Tensor, codebook_VR: Tensor) -> tuple[Tensor, Tensor]:
    rows = base_logits_BV.shape[0]
    return base_logits_BV.new_empty(rows, dtype=torch.int64), base_logits_BV.new_empty(rows)
