"""THE table of graph inputs and outputs: names, dtypes, symbolic dimensions, meanings.

Exporters write graphs by it, the manifest carries it, backends bind by it.

Symbolic dimensions: batch; rows (new target rows); logit_rows (rows whose logits are wanted); capacity (slots of the
target's cache); feature_rows (newly accepted target rows); context_rows (feature rows and block rows together);
draft_capacity (slots of the drafter's cache); proposals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from domino_deploy.config import DrafterConfig, DrafterKind, TargetConfig

Dim = int | str

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
ATTENTION_MASK = "attention_mask"
SLIDING_MASK = "sliding_attention_mask"
WRITE_INDEX = "write_index"
LOGIT_INDEX = "logit_index"
LOGITS = "logits"
GREEDY_IDS = "greedy_ids"
FEATURES = "features"
BLOCK_IDS = "block_ids"
HIDDEN = "hidden"
BASE_LOGITS = "base_logits"
ANCHOR_IDS = "anchor_ids"
DRAFT_IDS = "draft_ids"
UNCERTIFIED = "uncertified"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One input or output of a graph."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    meaning: str


@dataclass(frozen=True, kw_only=True)
class GraphSignature:
    """Inputs and outputs of one graph, in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, kw_only=True)
class GraphForm:
    """What an export may choose about inputs and outputs.

    dtype: of caches, features and hidden states: "float32", "float16" or "bfloat16"; logits are float32 in any case.
    draft_vocab_size: rows of the drafter's own LM head, a selection of the target's; None for all of them.
    candidate_pool: tokens per position that the correction looks at; 0 for the full vocabulary.
    """

    dtype: str = "float32"
    draft_vocab_size: int | None = None
    candidate_pool: int = 0


DEFAULT_FORM = GraphForm()


def key_cache(layer: int) -> str:
    return f"key_cache.{layer}"


def value_cache(layer: int) -> str:
    return f"value_cache.{layer}"


def updated(cache: str) -> str:
    """Name of a cache's output; backends may bind it to the input's memory."""
    return f"updated_{cache}"


def target_signature(config: TargetConfig, feature_size: int, form: GraphForm = DEFAULT_FORM) -> GraphSignature:
    """The target graph: new rows against the cache, logits of chosen rows, tapped features of all new rows."""
    dtype = form.dtype
    caches = _caches(config.num_layers, ("batch", config.num_kv_heads, "capacity", config.head_dim), dtype)
    inputs = [
        _spec(INPUT_IDS, "int64", ("batch", "rows"), "new tokens"),
        _spec(POSITION_IDS, "int64", ("batch", "rows"), "their positions"),
        _spec(ATTENTION_MASK, "bool", ("batch", 1, "rows", "capacity"), "true where a row may see a cache slot, its own included"),
        _spec(WRITE_INDEX, "int64", ("batch",), "first cache slot of the new rows"),
        _spec(LOGIT_INDEX, "int64", ("batch", "logit_rows"), "rows whose logits are wanted"),
    ]
    outputs = [
        _spec(LOGITS, "float32", ("batch", "logit_rows", config.vocab_size), "logits of the wanted rows"),
        _spec(FEATURES, dtype, ("batch", "rows", feature_size), "outputs of the tapped layers, side by side"),
    ]
    return GraphSignature(inputs=(*inputs, *caches), outputs=(*outputs, *_updated(caches)))


