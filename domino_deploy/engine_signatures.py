"""Inputs and outputs of engines: those of the bundle's graphs, with what engines have in fixed sizes, and the greedy tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from domino_deploy.config import DrafterConfig, TargetConfig
from domino_deploy.signature import (
    BASE_LOGITS,
    GREEDY_IDS,
    HIDDEN,
    LOGITS,
    GraphForm,
    GraphSignature,
    TensorSpec,
    backbone_signature,
    head_signature,
    target_signature,
)


def capacity_of(max_model_len: int, num_speculative_tokens: int) -> int:
    """Slots of the target's cache: a verify pass may write all its rows behind the last token that fits."""
    return max_model_len + num_speculative_tokens + 1


def engine_signatures(
    target: TargetConfig, drafter: DrafterConfig, form: GraphForm, *, max_model_len: int, num_speculative_tokens: int
) -> dict[str, GraphSignature]:
    """Inputs and outputs of the three engines: the bundle's, with caches and proposals of fixed size, and the target's greedy tokens."""
    capacity = capacity_of(max_model_len, num_speculative_tokens)
    sizes = {"capacity": capacity, "draft_capacity": capacity + drafter.block_size, "proposals": num_speculative_tokens}
    target_graph = target_signature(target, drafter.feature_size, form)
    at_logits = [spec.name for spec in target_graph.outputs].index(LOGITS) + 1
    meaning = "their argmax, the lowest id of equals; -1 for NaN, +inf, or nothing but -inf"
    greedy = TensorSpec(name=GREEDY_IDS, dtype="int64", shape=("batch", "logit_rows"), meaning=meaning)
    outputs = (*target_graph.outputs[:at_logits], greedy, *target_graph.outputs[at_logits:])
    backbone = backbone_signature(drafter, form)
    proposed = tuple(
        dataclasses.replace(spec, shape=("batch", num_speculative_tokens, spec.shape[2])) if spec.name in (HIDDEN, BASE_LOGITS) else spec
        for spec in backbone.outputs
    )
    signatures = {
        "target": dataclasses.replace(target_graph, outputs=outputs),
        "backbone": dataclasses.replace(backbone, outputs=proposed),
        "head": head_signature(drafter, form),
    }
    return {name: _sized(signature, sizes) for name, signature in signatures.items()}


def _sized(signature: GraphSignature, sizes: Mapping[str, int]) -> GraphSignature:
    def sized(spec: TensorSpec) -> TensorSpec:
        return dataclasses.replace(spec, shape=tuple(sizes.get(size, size) if isinstance(size, str) else size for size in spec.shape))

    return GraphSignature(inputs=tuple(map(sized, signature.inputs)), outputs=tuple(map(sized, signature.outputs)))
