"""The target graph: new rows against the cache; logits of the wanted rows, tapped features, updated caches."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from torch import Tensor, nn

from domino_deploy.config import TargetConfig
from domino_deploy.exporters.graph import constant, export_graph
from domino_deploy.model import rope
from domino_deploy.model.target import TargetModel
from domino_deploy.signature import target_signature


class TargetGraph(nn.Module):
    """`TargetModel` with the flat inputs and outputs of `target_signature`."""

    def __init__(self, config: TargetConfig, tapped_layers: Sequence[int]) -> None:
        super().__init__()
        self.target = TargetModel(config, tapped_layers)
        self.target.inverse_frequencies = constant(lambda: rope.inverse_frequencies(config.rope, config.head_dim)[0])

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, write_index: Tensor, logit_index: Tensor, *caches: Tensor
    ) -> tuple[Tensor, ...]:
        out = self.target(input_ids, position_ids, attention_mask, write_index, logit_index, caches[0::2], caches[1::2])
        updated = [cache for pair in zip(out.key_caches, out.value_caches, strict=True) for cache in pair]
        return (out.logits, out.features, *updated)


def onnx_from_target(config: TargetConfig, tapped_layers: Sequence[int]) -> ir.Model:
    """The target as one graph; its weights are initializers `target.<tensor name>` without data.

    Args:
        config: the target's shape.
        tapped_layers: layers whose outputs make up `features`.
    """
    return export_graph(lambda: TargetGraph(config, tapped_layers), target_signature(config, len(tapped_layers) * config.hidden_size))
