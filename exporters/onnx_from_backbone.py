"""The backbone graph: a block against the drafter's cache; hidden states, base logits, updated caches.

The block's embedding is the target's own, the base logits are its LM head's, or those of the rows that a draft vocabulary keeps.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
from torch import Tensor, nn

from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.exporters.graph import TargetEnds, constant, export_graph
from domino_deploy.model import rope
from domino_deploy.model.draft_vocab import DraftVocab
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.signature import GraphForm, backbone_signature

_FULL = GraphForm()


class BackboneGraph(nn.Module):
    """`DrafterModel.cached` between the target's embedding and LM head, with the flat inputs of `backbone_signature`."""

    def __init__(self, drafter: DrafterConfig, target: TargetConfig, draft_vocab_size: int | None) -> None:
        super().__init__()
        self.target = TargetEnds(target)
        self.drafter = DrafterModel(drafter)
        self.draft_vocab = None if draft_vocab_size is None else DraftVocab(draft_vocab_size, drafter.hidden_size, 0)
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
        lm_head = self.target.lm_head if self.draft_vocab is None else self.draft_vocab.lm_head
        return (hidden, lm_head(hidden), *updated)


def onnx_from_backbone(drafter: DrafterConfig, target: TargetConfig, form: GraphForm = _FULL) -> ir.Model:
    """The backbone as one graph, in float32.

    Its weights are initializers `drafter.<tensor name>`, `target.<tensor name>` and `draft_vocab.<tensor name>` without data.

    Args:
        drafter: the drafter.
        target: its target.
        form: draft vocabulary; its dtype is left to `precision.py`.
    """
    signature = backbone_signature(drafter, dataclasses.replace(form, dtype="float32"))
    derived = {"context_rows": ("feature_rows", drafter.block_size)}
    return export_graph(lambda: BackboneGraph(drafter, target, form.draft_vocab_size), signature, derived)
