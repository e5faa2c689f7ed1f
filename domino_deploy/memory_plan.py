"""Memory that serving a pair takes, from its shapes alone: weights at a precision, caches, working memory.

Weights and caches are exact; working memory is an estimate (formula: `_working_bytes`).  Not counted: the libraries themselves, and
what an engine keeps beside the weights (ONNX Runtime repacks matrices for its products).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from domino_deploy.checkpoint_tensors import Shapes, expected_drafter_tensors, expected_target_tensors
from domino_deploy.config import DecoderConfig, DrafterConfig, DrafterKind, TargetConfig
from domino_deploy.errors import OutOfRangeError
from domino_deploy.precision import Dtype, Precision
from domino_deploy.runtime.decode import PREFILL_ROWS
from domino_deploy.signature import GraphForm
from domino_deploy.stored_weights import DRAFT_VOCABULARY, PARTS, check_whole_blocks, part_of, stored_bytes, wanted_dtype

_FLOAT32 = 4  # bytes of logits and attention scores
_TOKEN_ID = 8  # bytes


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes for `batch` sequences of up to `context` tokens each.

    weights: by part of the pair; ..._per_token: cache of one token of one sequence; working: activations of the larger of a prefill
    pass and the first draft; logits: of one cycle.
    """

    batch: int
    context: int
    weights: Mapping[str, int]
    target_cache_per_token: int
    drafter_cache_per_token: int
    target_cache: int
    drafter_cache: int
    working: int
    logits: int

    @property
    def total(self) -> int:
        return sum(self.weights.values()) + self.target_cache + self.drafter_cache + self.working + self.logits

    def to_dict(self) -> dict[str, Any]:
        """For JSON, totals included."""
        return {**dataclasses.asdict(self), "total_weights": sum(self.weights.values()), "total": self.total}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What a plan is made for; without a drafter, plain decoding."""

    target: TargetConfig
    drafter: DrafterConfig | None
    form: GraphForm = dataclasses.field(default_factory=GraphForm)

    @property
    def longest_context(self) -> int:
        """Tokens that both models have positions for."""
        limits = [config.max_position_embeddings for config in (self.target, self.drafter) if config is not None]
        return min(limits)


def weight_bytes(pair: Pair, precision: Precision, sources: Mapping[str, Mapping[str, Dtype]] | None = None) -> dict[str, int]:
    """Bytes of a bundle's weights by part; the drafter uses the target's embedding and LM head, so these count once.

    Args:
        pair: target and drafter.
        precision: of the bundle.
        sources: types of the checkpoints' tensors, by "target" and "drafter" and canonical name; what is not named is bfloat16.
            They matter where integers leave a tensor as it is.

    Raises:
        RequestError: a matrix that is to be quantised has an input axis that is no whole number of blocks.
    """
    models: list[tuple[str, TargetConfig | DrafterConfig, Shapes]] = [("target", pair.target, expected_target_tensors(pair.target))]
    if pair.drafter is not None:
        models.append(("drafter", pair.drafter, expected_drafter_tensors(pair.drafter)))
    stored: list[tuple[str, tuple[int, ...], Dtype]] = []
    quantised: dict[str, int] = {}
    for owner, config, shapes in models:
        found = (sources or {}).get(owner, {})
        for name, shape in shapes.items():
            dtype = wanted_dtype(name, found.get(name, Dtype.BFLOAT16), config, precision)
            stored.append((part_of(name, config), shape, dtype))
            if dtype.is_quantised:
                quantised[f"{owner} {name}"] = shape[1]
    check_whole_blocks(quantised, precision.block_size)
    sizes: dict[str, int] = {}
    for part, shape, dtype in stored:
        sizes[part] = sizes.get(part, 0) + stored_bytes(shape, dtype, precision)
    if pair.form.draft_vocab_size is not None and pair.drafter is not None:
        sizes[DRAFT_VOCABULARY] = draft_vocabulary_bytes(pair.form.draft_vocab_size, pair.drafter, precision)
    return {part: sizes[part] for part in PARTS if part in sizes}


def plan_memory(pair: Pair, weights: Mapping[str, int], *, batch: int = 1, context: int) -> MemoryPlan:
    """A plan for weights of known size.

    Args:
        pair: target, drafter and the graphs' form.
        weights: bytes by part, from `weight_bytes` or of real files.
        batch: sequences at once.
        context: tokens of the longest one, prompt and answer.

    Raises:
        OutOfRangeError: less than one sequence or token, or more tokens than the models have positions for.
    """
    problems = {name: f"must be at least 1, found {value}" for name, value in (("batch", batch), ("context", context)) if value < 1}
    if context > pair.longest_context:
        problems["context"] = f"must be at most {pair.longest_context}, the models' positions, found {context}"
    if problems:
        raise OutOfRangeError(problems, "Correct them and plan again.")
    target, drafter = pair.target, pair.drafter
    width = _bytes_of(pair.form)
    per_token, draft_per_token = _cache_per_token(target, width), 0 if drafter is None else _cache_per_token(drafter, width)
    return MemoryPlan(
        batch=batch,
        context=context,
        weights=dict(weights),
        target_cache_per_token=per_token,
        drafter_cache_per_token=draft_per_token,
        target_cache=batch * context * per_token,
        drafter_cache=0 if drafter is None else batch * (context + drafter.block_size) * draft_per_token,
        working=batch * _working_bytes(pair, context),
        logits=batch * _logit_bytes(pair),
    )


def largest_batch(pair: Pair, weights: Mapping[str, int], memory: int, *, context: int) -> int:
    """Most sequences of `context` tokens that fit into `memory` bytes; 0 if not even one."""
    one, two = (plan_memory(pair, weights, batch=batch, context=context).total for batch in (1, 2))
    return 0 if memory < one else 1 + (memory - one) // (two - one)


def largest_context(pair: Pair, weights: Mapping[str, int], memory: int, *, batch: int) -> int:
    """Most tokens of each of `batch` sequences that fit into `memory` bytes, at most the models' positions; 0 if not even one."""
    return _last(lambda context: plan_memory(pair, weights, batch=batch, context=context).total <= memory, pair.longest_context)


