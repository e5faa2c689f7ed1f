"""Backbone and head on TensorRT: a draft of fixed shape, replayed as CUDA graphs, and passes that read many features."""

from __future__ import annotations

import numpy as np

from domino_deploy.config import DrafterConfig
from domino_deploy.engines import DRAFT_PROFILE, FIRST_DRAFT_PROFILE, EngineManifest
from domino_deploy.runtime.backends.trt_engine import Engine, Replay
from domino_deploy.runtime.backends.trt_memory import Block, DeviceMemory
from domino_deploy.runtime.backends.trt_tensors import Caches, Tensors, bytes_from_rows
from domino_deploy.runtime.kv_cache import placed_block_mask
from domino_deploy.runtime.protocols import FloatArray
from domino_deploy.signature import (
    ANCHOR_IDS,
    ATTENTION_MASK,
    BASE_LOGITS,
    BLOCK_IDS,
    FEATURES,
    HIDDEN,
    POSITION_IDS,
    SLIDING_MASK,
    WRITE_INDEX,
)

_PLACES = (BLOCK_IDS, POSITION_IDS, ATTENTION_MASK, WRITE_INDEX)


class DraftPasses:
    """Passes of backbone and head, put on the stream and not waited for.

    A draft reads as many feature rows as a verify pass gives, since that shape never changes: behind those that were kept come
    others, which no mask shows and over which the next draft writes, and behind them the block.

    Args:
        backbone: `backbone.engine`.
        head: `head.engine`.
        manifest: of the engines.
        config: the drafter's shape.
        results: tokens that a cycle drafts and chooses; drafted ones are written there.

    Raises:
        EngineError: an engine does not take its shapes.
        CapacityError: the device has too little memory.
    """

    def __init__(self, backbone: Engine, head: Engine, manifest: EngineManifest, config: DrafterConfig, results: Block) -> None:
        self.stream = backbone.stream
        self.draft_rows, self.most_rows = (
            manifest.num_speculative_tokens + 1,
            max(manifest.prefill_rows, manifest.num_speculative_tokens + 1),
        )
        self._config = config
        self._tensors, self._head_tensors = Tensors(manifest.graphs["backbone"]), Tensors(manifest.graphs["head"])
        tensors, head_tensors = self._tensors, self._head_tensors
        self.caches = Caches(self.stream, tensors)
        sizes = self._sizes(self.most_rows)
        names = [*_PLACES, *([SLIDING_MASK] if SLIDING_MASK in tensors else [])]
        inputs = {name: tensors.layout(name, **sizes) for name in names}
        inputs |= {name: head_tensors.layout(name) for name in (ANCHOR_IDS,) if name in head_tensors}
        # One block for both profiles: a pass is over before the host writes for the next.
        self._inputs = Block(self.stream, inputs)
        self._features = Block(self.stream, {FEATURES: tensors.layout(FEATURES, **sizes)})
        self._dtype, self._row_size = tensors.layout(FEATURES, feature_rows=1).dtype, tensors.layout(FEATURES, feature_rows=1).size
        passed_on = {name: DeviceMemory(self.stream, tensors.layout(name).size) for name in (HIDDEN, BASE_LOGITS)}

        outputs = {name: memory.address for name, memory in passed_on.items()}
        self._passed_on = passed_on
        addresses = outputs | self.caches.addresses | self._features.addresses | {name: self._inputs.address(name) for name in names}
        self._draft = backbone.context(DRAFT_PROFILE, addresses, tensors.input_shapes(**self._sizes(self.draft_rows)))
        self._first_draft = backbone.context(FIRST_DRAFT_PROFILE, addresses)
        head_addresses = outputs | self._inputs.addresses | results.addresses
        head_addresses = {name: address for name, address in head_addresses.items() if name in head_tensors}
        self._head = head.context(DRAFT_PROFILE, head_addresses, head_tensors.input_shapes())
        self._draft_replay, self._head_replay = Replay(self._draft), Replay(self._head)

    def _sizes(self, feature_rows: int) -> dict[str, int]:
        return {"feature_rows": feature_rows, "context_rows": feature_rows + self._config.block_size}

    def clear(self) -> None:
        self.caches.clear()

    def take_features(self, address: int, rows: int) -> None:
        """The first `rows` rows of the next pass lie on the device at `address`."""
        self.stream.copy(self._features.address(FEATURES), address, rows * self._row_size)

    def take_host_features(self, features: FloatArray) -> None:
        """Likewise, on the host."""
        content = bytes_from_rows(features, self._dtype)
        self._features.bytes(FEATURES)[: content.size] = content
        self._features.upload(content.size)

    def backbone(self, start: int, rows: int, anchor: int) -> None:
        """Append `rows` feature rows, which were taken, behind `start` cached ones; run a block behind them that begins with `anchor`."""
        if rows <= self.draft_rows:
            self._place(start, rows, self.draft_rows, anchor)
            self._draft_replay.run(self.stream, self._run_draft)
        else:
            self._place(start, rows, rows, anchor)
            self._first_draft.set_shapes(self._tensors.input_shapes(**self._sizes(rows)))
            self._inputs.upload()
            self._first_draft.enqueue()

    def head(self) -> None:
        """Draft from the block of the last pass."""
        self._head_replay.run(self.stream, self._head.enqueue)

    def _run_draft(self) -> None:
        self._inputs.upload()
        self._draft.enqueue()

    def _place(self, start: int, rows: int, feature_rows: int, anchor: int) -> None:
        """What the host says of a pass over `feature_rows` rows, of which the first `rows` are features of tokens."""
        config, inputs, context = self._config, self._inputs, start + rows
        block = config.block_size
        block_ids = inputs.array(BLOCK_IDS)[0]
        block_ids[0], block_ids[1:] = anchor, config.mask_token_id
        if ANCHOR_IDS in self._head_tensors:
            inputs.array(ANCHOR_IDS)[0] = anchor
        positions = inputs.array(POSITION_IDS, (1, feature_rows + block))[0]
        positions[:feature_rows] = np.arange(start, start + feature_rows)
        positions[feature_rows:] = np.arange(context, context + block)
        inputs.array(WRITE_INDEX)[:] = start
        placed_block_mask(context, start + feature_rows, None, inputs.array(ATTENTION_MASK)[0, 0])
        if SLIDING_MASK in self._tensors:
            placed_block_mask(context, start + feature_rows, config.sliding_window, inputs.array(SLIDING_MASK)[0, 0])
