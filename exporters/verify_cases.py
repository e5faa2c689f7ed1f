"""What the graphs are tried on: inputs made of real tokens, and what PyTorch makes of them.

A case fixes batch, rows and how full the caches are.  Caches are filled by PyTorch first and ragged across the batch, so
that every row sees another number of slots; slots beyond a row's own hold another row's keys and must not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from domino_deploy.exporters.verify_reference import Reference
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.layers import cached_mask
from domino_deploy.runtime.kv_cache import block_mask, sliding_block_mask
from domino_deploy.signature import (
    ANCHOR_IDS,
    ATTENTION_MASK,
    BASE_LOGITS,
    BLOCK_IDS,
    DRAFT_IDS,
    FEATURES,
    HIDDEN,
    INPUT_IDS,
    LOGIT_INDEX,
    LOGITS,
    POSITION_IDS,
    SLIDING_MASK,
    UNCERTIFIED,
    WRITE_INDEX,
    key_cache,
    updated,
    value_cache,
)

Array = NDArray[Any]

# Enough to give each row of each case other tokens; short, so that any tokenizer and any maximal length will do.
SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on until the evening.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "A train leaves the station at 9:40 and arrives 2 hours and 35 minutes later. When does it arrive?",
    "Speculative decoding drafts several tokens cheaply and verifies them with the target in one pass.",
)

# Slots behind the last row that a graph must leave alone.
_SPARE_SLOTS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of one run of a graph and PyTorch's outputs.

    For the head only: `logits` [B, N, V], by which PyTorch drafts, and, with a draft vocabulary, `token_ids` [V] of the columns.
    """

    graph: str
    name: str
    inputs: dict[str, Array]
    expected: dict[str, Array]
    logits: Array | None = None
    token_ids: Array | None = None


