"""The ONNX Runtime backend: a bundle's graphs on the CPU, caches updated in place.

Every input and output is bound to memory that is reused from pass to pass, and a cache's input and output are the same
memory, so a pass copies no cache.  Arrays handed out are views of that memory: valid until the next pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from domino_deploy.bundle import BACKBONE_GRAPH, HEAD_GRAPH, TARGET_GRAPH, Bundle
from domino_deploy.config import DrafterConfig, DrafterKind, TargetConfig
from domino_deploy.errors import RequestError
from domino_deploy.precision import Dtype
from domino_deploy.runtime.backends.ort_graph import failing_as_bundle_error, open_graph
from domino_deploy.runtime.kv_cache import CacheRows, block_mask, causal_mask, sliding_block_mask
from domino_deploy.runtime.protocols import FloatArray, IntArray, Proposal, TargetRows
from domino_deploy.signature import (
    ANCHOR_IDS,
    ATTENTION_MASK,
    BASE_LOGITS,
    BLOCK_IDS,
    DEFAULT_FORM,
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
    GraphForm,
    GraphSignature,
    backbone_signature,
    head_signature,
    target_signature,
    updated,
)

# A pass over one row takes another path through matrix products than one over several and rounds otherwise, in the seventh digit.
# Products of integers round activations to 8 bits, which makes of such a difference one in the third: plain decoding would part from
# speculative decoding within some sentences.  From two rows on a row's numbers do not depend on how many others there are.
_LEAST_ROWS = 2

Array = NDArray[Any]
Bind = Callable[..., None]  # IOBinding.bind_input or bind_output


def open_pair(
    bundle: Bundle, *, capacity: int, threads: int | None = None, with_drafter: bool = True
) -> tuple[OrtTarget, OrtDrafter | None]:
    """Target and drafter of a bundle.

    Args:
        bundle: an opened bundle.
        capacity: tokens of the longest sequence.
        threads: threads inside an operator; None for one per physical core.
        with_drafter: False leaves the drafter's graphs unread.

    Raises:
        BundleError: ONNX Runtime refuses a graph.
        RequestError: the bundle's precision does not run on ONNX Runtime's CPU.
    """
    if bundle.precision.activations is Dtype.BFLOAT16:
        raise RequestError(
            f"{bundle.path}: expected a precision that ONNX Runtime computes on a CPU (float32, float16, int8, int4), found bfloat16. "
            "Export the pair again with --dtype, or run it with --backend eager."
        )
    path, config, form = bundle.path, bundle.drafter, bundle.form
    least_rows = _LEAST_ROWS if bundle.precision.is_quantised else 1
    target = OrtTarget(path / TARGET_GRAPH, bundle.target, config.feature_size, capacity, threads, form, least_rows)
    return target, OrtDrafter(path / BACKBONE_GRAPH, path / HEAD_GRAPH, config, capacity, threads, form) if with_drafter else None


class OrtTarget:
    """A target for one sequence.

    Args:
        graph_file: `target.onnx`.
        config: the target's shape.
        feature_size: width of its tapped features.
        capacity: rows its cache can hold at most.
        threads: threads inside an operator; None for one per physical core.
        form: of the graphs.
        least_rows: rows of a pass at least; a shorter one is filled up with rows that nothing sees.

    Raises:
        BundleError: ONNX Runtime refuses the graph.
    """

    def __init__(
        self,
        graph_file: Path,
        config: TargetConfig,
        feature_size: int,
        capacity: int,
        threads: int | None = None,
        form: GraphForm = DEFAULT_FORM,
        least_rows: int = 1,
    ) -> None:
        self._config = config
        self._feature_size = feature_size
        self._graph = BoundGraph(graph_file, target_signature(config, feature_size, form), threads)
        self._rows = CacheRows(capacity)
        self._least_rows = least_rows

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def capacity(self) -> int:
        return self._rows.limit

    @property
    def length(self) -> int:
        return self._rows.length

    def reset(self) -> None:
        self._rows.reset()
        self._graph.release_caches()

    def forward(self, token_ids: Sequence[int] | IntArray, num_logits: int) -> TargetRows:
        """See `protocols.Target`."""
        start, wanted, graph = self._rows.length, len(token_ids), self._graph
        self._rows.reserve(wanted)
        rows, logit_rows = max(wanted, self._least_rows), max(num_logits, self._least_rows)
        slots = graph.grow_caches(max(self._rows.slots(start + wanted), start + rows))
        ids = graph.input(INPUT_IDS, (1, rows))[0]
        ids[:wanted], ids[wanted:] = token_ids, token_ids[-1]
        graph.input(POSITION_IDS, (1, rows))[0] = np.arange(start, start + rows)
        causal_mask(start, graph.input(ATTENTION_MASK, (1, 1, rows, slots))[0, 0])
        graph.input(WRITE_INDEX, (1,))[0] = start
        graph.input(LOGIT_INDEX, (1, logit_rows))[0] = np.arange(wanted - num_logits, wanted - num_logits + logit_rows).clip(max=wanted - 1)
        logits = graph.output(LOGITS, (1, logit_rows, self._config.vocab_size))
        features = graph.output(FEATURES, (1, rows, self._feature_size))
        graph.run()
        return TargetRows(logits=logits[0, :num_logits], features=features[0, :wanted])

    def commit(self, rows: int) -> None:
        self._rows.commit(rows)


class OrtDrafter:
    """A Domino or DFlash drafter for one sequence.

    Args:
        backbone_file: `backbone.onnx`.
        head_file: `head.onnx`.
        config: the drafter's shape.
        capacity: tokens of the longest sequence to draft for.
        threads: as for `OrtTarget`.
        form: likewise.

    Raises:
        BundleError: ONNX Runtime refuses a graph.
    """

    def __init__(
        self,
        backbone_file: Path,
        head_file: Path,
        config: DrafterConfig,
        capacity: int,
        threads: int | None = None,
        form: GraphForm = DEFAULT_FORM,
    ) -> None:
        self._config = config
        self._backbone = BoundGraph(backbone_file, backbone_signature(config, form), threads)
        self._head = BoundGraph(head_file, head_signature(config, form), threads)
        self._is_pooled = config.kind is DrafterKind.DOMINO and form.candidate_pool > 0
        self._vocab_size = form.draft_vocab_size or config.vocab_size
        self._rows = CacheRows(capacity + config.block_size)

    @property
    def max_proposals(self) -> int:
        return self._config.num_proposals

    def reset(self) -> None:
        self._rows.reset()
        self._backbone.release_caches()

    def propose(self, token_ids: Sequence[int], features: FloatArray, count: int) -> Proposal:
        """See `protocols.Drafter`."""
        started = perf_counter()
        hidden, base_logits = self._run_backbone(token_ids, features)
        drafted_at = perf_counter()
        head = self._head
        if self._config.kind is DrafterKind.DOMINO:
            head.input(ANCHOR_IDS, (1,))[0] = token_ids[-1]
            head.bind_input(HIDDEN, hidden[:, :count])
        head.bind_input(BASE_LOGITS, base_logits[:, :count])
        drafts = head.output(DRAFT_IDS, (1, count))
        uncertified = head.output(UNCERTIFIED, (1,)) if self._is_pooled else None
        head.run()
        head_ms = (perf_counter() - drafted_at) * 1e3
        return Proposal(
            token_ids=drafts[0].copy(),
            draft_ms=(drafted_at - started) * 1e3,
            head_ms=head_ms,
            pooled=max(0, count - self._config.pure_draft_prefix_len) if self._is_pooled else 0,
            uncertified=0 if uncertified is None else int(uncertified[0]),
        )

    def _run_backbone(self, token_ids: Sequence[int], features: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Hidden states [1, N, M] and base logits [1, N, V]; the features become part of the cache, the block does not."""
        config, graph = self._config, self._backbone
        self._rows.expect_features(len(features), len(token_ids))
        start, context, block = self._rows.length, len(token_ids) - 1, config.block_size
        self._rows.reserve(len(features) + block)
        slots = graph.grow_caches(self._rows.slots(context + block))
        block_ids = graph.input(BLOCK_IDS, (1, block))
        block_ids[0] = config.mask_token_id
        block_ids[0, 0] = token_ids[-1]
        graph.bind_input(FEATURES, np.ascontiguousarray(features)[None])
        graph.input(POSITION_IDS, (1, len(features) + block))[0] = np.arange(start, context + block)
        block_mask(context, graph.input(ATTENTION_MASK, (1, 1, block, slots))[0, 0])
        if config.sliding_window is not None and config.has_sliding_layers:
            sliding_block_mask(context, config.sliding_window, graph.input(SLIDING_MASK, (1, 1, block, slots))[0, 0])
        graph.input(WRITE_INDEX, (1,))[0] = start
        hidden = graph.output(HIDDEN, (1, config.num_proposals, config.hidden_size))
        base_logits = graph.output(BASE_LOGITS, (1, config.num_proposals, self._vocab_size))
        graph.run()
        self._rows.commit(len(features))
        return hidden, base_logits


