"""The PyTorch backend: the models of `domino_deploy.model` run eagerly.  Slow and plain, the oracle for the others.

The only module of the runtime that knows torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from domino_deploy.bundle import DRAFTER_FOLDER, TARGET_FOLDER, Bundle
from domino_deploy.checkpoint import open_drafter, open_target
from domino_deploy.errors import RequestError
from domino_deploy.model.drafter import DrafterModel
from domino_deploy.model.loading import TORCH_DTYPES, load_drafter, load_target
from domino_deploy.model.target import TargetModel
from domino_deploy.runtime.kv_cache import BoolArray, CacheRows, block_mask, causal_mask, sliding_block_mask
from domino_deploy.runtime.protocols import FloatArray, IntArray, Proposal, TargetRows


def open_pair(
    bundle: Bundle, *, capacity: int, threads: int | None = None, with_drafter: bool = True
) -> tuple[EagerTarget, EagerDrafter | None]:
    """Target and drafter of a bundle in its floating type, from its `target/` and `drafter/` checkpoints.

    Args:
        bundle: an opened bundle in a precision that this backend runs (`domino_deploy.backends`).
        capacity: tokens of the longest sequence.
        threads: of the whole process, since PyTorch knows no others; None leaves them as they are.
        with_drafter: False leaves the drafter's weights unread.

    Raises:
        RequestError: the bundle's drafter has a vocabulary of its own.
    """
    if bundle.form.draft_vocab_size is not None:
        raise RequestError(
            f"{bundle.path}: expected the whole vocabulary for the backend eager, found a draft vocabulary of "
            f"{bundle.form.draft_vocab_size} tokens. Run it with --backend ort, or export the pair again without --draft-vocab."
        )
    if threads is not None:
        torch.set_num_threads(threads)
    dtype = TORCH_DTYPES[bundle.precision.activations]
    target = load_target(open_target(bundle.path / TARGET_FOLDER), tapped_layers=bundle.drafter.target_layer_ids, dtype=dtype)
    drafter = load_drafter(open_drafter(bundle.path / DRAFTER_FOLDER), dtype=dtype) if with_drafter else None
    return EagerTarget(target, capacity), None if drafter is None else EagerDrafter(drafter, target, capacity)


class EagerTarget:
    """A target for one sequence.

    Args:
        model: in eval mode.
        capacity: rows its cache can hold at most.
    """

    def __init__(self, model: TargetModel, capacity: int) -> None:
        self._model = model
        self._rows = CacheRows(capacity)
        self._key_caches, self._value_caches = model.empty_caches(1, 0)

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def capacity(self) -> int:
        return self._rows.limit

    @property
    def length(self) -> int:
        return self._rows.length

    def reset(self) -> None:
        self._rows.reset()

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int] | IntArray, num_logits: int) -> TargetRows:
        """See `protocols.Target`."""
        start, rows = self._rows.length, len(token_ids)
        self._rows.reserve(rows)
        slots = self._rows.slots(start + rows)
        self._key_caches, self._value_caches = _grown(self._key_caches, slots), _grown(self._value_caches, slots)
        output = self._model(
            _int64(token_ids),
            torch.arange(start, start + rows)[None],
            _mask(causal_mask(start, np.empty((rows, self._key_caches[0].shape[2]), dtype=np.bool_))),
            torch.tensor([start]),
            torch.arange(rows - num_logits, rows)[None],
            self._key_caches,
            self._value_caches,
        )
        self._key_caches, self._value_caches = output.key_caches, output.value_caches
        return TargetRows(logits=output.logits[0].float().numpy(), features=output.features[0].float().numpy())

    def commit(self, rows: int) -> None:
        self._rows.commit(rows)


class EagerDrafter:
    """A Domino or DFlash drafter for one sequence.

    Args:
        model: in eval mode.
        target: gives embedding and LM head, which a drafter has none of.
        capacity: tokens of the longest sequence to draft for.
    """

    def __init__(self, model: DrafterModel, target: TargetModel, capacity: int) -> None:
        self._model = model
        self._embed = target.model.embed_tokens
        self._lm_head = target.lm_head
        self._rows = CacheRows(capacity + model.config.block_size)
        self._key_caches, self._value_caches = model.empty_caches(1, 0)

    @property
    def max_proposals(self) -> int:
        return self._model.config.num_proposals

    def reset(self) -> None:
        self._rows.reset()

    @torch.inference_mode()
    def propose(self, token_ids: Sequence[int], features: FloatArray, count: int) -> Proposal:
        """See `protocols.Drafter`."""
        started = perf_counter()
        hidden, anchor = self._backbone(token_ids, features)[:, :count], _int64(token_ids[-1:])[0]
        base_logits = self._lm_head(hidden)
        draft_ms = (perf_counter() - started) * 1e3
        drafted = self._model.draft(self._embed, anchor, hidden, base_logits)
        head_ms = (perf_counter() - started) * 1e3 - draft_ms
        return Proposal(token_ids=drafted[0].numpy(), draft_ms=draft_ms, head_ms=head_ms)

    def _backbone(self, token_ids: Sequence[int], features: FloatArray) -> Tensor:
        """Hidden states [1, N, M] of the proposal rows; the features become part of the cache, the block does not."""
        config = self._model.config
        self._rows.expect_features(len(features), len(token_ids))
        start, context, block = self._rows.length, len(token_ids) - 1, config.block_size
        self._rows.reserve(len(features) + block)
        slots = self._rows.slots(context + block)
        self._key_caches, self._value_caches = _grown(self._key_caches, slots), _grown(self._value_caches, slots)
        mask = np.empty((block, self._key_caches[0].shape[2]), dtype=np.bool_)
        sliding_mask = None
        if config.sliding_window is not None and config.has_sliding_layers:
            sliding_mask = _mask(sliding_block_mask(context, config.sliding_window, mask.copy()))
        output = self._model.cached(
            self._embed(self._model.block_ids(_int64(token_ids[-1:])[0])),
            torch.from_numpy(np.asarray(features))[None].to(self._embed.weight.dtype),
            torch.arange(start, context + block)[None],
            _mask(block_mask(context, mask)),
            torch.tensor([start]),
            self._key_caches,
            self._value_caches,
            sliding_mask,
        )
        self._key_caches, self._value_caches = output.key_caches, output.value_caches
        self._rows.commit(len(features))
        return self._model.proposal_rows(output.hidden)


def _grown(caches: list[Tensor], slots: int) -> list[Tensor]:
    """The caches with at least `slots` slots."""
    missing = slots - caches[0].shape[2]
    return caches if missing <= 0 else [torch.nn.functional.pad(cache, (0, 0, 0, missing)) for cache in caches]


def _int64(token_ids: Sequence[int] | IntArray) -> Tensor:
    return torch.tensor(np.asarray(token_ids, dtype=np.int64))[None]


def _mask(mask: BoolArray) -> Tensor:
    return torch.from_numpy(mask)[None, None]