def _last(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits, given that all smaller ones do, or 0."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _bytes_of(form: GraphForm) -> int:
    return Dtype(form.dtype).bits // 8


def _cache_per_token(config: DecoderConfig, width: int) -> int:
    """Keys and values of all layers; sliding-window layers keep every token as well."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * width


def draft_vocabulary_bytes(rows: int, drafter: DrafterConfig, precision: Precision) -> int:
    """Token ids, and the selected rows of LM head and codebook in the type of activations."""
    rank = drafter.emb_dim if drafter.kind is DrafterKind.DOMINO else 0
    return rows * (_TOKEN_ID + (drafter.hidden_size + rank) * precision.activations.bits // 8)


def _working_bytes(pair: Pair, context: int) -> int:
    """The larger of a prefill pass and the first draft, of one sequence.  In bytes, with

    R rows of a pass, C context, b bytes of an activation, M model width, I width of the MLP, Q and K widths of all query and of
    all key heads, H query heads, T taps, P rows of a block:

    layer(R, C)  b R (2 M + max(3 I, 2 Q + 2 K)) + 4 H R C    residual and normed rows, MLP or attention, and its scores
    prefill      layer(R, C) + b T M (C + R)                  features of the prompt so far and of the pass
    draft        layer(P, C + P) + b C (2 T M + M + 2 K)      of the drafter; features twice, their projection, one layer's keys
    """
    target, drafter, width = pair.target, pair.drafter, _bytes_of(pair.form)
    rows = min(PREFILL_ROWS, context)
    prefill = _layer_bytes(target, rows, context, width)
    if drafter is None:
        return prefill
    prefill += width * drafter.feature_size * (context + rows)
    keys = drafter.num_kv_heads * drafter.head_dim
    draft = _layer_bytes(drafter, drafter.block_size, context + drafter.block_size, width)
    draft += width * context * (2 * drafter.feature_size + drafter.hidden_size + 2 * keys)
    return max(prefill, draft)


def _layer_bytes(config: DecoderConfig, rows: int, slots: int, width: int) -> int:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    widest = 2 * config.hidden_size + max(3 * config.intermediate_size, 2 * queries + 2 * keys)
    return width * rows * widest + _FLOAT32 * config.num_heads * rows * slots


def _logit_bytes(pair: Pair) -> int:
    """The target's over all verified rows, the drafter's over all proposals, and two rows of the correction."""
    target, drafter = pair.target, pair.drafter
    if drafter is None:
        return _FLOAT32 * target.vocab_size
    draft_vocab = pair.form.draft_vocab_size or target.vocab_size
    corrected = 2 if drafter.kind is DrafterKind.DOMINO else 0
    return _FLOAT32 * (target.vocab_size * (drafter.num_proposals + 1) + draft_vocab * (drafter.num_proposals + corrected))
