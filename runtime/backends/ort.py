"""The ONNX Runtime backend: a bundle's graphs on the CPU or an NVIDIA GPU, caches updated in place.

Every input and output is bound to memory that is reused from pass to pass, and a cache's input and output are the same
memory, so a pass copies no cache.  Arrays handed out are views of that memory: valid until the next pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

from domino_deploy.bundle import (
    BACKBONE_GRAPH,
    BACKBONE_TRUNK_GRAPH,
    HEAD_GRAPH,
    LM_HEAD_GRAPH,
    TARGET_GRAPH,
    TARGET_TRUNK_GRAPH,
    Bundle,
)
from domino_deploy.config import DrafterConfig, DrafterKind, TargetConfig
from domino_deploy.runtime.backends.ort_binding import Array, BoundGraph
from domino_deploy.runtime.backends.ort_provider import Provider, growth_rows
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
    backbone_signature,
    backbone_trunk_signature,
    head_signature,
    lm_head_signature,
    target_signature,
    target_trunk_signature,
)

# A pass over one row takes another path through matrix products than one over several and rounds otherwise, in the seventh digit.
# Products of integers round activations to 8 bits, which makes of such a difference one in the third: plain decoding would part from
# speculative decoding within some sentences.  From two rows on a row's numbers do not depend on how many others there are.
_LEAST_ROWS = 2


def open_pair(
    bundle: Bundle, *, capacity: int, threads: int | None = None, with_drafter: bool = True, provider: Provider = Provider.CPU
) -> tuple[OrtTarget, OrtDrafter | None]:
    """Target and drafter of a bundle.

    Args:
        bundle: an opened bundle in a precision that this backend runs (`domino_deploy.backends`).
        capacity: tokens of the longest sequence.
        threads: threads inside an operator; None for one per physical core.
        with_drafter: False leaves the drafter's graphs unread.
        provider: what ONNX Runtime computes on.

    Raises:
        BundleError: ONNX Runtime refuses a graph.
        MissingDependencyError: ONNX Runtime lacks the provider, or cannot start it.
    """
    path, config, form = bundle.path, bundle.drafter, bundle.form
    least_rows = _LEAST_ROWS if bundle.precision.is_quantised else 1
    # Without a drafter too: plain decoding is to run the very graphs that speculative decoding does.
    lm_head = LmHead(path / LM_HEAD_GRAPH, bundle.target, form, threads, provider) if bundle.has_lm_head_apart else None
    target_file, backbone_file = (TARGET_TRUNK_GRAPH, BACKBONE_TRUNK_GRAPH) if lm_head else (TARGET_GRAPH, BACKBONE_GRAPH)
    target = OrtTarget(path / target_file, bundle.target, config.feature_size, capacity, threads, form, least_rows, lm_head, provider)
    if not with_drafter:
        return target, None
    return target, OrtDrafter(path / backbone_file, path / HEAD_GRAPH, config, capacity, threads, form, lm_head, provider)


class LmHead:
    """The target's LM head in a session of its own, for target and drafter: ONNX Runtime packs weights once per session.

    Args:
        graph_file: `lm_head.onnx`.
        config: the target's shape.
        form: of the graphs.
        threads: threads inside an operator; None for one per physical core.
        provider: what computes it.

    Raises:
        BundleError: ONNX Runtime refuses the graph.
    """

    def __init__(
        self,
        graph_file: Path,
        config: TargetConfig,
        form: GraphForm = DEFAULT_FORM,
        threads: int | None = None,
        provider: Provider = Provider.CPU,
    ) -> None:
        self._graph = BoundGraph(graph_file, lm_head_signature(config, form), threads, provider)
        self._vocab_size = config.vocab_size

    def for_one(self) -> Callable[[Array], FloatArray]:
        """The function hidden [B, N, M] -> logits [B, N, V] for one of its users, with memory of its own for the logits."""
        graph = self._graph.sharing_session()

        def logits_of(hidden: Array) -> FloatArray:
            graph.bind_input(HIDDEN, hidden)
            logits = graph.output(LOGITS, (*hidden.shape[:2], self._vocab_size))
            graph.run()
            return logits

        return logits_of


class OrtTarget:
    """A target for one sequence.

    Args:
        graph_file: `target.onnx`, or `target_trunk.onnx` with an LM head.
        config: the target's shape.
        feature_size: width of its tapped features.
        capacity: rows its cache can hold at most.
        threads: threads inside an operator; None for one per physical core.
        form: of the graphs.
        least_rows: rows of a pass at least; a shorter one is filled up with rows that nothing sees.
        lm_head: what makes logits of the trunk's hidden states.
        provider: what computes the graph.

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
        lm_head: LmHead | None = None,
        provider: Provider = Provider.CPU,
    ) -> None:
        self._config = config
        self._feature_size = feature_size
        signature = target_signature if lm_head is None else target_trunk_signature
        self._graph = BoundGraph(graph_file, signature(config, feature_size, form), threads, provider)
        self._logits_of = None if lm_head is None else lm_head.for_one()
        self._rows = CacheRows(capacity, growth_rows(capacity, provider))
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
        features = graph.output(FEATURES, (1, rows, self._feature_size))
        if self._logits_of is None:
            logits = graph.output(LOGITS, (1, logit_rows, self._config.vocab_size))
            graph.run()
        else:
            hidden = graph.output(HIDDEN, (1, logit_rows, self._config.hidden_size))
            graph.run()
            logits = self._logits_of(hidden)
        return TargetRows(logits=logits[0, :num_logits], features=features[0, :wanted])

    def commit(self, rows: int) -> None:
        self._rows.commit(rows)