class TokenRows:
    """Rows of tokens out of a stream that repeats itself; each row starts elsewhere."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._stream = torch.tensor(token_ids)

    def rows(self, batch: int, length: int) -> Tensor:
        """int64 [batch, length]."""
        starts = torch.arange(batch)[:, None] * 23  # a step that is no divisor of the stream's length matters little
        return self._stream[(starts + torch.arange(length)) % len(self._stream)]


@torch.inference_mode()
def target_cases(reference: Reference, tokens: TokenRows) -> Iterator[Case]:
    """Single rows, small blocks, prompts; empty and filled caches; batch 1 and 3; the last positions of the model."""
    last = reference.target.config.max_position_embeddings
    yield _target_case(reference, tokens, "1 row", filled=[12], rows=1, wanted=1)
    yield _target_case(reference, tokens, "5 rows", filled=[12], rows=5, wanted=5)
    yield _target_case(reference, tokens, "prompt of 17", filled=[0], rows=17, wanted=1)
    yield _target_case(reference, tokens, "batch of 3, 1 row", filled=[3, 11, 7], rows=1, wanted=1)
    yield _target_case(reference, tokens, "batch of 3, 5 rows", filled=[3, 11, 7], rows=5, wanted=2)
    yield _target_case(reference, tokens, "last positions", filled=[9], rows=6, wanted=6, first_position=max(0, last - 15))


@torch.inference_mode()
def backbone_cases(reference: Reference, tokens: TokenRows) -> Iterator[Case]:
    """One, several and many feature rows; empty and filled caches; batch 1 and 3; the last positions of the model."""
    config = reference.drafter.config
    last = config.max_position_embeddings - config.block_size
    yield _backbone_case(reference, tokens, "1 feature row", filled=[14], rows=1)
    yield _backbone_case(reference, tokens, "4 feature rows", filled=[14], rows=4)
    yield _backbone_case(reference, tokens, "prompt of 29", filled=[0], rows=29)
    yield _backbone_case(reference, tokens, "batch of 3, 1 feature row", filled=[2, 13, 6], rows=1)
    yield _backbone_case(reference, tokens, "batch of 3, 4 feature rows", filled=[2, 13, 6], rows=4)
    yield _backbone_case(reference, tokens, "last positions", filled=[9], rows=3, first_position=max(0, last - 12))


@torch.inference_mode()
def head_cases(reference: Reference, tokens: TokenRows) -> Iterator[Case]:
    """All proposals and fewer, down to one; batch 1 and 3."""
    most = reference.drafter.config.num_proposals
    for batch, counts in ((1, {most, (most + 1) // 2, 2, 1}), (3, {most, 1})):
        anchor_B, hidden, base = _backbone_outputs(reference, tokens, batch)
        for count in sorted((count for count in counts if count <= most), reverse=True):
            name = f"batch of {batch}, {count} of {most} proposals"
            yield _head_case(reference, anchor_B, hidden[:, :count], base[:, :count], name)


def _target_case(
    reference: Reference, tokens: TokenRows, name: str, *, filled: list[int], rows: int, wanted: int, first_position: int = 0
) -> Case:
    target = reference.target
    batch, longest = len(filled), max(filled)
    ids, write_index = tokens.rows(batch, longest + rows), torch.tensor(filled)
    keys, values = target.empty_caches(batch, longest + rows + _SPARE_SLOTS)
    if longest:
        zeros = torch.zeros(batch, dtype=torch.int64)
        context = _target_inputs(ids[:, :longest], zeros, keys[0].shape[2], first_position)
        filled_caches = target(*context, torch.zeros(batch, 1, dtype=torch.int64), keys, values)
        keys, values = ([reference.rounded(cache) for cache in caches] for caches in (filled_caches.key_caches, filled_caches.value_caches))
    inputs = _target_inputs(ids[:, longest:], write_index, keys[0].shape[2], first_position)
    # Rows in another order in each sequence: a graph that took the last rows whatever is asked for would not pass.
    logit_index = (torch.arange(rows)[-wanted:] + torch.arange(batch)[:, None]) % rows
    out = target(*inputs, logit_index, keys, values)
    names = (INPUT_IDS, POSITION_IDS, ATTENTION_MASK, WRITE_INDEX, LOGIT_INDEX)
    return Case(
        graph="target",
        name=name,
        inputs=_arrays(dict(zip(names, (*inputs, logit_index), strict=True)) | _caches(keys, values)),
        expected=_arrays({LOGITS: out.logits, FEATURES: out.features} | _updated_caches(out.key_caches, out.value_caches)),
    )


def _target_inputs(ids: Tensor, write_index: Tensor, capacity: int, first_position: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    positions = first_position + write_index[:, None] + torch.arange(ids.shape[1])
    return ids, positions, cached_mask(write_index, ids.shape[1], capacity), write_index


def _backbone_case(reference: Reference, tokens: TokenRows, name: str, *, filled: list[int], rows: int, first_position: int = 0) -> Case:
    drafter = reference.drafter
    batch, longest, block = len(filled), max(filled), drafter.config.block_size
    ids = tokens.rows(batch, longest + rows + 1)
    features = reference.features(ids)
    keys, values = drafter.empty_caches(batch, longest + rows + block + _SPARE_SLOTS)
    if longest:
        context = _backbone_inputs(drafter, ids[:, longest], features[:, :longest], [0] * batch, keys[0].shape[2], first_position)
        context_caches = _run_backbone(reference, context, keys, values)[1:]
        keys, values = ([reference.rounded(cache) for cache in caches] for caches in context_caches)
    inputs = _backbone_inputs(drafter, ids[:, -1], features[:, longest:-1], filled, keys[0].shape[2], first_position)
    hidden, new_keys, new_values = _run_backbone(reference, inputs, keys, values)
    return Case(
        graph="backbone",
        name=name,
        inputs=_arrays(inputs | _caches(keys, values)),
        expected=_arrays({HIDDEN: hidden, BASE_LOGITS: reference.base_logits(hidden)} | _updated_caches(new_keys, new_values)),
    )


def _backbone_inputs(
    drafter: DrafterModel, anchor_B: Tensor, features: Tensor, filled: list[int], capacity: int, first_position: int
) -> dict[str, Tensor]:
    config, rows = drafter.config, features.shape[1]
    write_index = torch.tensor(filled)
    mask = np.empty((len(filled), 1, config.block_size, capacity), dtype=np.bool_)
    sliding_mask = mask.copy()
    for row, start in enumerate(filled):
        block_mask(start + rows, mask[row, 0])
        if config.sliding_window is not None:
            sliding_block_mask(start + rows, config.sliding_window, sliding_mask[row, 0])
    inputs = {
        BLOCK_IDS: drafter.block_ids(anchor_B),
        FEATURES: features,
        POSITION_IDS: first_position + write_index[:, None] + torch.arange(rows + config.block_size),
        ATTENTION_MASK: torch.from_numpy(mask),
        SLIDING_MASK: torch.from_numpy(sliding_mask),
        WRITE_INDEX: write_index,
    }
    if not config.has_sliding_layers:
        del inputs[SLIDING_MASK]
    return inputs


def _run_backbone(
    reference: Reference, inputs: dict[str, Tensor], keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Hidden states of the proposal rows, and the updated caches."""
    drafter = reference.drafter
    embedded = reference.target.model.embed_tokens(inputs[BLOCK_IDS])
    mask, sliding_mask = inputs[ATTENTION_MASK], inputs.get(SLIDING_MASK)
    out = drafter.cached(embedded, inputs[FEATURES], inputs[POSITION_IDS], mask, inputs[WRITE_INDEX], keys, values, sliding_mask)
    return drafter.proposal_rows(out.hidden), out.key_caches, out.value_caches


