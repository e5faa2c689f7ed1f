"""The target on TensorRT: verify passes of one fixed shape, replayed as a CUDA graph, and prefill passes of any length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from domino_deploy.engines import PREFILL_PROFILE, VERIFY_PROFILE, EngineManifest
from domino_deploy.runtime.backends.trt_engine import Engine, Replay
from domino_deploy.runtime.backends.trt_memory import Block, DeviceMemory, PinnedMemory
from domino_deploy.runtime.backends.trt_tensors import Caches, Tensors, rows_from_bytes
from domino_deploy.runtime.kv_cache import causal_mask
from domino_deploy.runtime.protocols import FloatArray, IntArray
from domino_deploy.signature import (
    ATTENTION_MASK,
    DRAFT_IDS,
    FEATURES,
    GREEDY_IDS,
    INPUT_IDS,
    LOGIT_INDEX,
    LOGITS,
    POSITION_IDS,
    WRITE_INDEX,
)

_PLACES = (POSITION_IDS, ATTENTION_MASK, WRITE_INDEX, LOGIT_INDEX)


class TargetPasses:
    """Passes of the target, put on the stream and not waited for.

    A verify pass has one row more than a cycle drafts.  A shorter one is filled up with rows that none before them sees, and that
    are never committed.

    Args:
        engine: `target.engine`.
        manifest: of the engines.
        results: tokens that a cycle drafts and chooses; greedy ones are written there.

    Raises:
        EngineError: the engine does not take its shapes.
        CapacityError: the device has too little memory.
    """

    def __init__(self, engine: Engine, manifest: EngineManifest, results: Block) -> None:
        self.stream = engine.stream
        self.verify_rows, self.prefill_rows = manifest.num_speculative_tokens + 1, manifest.prefill_rows
        self._results = results
        self._tensors = Tensors(manifest.graphs["target"])
        self.caches = Caches(self.stream, self._tensors)
        features = self._tensors.layout(FEATURES, rows=max(self.verify_rows, self.prefill_rows))
        logits = self._tensors.layout(LOGITS, logit_rows=self.verify_rows)
        self._dtype, self._width, self.vocab_size = features.dtype, features.shape[-1], logits.shape[-1]
        self.row_size = features.size // features.shape[1]
        self.features, self._host_features = DeviceMemory(self.stream, features.size), PinnedMemory(self.stream.cuda, features.size)
        self._logits, self._host_logits = DeviceMemory(self.stream, logits.size), PinnedMemory(self.stream.cuda, logits.size)

        verify_sizes = {"rows": self.verify_rows, "logit_rows": self.verify_rows}
        prefill_sizes = {"rows": self.prefill_rows, "logit_rows": 1}
        # A verify pass has its tokens apart from what else the host says: the head may have drafted them.
        self._ids = Block(self.stream, {INPUT_IDS: self._tensors.layout(INPUT_IDS, **verify_sizes)})
        self._verify_inputs = Block(self.stream, {name: self._tensors.layout(name, **verify_sizes) for name in _PLACES})
        self._verify_inputs.array(LOGIT_INDEX)[0] = np.arange(self.verify_rows)
        self._prefill_inputs = Block(self.stream, {name: self._tensors.layout(name, **prefill_sizes) for name in (INPUT_IDS, *_PLACES)})

        outputs = {FEATURES: self.features.address, LOGITS: self._logits.address, GREEDY_IDS: results.address(GREEDY_IDS)}
        addresses = outputs | self.caches.addresses
        verify_addresses = addresses | self._ids.addresses | self._verify_inputs.addresses
        self._verify = engine.context(VERIFY_PROFILE, verify_addresses, self._tensors.input_shapes(**verify_sizes))
        self._prefill = engine.context(PREFILL_PROFILE, addresses | self._prefill_inputs.addresses)
        self._replay = Replay(self._verify)

    def clear(self) -> None:
        self.caches.clear()

    def write_ids(self, token_ids: Sequence[int] | IntArray) -> None:
        """The tokens of the next verify pass, at most `verify_rows`."""
        ids = self._ids.array(INPUT_IDS)[0]
        ids[: len(token_ids)], ids[len(token_ids) :] = token_ids, token_ids[-1]
        self._ids.upload()

    def write_drafted(self, anchor: int) -> None:
        """The tokens of the next verify pass are the anchor and what the head has drafted or will have by then."""
        self._ids.array(INPUT_IDS)[0, 0] = anchor
        item = self._ids.array(INPUT_IDS).itemsize
        self._ids.upload(item)
        self.stream.copy(self._ids.address(INPUT_IDS) + item, self._results.address(DRAFT_IDS), (self.verify_rows - 1) * item)

    def verify(self, start: int) -> None:
        """Run rows at `start`...; their tokens are there, and all results come to the host."""
        self._place(self._verify_inputs, start, self.verify_rows)

        def work() -> None:
            self._verify_inputs.upload()
            self._verify.enqueue()
            self._results.download()

        self._replay.run(self.stream, work)

    def prefill(self, token_ids: Sequence[int] | IntArray, start: int) -> None:
        """Run up to `prefill_rows` rows at `start`...; the first row of logits is the last token's."""
        rows = len(token_ids)
        self._prefill_inputs.array(INPUT_IDS, (1, rows))[0] = token_ids
        self._prefill_inputs.array(LOGIT_INDEX)[:] = rows - 1
        self._place(self._prefill_inputs, start, rows)
        self._prefill.set_shapes(self._tensors.input_shapes(rows=rows, logit_rows=1))
        self._prefill_inputs.upload()
        self._prefill.enqueue()

    def _place(self, inputs: Block, start: int, rows: int) -> None:
        inputs.array(POSITION_IDS, (1, rows))[0] = np.arange(start, start + rows)
        inputs.array(WRITE_INDEX)[:] = start
        mask = inputs.array(ATTENTION_MASK)
        causal_mask(start, inputs.array(ATTENTION_MASK, (1, 1, rows, mask.shape[3]))[0, 0])

    def fetch_logits(self, rows: int) -> None:
        """Copy the first rows of logits to the host."""
        self.stream.copy(self._host_logits.address, self._logits.address, rows * self.vocab_size * 4)

    def fetch_features(self, rows: int) -> None:
        """Likewise of the features."""
        self.stream.copy(self._host_features.address, self.features.address, rows * self.row_size)

    # What follows reads on the host, behind a synchronisation.

    def host_logits(self, rows: int) -> FloatArray:
        """[rows, V], valid until the next pass."""
        logits: FloatArray = self._host_logits.bytes.view(np.float32).reshape(-1, self.vocab_size)[:rows]
        return logits

    def host_features(self, rows: int) -> FloatArray:
        """[rows, F], likewise."""
        return rows_from_bytes(self._host_features.bytes[: rows * self.row_size], self._dtype, self._width)
