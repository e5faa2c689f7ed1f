"""The ONNX Runtime backend: a bundle's graphs on the CPU or an NVIDIA GPU, caches updated in place.

Every input and output is bound to memory that is reused from pass to pass, and a cache's input and output are the same
memory, so a pass copies no cache.  Arrays handed out are views of that memory: valid until the next pass.

ort.py               target and drafter of one sequence
ort_slots.py         several sequences in one pass; ort_slot_caches.py and ort_slot_drafters.py are its parts
ort_passes.py        passes of the graphs: what is bound, and what comes out
ort_binding.py  ort_graph.py  ort_provider.py   sessions and their memory; opening and failing; what ONNX Runtime computes on
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from domino_deploy.bundle import (
    BACKBONE_GRAPH,
    BACKBONE_TRUNK_GRAPH,
    HEAD_GRAPH,
    LM_HEAD_GRAPH,
    TARGET_GRAPH,
    TARGET_TRUNK_GRAPH,
    Bundle,
)
from domino_deploy.runtime.backends.ort_passes import DraftPasses, DraftPiece, LmHead, TargetPasses, TargetPiece
from domino_deploy.runtime.backends.ort_provider import Provider, growth_rows
from domino_deploy.runtime.kv_cache import CacheRows
from domino_deploy.runtime.protocols import FloatArray, IntArray, Proposal, TargetRows

# A pass over one row takes another path through matrix products than one over several and rounds otherwise, in the seventh digit.
# Products of integers round activations to 8 bits, which makes of such a difference one in the third: plain decoding would part from
# speculative decoding within some sentences.  From two rows on a row's numbers do not depend on how many others there are.  It is the
# rows of each sequence that count, not those of the batch: one row of each of eight sequences takes the path of a single one.
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
    target, drafter = open_passes(bundle, threads=threads, with_drafter=with_drafter, provider=provider)
    return OrtTarget(target, capacity, provider), None if drafter is None else OrtDrafter(drafter, capacity, provider)


def open_passes(
    bundle: Bundle, *, threads: int | None, with_drafter: bool, provider: Provider = Provider.CPU
) -> tuple[TargetPasses, DraftPasses | None]:
    """The passes of a bundle's target and of its drafter.

    Args:
        bundle: an opened bundle in a precision that this backend runs (`domino_deploy.backends`).
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
    target = TargetPasses(path / target_file, bundle.target, config.feature_size, threads, form, least_rows, lm_head, provider)
    if not with_drafter:
        return target, None
    return target, DraftPasses(path / backbone_file, path / HEAD_GRAPH, config, threads, form, lm_head, provider)


class OrtTarget:
    """A target for one sequence.

    Args:
        passes: of its graph.
        capacity: rows its cache can hold at most.
        provider: what computes it.
    """

    def __init__(self, passes: TargetPasses, capacity: int, provider: Provider = Provider.CPU) -> None:
        self._passes = passes
        self._rows = CacheRows(capacity, growth_rows(capacity, provider))

    @property
    def vocab_size(self) -> int:
        return self._passes.vocab_size

    @property
    def capacity(self) -> int:
        return self._rows.limit

    @property
    def length(self) -> int:
        return self._rows.length

    def reset(self) -> None:
        self._rows.reset()
        self._passes.graph.release_caches()

    def forward(self, token_ids: Sequence[int] | IntArray, num_logits: int) -> TargetRows:
        """See `protocols.Target`."""
        start, wanted = self._rows.length, len(token_ids)
        self._rows.reserve(wanted)
        pieces = [TargetPiece(token_ids=token_ids, start=start, num_logits=num_logits)]
        slots = self._passes.graph.grow_caches(max(self._rows.slots(start + wanted), start + self._passes.rows_for(pieces)))
        (found,) = self._passes.run(pieces, slots)
        return TargetRows(logits=found.logits, features=found.features)

    def commit(self, rows: int) -> None:
        self._rows.commit(rows)


class OrtDrafter:
    """A Domino or DFlash drafter for one sequence.

    Args:
        passes: of its graphs.
        capacity: tokens of the longest sequence to draft for.
        provider: what computes them.
    """

    def __init__(self, passes: DraftPasses, capacity: int, provider: Provider = Provider.CPU) -> None:
        self._passes = passes
        most = capacity + passes.config.block_size
        self._rows = CacheRows(most, growth_rows(most, provider))

    @property
    def max_proposals(self) -> int:
        return self._passes.config.num_proposals

    def reset(self) -> None:
        self._rows.reset()
        self._passes.graph.release_caches()

    def propose(self, token_ids: Sequence[int], features: FloatArray, count: int) -> Proposal:
        """See `protocols.Drafter`."""
        started, passes, rows = perf_counter(), self._passes, self._rows
        rows.expect_features(len(features), len(token_ids))
        block = passes.config.block_size
        rows.reserve(len(features) + block)
        slots = passes.graph.grow_caches(rows.slots(len(token_ids) - 1 + block))
        piece = DraftPiece(features=features, start=rows.length, anchor=token_ids[-1])
        hidden = passes.run_backbone([piece], slots)[:, :count]
        base_logits = passes.base_logits(hidden)
        rows.commit(len(features))  # the features are part of the cache now, the block is not
        drafted_at = perf_counter()
        drafts = passes.run_head([piece.anchor], hidden, base_logits)
        return Proposal(
            token_ids=drafts.token_ids[0].copy(),
            draft_ms=(drafted_at - started) * 1e3,
            head_ms=(perf_counter() - drafted_at) * 1e3,
            pooled=passes.pooled(count),
            uncertified=0 if drafts.uncertified is None else int(drafts.uncertified[0]),
        )