def _backbone_outputs(reference: Reference, tokens: TokenRows, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Anchor, hidden states and base logits behind a context of 20 tokens."""
    drafter, ids = reference.drafter, tokens.rows(batch, 21)
    features = reference.features(ids[:, :-1])
    keys, values = drafter.empty_caches(batch, features.shape[1] + drafter.config.block_size)
    inputs = _backbone_inputs(drafter, ids[:, -1], features, [0] * batch, keys[0].shape[2], 0)
    hidden = reference.rounded(_run_backbone(reference, inputs, keys, values)[0])
    return ids[:, -1], hidden, reference.base_logits(hidden)


def _head_case(reference: Reference, anchor_B: Tensor, hidden: Tensor, base: Tensor, name: str) -> Case:
    drafted, uncertified = reference.draft(anchor_B, hidden, base)
    inputs, expected = {BASE_LOGITS: base}, {DRAFT_IDS: drafted}
    if reference.drafter.head is not None:
        inputs |= {ANCHOR_IDS: anchor_B, HIDDEN: hidden}
        expected |= {} if reference.pool is None else {UNCERTIFIED: uncertified}
    vocab = reference.vocab
    return Case(
        graph="head",
        name=name,
        inputs=_arrays(inputs),
        expected=_arrays(expected),
        logits=reference.draft_logits(anchor_B, hidden, base, drafted).numpy(),
        token_ids=None if vocab is None else vocab.token_ids.numpy(),
    )


def _caches(keys: Sequence[Tensor], values: Sequence[Tensor]) -> dict[str, Tensor]:
    named = {key_cache(layer): cache for layer, cache in enumerate(keys)}
    return named | {value_cache(layer): cache for layer, cache in enumerate(values)}


def _updated_caches(keys: Sequence[Tensor], values: Sequence[Tensor]) -> dict[str, Tensor]:
    return {updated(name): cache for name, cache in _caches(keys, values).items()}


def _arrays(tensors: dict[str, Tensor]) -> dict[str, Array]:
    return {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors.items()}