def backbone_signature(config: DrafterConfig, form: GraphForm = DEFAULT_FORM) -> GraphSignature:
    """The draft backbone: a block against the drafter's cache, to which the newly accepted features are appended."""
    dtype, vocab_size = form.dtype, form.draft_vocab_size or config.vocab_size
    caches = _caches(config.num_layers, ("batch", config.num_kv_heads, "draft_capacity", config.head_dim), dtype)
    mask_shape = ("batch", 1, config.block_size, "draft_capacity")
    inputs = [
        _spec(BLOCK_IDS, "int64", ("batch", config.block_size), "the anchor, then mask tokens"),
        _spec(FEATURES, dtype, ("batch", "feature_rows", config.feature_size), "target features of the newly accepted tokens"),
        _spec(POSITION_IDS, "int64", ("batch", "context_rows"), "positions of the feature rows, then of the block rows"),
        _spec(ATTENTION_MASK, "bool", mask_shape, "true where a block row may see a cache slot"),
    ]
    if config.has_sliding_layers:
        inputs.append(_spec(SLIDING_MASK, "bool", mask_shape, "the same, for sliding-window layers"))
    inputs.append(_spec(WRITE_INDEX, "int64", ("batch",), "cache slot of the first feature row; the block follows the features"))
    outputs = [
        _spec(HIDDEN, dtype, ("batch", config.num_proposals, config.hidden_size), "row j predicts offset j + 1 from the anchor"),
        _spec(BASE_LOGITS, "float32", ("batch", config.num_proposals, vocab_size), "the target's LM head on those rows"),
    ]
    return GraphSignature(inputs=(*inputs, *caches), outputs=(*outputs, *_updated(caches)))


def target_trunk_signature(config: TargetConfig, feature_size: int, form: GraphForm = DEFAULT_FORM) -> GraphSignature:
    """The target up to its LM head: hidden states of the wanted rows in place of their logits."""
    whole = target_signature(config, feature_size, form)
    hidden = _spec(HIDDEN, form.dtype, ("batch", "logit_rows", config.hidden_size), "of the wanted rows, for the LM head")
    return GraphSignature(inputs=whole.inputs, outputs=(hidden, *(spec for spec in whole.outputs if spec.name != LOGITS)))


def backbone_trunk_signature(config: DrafterConfig, form: GraphForm = DEFAULT_FORM) -> GraphSignature:
    """The backbone up to the target's LM head."""
    whole = backbone_signature(config, form)
    return GraphSignature(inputs=whole.inputs, outputs=tuple(spec for spec in whole.outputs if spec.name != BASE_LOGITS))


def lm_head_signature(config: TargetConfig, form: GraphForm = DEFAULT_FORM) -> GraphSignature:
    """The target's LM head, on rows of either trunk."""
    hidden = _spec(HIDDEN, form.dtype, ("batch", "logit_rows", config.hidden_size), "from a trunk")
    logits = _spec(LOGITS, "float32", ("batch", "logit_rows", config.vocab_size), "their logits")
    return GraphSignature(inputs=(hidden,), outputs=(logits,))


def head_signature(config: DrafterConfig, form: GraphForm = DEFAULT_FORM) -> GraphSignature:
    """The head: greedy rollout over the first `proposals` rows (all or fewer); a DFlash drafter's head is argmax alone."""
    vocab_size = form.draft_vocab_size or config.vocab_size
    inputs = [_spec(BASE_LOGITS, "float32", ("batch", "proposals", vocab_size), "from the backbone")]
    outputs = [_spec(DRAFT_IDS, "int64", ("batch", "proposals"), "drafted tokens")]
    if config.kind is DrafterKind.DOMINO:
        inputs = [
            _spec(ANCHOR_IDS, "int64", ("batch",), "last committed token"),
            _spec(HIDDEN, form.dtype, ("batch", "proposals", config.hidden_size), "from the backbone"),
            *inputs,
        ]
        if form.candidate_pool:
            outputs.append(_spec(UNCERTIFIED, "int64", ("batch",), "proposals for which a token outside the pool could have won"))
    return GraphSignature(inputs=tuple(inputs), outputs=tuple(outputs))


def _spec(name: str, dtype: str, shape: tuple[Dim, ...], meaning: str) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, meaning=meaning)


def _caches(layers: int, shape: tuple[Dim, ...], dtype: str) -> list[TensorSpec]:
    specs = []
    for layer in range(layers):
        specs.append(_spec(key_cache(layer), dtype, shape, f"keys of layer {layer}"))
        specs.append(_spec(value_cache(layer), dtype, shape, f"values of layer {layer}"))
    return specs


def _updated(caches: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [_spec(updated(cache.name), cache.dtype, cache.shape, f"{cache.meaning}, new rows written") for cache in caches]