class BoundGraph:
    """An ONNX Runtime session whose inputs and outputs live in numpy arrays.

    Args:
        graph_file: the graph.
        signature: its inputs and outputs.
        threads: threads inside an operator; None for ONNX Runtime's default, one per physical core.

    Raises:
        BundleError: ONNX Runtime refuses the graph, or it is not the graph of this signature.
    """

    def __init__(self, graph_file: Path, signature: GraphSignature, threads: int | None = None) -> None:
        self._file = graph_file
        self._session = open_graph(graph_file, signature, _options(threads))
        self._binding = self._session.io_binding()
        specs = (*signature.inputs, *signature.outputs)
        self._dtypes = {spec.name: np.dtype(spec.dtype) for spec in specs}
        outputs = {spec.name for spec in signature.outputs}
        caches = [spec for spec in signature.inputs if updated(spec.name) in outputs]
        self._heads_and_width = {spec.name: (int(spec.shape[1]), int(spec.shape[3])) for spec in caches}
        self._caches: dict[str, Array] = {}
        self._slots = 0
        self._buffers: dict[str, Array] = {}
        self._bound: dict[str, Array] = {}

    def input(self, name: str, shape: tuple[int, ...]) -> Array:
        """The memory of an input, to be filled before `run`."""
        return self._memory(name, shape, self._binding.bind_input)

    def output(self, name: str, shape: tuple[int, ...]) -> Array:
        """The memory of an output, filled by `run`."""
        return self._memory(name, shape, self._binding.bind_output)

    def bind_input(self, name: str, array: Array) -> None:
        """Read an input from an array of the caller's (contiguous, of the signature's dtype); it is kept alive until the next one."""
        self._bind(name, array, self._binding.bind_input)

    def grow_caches(self, slots: int) -> int:
        """Make the caches at least `slots` long, rows kept; returns their length."""
        if slots > self._slots:
            for name, (heads, width) in self._heads_and_width.items():
                # Zeros: a masked slot still takes part, times 0, and garbage may be NaN.
                cache = np.zeros((1, heads, slots, width), self._dtypes[name])
                if self._slots:
                    cache[:, :, : self._slots] = self._caches[name]
                self._caches[name] = cache
                self._bind(name, cache, self._binding.bind_input)
                self._bind(updated(name), cache, self._binding.bind_output)
            self._slots = slots
        return self._slots

    def release_caches(self) -> None:
        """Start over with short ones: a pass takes as long as the caches bound."""
        self._slots = 0

    def run(self) -> None:
        """One pass.

        Raises:
            BundleError: an operator of the graph fails.
        """
        with failing_as_bundle_error(self._file, "runs"):
            self._session.run_with_iobinding(self._binding)

    def _memory(self, name: str, shape: tuple[int, ...], bind: Bind) -> Array:
        array = self._bound.get(name)
        if array is None or array.shape != shape:
            size = int(np.prod(shape))
            if name not in self._buffers or self._buffers[name].size < size:
                self._buffers[name] = np.empty(size, self._dtypes[name])
            array = self._buffers[name][:size].reshape(shape)
            self._bind(name, array, bind)
        return array

    def _bind(self, name: str, array: Array, bind: Bind) -> None:
        bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self._bound[name] = array


def _options(threads: int | None) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0  # 0: one per physical core
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors: it warns of optimisations that it leaves out, such as turning a large LM head at once
    # Threads wait for the next operator by spinning, which is ONNX Runtime's default; but not beyond the pass, since the
    # sessions of target, backbone and head take turns and would take each other's cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options
