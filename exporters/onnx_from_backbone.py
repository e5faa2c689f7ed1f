"""The backbone graph: a block against the drafter's cache; hidden states, base logits, updated caches.

The block's embedding and the base logits are the target's own embedding and LM head.
"""

from __future__ import annotations

import onnx_ir as ir
from torch import Tensor, nn

from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.exporters.graph import TargetEnds, constant, export_graph
from domino_deploy.model import rope
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.signature import backbone_signature


class BackboneGraph(nn.Module):
    """`DrafterModel.cached` between the target's embedding and LM head, with the flat inputs of `backbone_signature`."""

    def __init__(self, drafter: DrafterConfig, target: TargetConfig) -> None:
        super().__init__()
        self.target = TargetEnds(target)
        self.drafter = DrafterModel(drafter)
        self.drafter.inverse_frequencies = constant(lambda: rope.inverse_frequencies(drafter.rope, drafter.head_dim)[0])

    def forward(
        self, block_ids: Tensor, features: Tensor, position_ids: Tensor, attention_mask: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        # The sliding mask is an input of drafters with sliding layers only.
        sliding_mask, rest = (rest[0], rest[1:]) if self.drafter.config.has_sliding_layers else (None, rest)
        write_index, *caches = rest
        embedded = self.target.model.embed_tokens(block_ids)
        out = self.drafter.cached(embedded, features, position_ids, attention_mask, write_index, caches[0::2], caches[1::2], sliding_mask)
        hidden = self.drafter.proposal_rows(out.hidden)
        updated = [cache for pair in zip(out.key_caches, out.value_caches, strict=True) for cache in pair]
        return (hidden, self.target.lm_head(hidden), *updated)


def onnx_from_backbone(drafter: DrafterConfig, target: TargetConfig) -> ir.Model:
    """The backbone as one graph; its weights are initializers `drafter.<tensor name>` and `target.<tensor name>` without data."""
    derived = {"context_rows": ("feature_rows", drafter.block_size)}
    return export_graph(lambda: BackboneGraph(drafter, target), backbone_signature(drafter), derived)