class OrtDrafter:
    """A Domino or DFlash drafter for one sequence.

    Args:
        backbone_file: `backbone.onnx`, or `backbone_trunk.onnx` with an LM head.
        head_file: `head.onnx`.
        config: the drafter's shape.
        capacity: tokens of the longest sequence to draft for.
        threads, form, lm_head, provider: as for `OrtTarget`.

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
        lm_head: LmHead | None = None,
        provider: Provider = Provider.CPU,
    ) -> None:
        self._config = config
        signature = backbone_signature if lm_head is None else backbone_trunk_signature
        self._backbone = BoundGraph(backbone_file, signature(config, form), threads, provider)
        self._logits_of = None if lm_head is None else lm_head.for_one()
        self._head = BoundGraph(head_file, head_signature(config, form), threads, provider)
        self._is_pooled = config.kind is DrafterKind.DOMINO and form.candidate_pool > 0
        self._vocab_size = form.draft_vocab_size or config.vocab_size
        self._rows = CacheRows(capacity + config.block_size, growth_rows(capacity + config.block_size, provider))

    @property
    def max_proposals(self) -> int:
        return self._config.num_proposals

    def reset(self) -> None:
        self._rows.reset()
        self._backbone.release_caches()

    def propose(self, token_ids: Sequence[int], features: FloatArray, count: int) -> Proposal:
        """See `protocols.Drafter`."""
        started = perf_counter()
        hidden, base_logits = self._run_backbone(token_ids, features, count)
        drafted_at = perf_counter()
        head = self._head
        if self._config.kind is DrafterKind.DOMINO:
            head.input(ANCHOR_IDS, (1,))[0] = token_ids[-1]
            head.bind_input(HIDDEN, hidden)
        head.bind_input(BASE_LOGITS, base_logits)
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

    def _run_backbone(self, token_ids: Sequence[int], features: FloatArray, count: int) -> tuple[FloatArray, FloatArray]:
        """Hidden states [1, count, M] and base logits [1, count, V]; the features become part of the cache, the block does not."""
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
        if self._logits_of is None:
            base_logits = graph.output(BASE_LOGITS, (1, config.num_proposals, self._vocab_size))[:, :count]
            graph.run()
        else:
            graph.run()
            base_logits = self._logits_of(hidden[:, :count])
        self._rows.commit(len(features))
        return hidden[:, :count], base_logits
