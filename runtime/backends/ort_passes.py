"""Passes of a bundle's graphs over one sequence or several: what is bound to them, and what comes out.

Which rows count and where a sequence's caches are is the caller's matter; arrays handed out are valid until the next pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from domino_deploy.config import DrafterConfig, DrafterKind, TargetConfig
from domino_deploy.runtime.backends.ort_binding import Array, BoundGraph
from domino_deploy.runtime.backends.ort_provider import Provider
from domino_deploy.runtime.kv_cache import causal_mask, placed_block_mask
from domino_deploy.runtime.protocols import FloatArray, IntArray
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
            graph.bind_input(HIDDEN, np.ascontiguousarray(hidden))
            logits = graph.output(LOGITS, (*hidden.shape[:2], self._vocab_size))
            graph.run()
            return logits

        return logits_of


@dataclass(frozen=True, kw_only=True)
class TargetPiece:
    """New rows of one sequence: their tokens, the cache slot and position of the first, and how many of the last want logits."""

    token_ids: Sequence[int] | IntArray
    start: int
    num_logits: int


@dataclass(frozen=True, kw_only=True)
class PieceRows:
    """What a pass makes of one piece: logits [N, V] of its last N rows, and features [S, F] of all."""

    logits: FloatArray
    features: FloatArray


class TargetPasses:
    """Passes of a target.

    Args:
        graph_file: `target.onnx`, or `target_trunk.onnx` with an LM head.
        config: the target's shape.
        feature_size: width of its tapped features.
        threads: threads inside an operator; None for one per physical core.
        form: of the graphs.
        least_rows: rows of a sequence in a pass at least; a shorter one is filled up with rows that nothing sees.
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
        threads: int | None = None,
        form: GraphForm = DEFAULT_FORM,
        least_rows: int = 1,
        lm_head: LmHead | None = None,
        provider: Provider = Provider.CPU,
    ) -> None:
        signature = target_signature if lm_head is None else target_trunk_signature
        self.graph = BoundGraph(graph_file, signature(config, feature_size, form), threads, provider)
        self.vocab_size = config.vocab_size
        self._hidden_size = config.hidden_size
        self._feature_size = feature_size
        self._logits_of = None if lm_head is None else lm_head.for_one()
        self._least_rows = least_rows

    def rows_for(self, pieces: Sequence[TargetPiece]) -> int:
        """Rows that each sequence of a pass is given: those of the longest piece, and what a sequence must have at least."""
        return max(self._least_rows, *(len(piece.token_ids) for piece in pieces))

    def run(self, pieces: Sequence[TargetPiece], cache_slots: int) -> list[PieceRows]:
        """One pass; row i of the bound caches, `cache_slots` long, is that of piece i.

        A piece shorter than the longest is filled up with rows that none of its own sees; they are written behind its own.
        """
        graph, batch, rows = self.graph, len(pieces), self.rows_for(pieces)
        logit_rows = max(self._least_rows, *(piece.num_logits for piece in pieces))
        ids = graph.input(INPUT_IDS, (batch, rows))
        positions = graph.input(POSITION_IDS, (batch, rows))
        mask = graph.input(ATTENTION_MASK, (batch, 1, rows, cache_slots))
        write_index = graph.input(WRITE_INDEX, (batch,))
        logit_index = graph.input(LOGIT_INDEX, (batch, logit_rows))
        for row, piece in enumerate(pieces):
            wanted, start = len(piece.token_ids), piece.start
            ids[row, :wanted], ids[row, wanted:] = piece.token_ids, piece.token_ids[-1]
            positions[row] = np.arange(start, start + rows)
            causal_mask(start, mask[row, 0])
            write_index[row] = start
            first = wanted - piece.num_logits
            logit_index[row] = np.arange(first, first + logit_rows).clip(max=wanted - 1)
        features = graph.output(FEATURES, (batch, rows, self._feature_size))
        logits = self._run_for_logits(pieces, logit_rows)
        return [
            PieceRows(logits=found, features=tapped[: len(piece.token_ids)])
            for piece, found, tapped in zip(pieces, logits, features, strict=True)
        ]

    def _run_for_logits(self, pieces: Sequence[TargetPiece], logit_rows: int) -> list[FloatArray]:
        """Run what is bound; the logits wanted of each piece."""
        graph, batch, counts = self.graph, len(pieces), [piece.num_logits for piece in pieces]
        if self._logits_of is None:
            logits = graph.output(LOGITS, (batch, logit_rows, self.vocab_size))
            graph.run()
        else:
            hidden = graph.output(HIDDEN, (batch, logit_rows, self._hidden_size))
            graph.run()
            if batch > 1 and min(counts) < logit_rows:
                # The LM head may be the largest matrix: no work on rows that nothing asked for.
                packed = np.concatenate([rows[:count] for rows, count in zip(hidden, counts, strict=True)])
                return np.split(self._logits_of(packed[None])[0], np.cumsum(counts)[:-1])
            logits = self._logits_of(hidden)
        return [rows[:count] for rows, count in zip(logits, counts, strict=True)]


@dataclass(frozen=True, kw_only=True)
class DraftPiece:
    """New feature rows [S, F] of one sequence, the cache slot and position of the first, and the anchor behind the last."""

    features: FloatArray
    start: int
    anchor: int


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """token_ids: int64 [B, count]; uncertified: int64 [B] as in `protocols.Proposal`, None without a candidate pool."""

    token_ids: IntArray
    uncertified: IntArray | None


class DraftPasses:
    """Passes of a Domino or DFlash drafter: backbone, LM head, head.

    Args:
        backbone_file: `backbone.onnx`, or `backbone_trunk.onnx` with an LM head.
        head_file: `head.onnx`.
        config: the drafter's shape.
        threads, form, lm_head, provider: as for `TargetPasses`.

    Raises:
        BundleError: ONNX Runtime refuses a graph.
    """

    def __init__(
        self,
        backbone_file: Path,
        head_file: Path,
        config: DrafterConfig,
        threads: int | None = None,
        form: GraphForm = DEFAULT_FORM,
        lm_head: LmHead | None = None,
        provider: Provider = Provider.CPU,
    ) -> None:
        signature = backbone_signature if lm_head is None else backbone_trunk_signature
        self.graph = BoundGraph(backbone_file, signature(config, form), threads, provider)
        self.config = config
        self._head = BoundGraph(head_file, head_signature(config, form), threads, provider)
        self._logits_of = None if lm_head is None else lm_head.for_one()
        self._is_pooled = config.kind is DrafterKind.DOMINO and form.candidate_pool > 0
        self._vocab_size = form.draft_vocab_size or config.vocab_size

    @property
    def feature_dtype(self) -> np.dtype[Any]:
        return self.graph.dtype(FEATURES)

    def pooled(self, count: int) -> int:
        """Of `count` proposals, those that the correction chooses out of a candidate pool."""
        return max(0, count - self.config.pure_draft_prefix_len) if self._is_pooled else 0

    def run_backbone(self, pieces: Sequence[DraftPiece], cache_slots: int) -> FloatArray:
        """Append features and run a block behind them; row i of the bound caches, `cache_slots` long, is that of piece i.

        Pieces shorter than the longest are filled up with rows that nothing sees; the block lies behind those.

        Returns:
            Hidden states [B, num_proposals, M].
        """
        graph, config, batch, block = self.graph, self.config, len(pieces), self.config.block_size
        rows = max(1, *(len(piece.features) for piece in pieces))
        block_ids = graph.input(BLOCK_IDS, (batch, block))
        block_ids[:] = config.mask_token_id
        positions = graph.input(POSITION_IDS, (batch, rows + block))
        mask_shape = (batch, 1, block, cache_slots)
        mask = graph.input(ATTENTION_MASK, mask_shape)
        window = config.sliding_window if config.has_sliding_layers else None
        sliding_mask = None if window is None else graph.input(SLIDING_MASK, mask_shape)
        write_index = graph.input(WRITE_INDEX, (batch,))
        for row, piece in enumerate(pieces):
            start, context = piece.start, piece.start + len(piece.features)
            block_ids[row, 0] = piece.anchor
            positions[row, :rows] = np.arange(start, start + rows)
            positions[row, rows:] = np.arange(context, context + block)
            placed_block_mask(context, start + rows, None, mask[row, 0])
            if sliding_mask is not None:
                placed_block_mask(context, start + rows, window, sliding_mask[row, 0])
            write_index[row] = start
        graph.bind_input(FEATURES, _filled_up([piece.features for piece in pieces], rows))
        hidden = graph.output(HIDDEN, (batch, config.num_proposals, config.hidden_size))
        if self._logits_of is None:
            graph.output(BASE_LOGITS, (batch, config.num_proposals, self._vocab_size))
        graph.run()
        return hidden

    def base_logits(self, hidden: FloatArray) -> FloatArray:
        """Logits [B, N, V] of hidden states [B, N, M], the first N of the last backbone pass."""
        if self._logits_of is not None:
            return self._logits_of(hidden)
        batch, count, _ = hidden.shape
        logits: FloatArray = self.graph.output(BASE_LOGITS, (batch, self.config.num_proposals, self._vocab_size))[:, :count]
        return logits

    def run_head(self, anchors: Sequence[int], hidden: FloatArray, base_logits: FloatArray) -> Drafts:
        """The greedy rollout over hidden states [B, N, M] and their base logits [B, N, V]."""
        head, (batch, count, _) = self._head, hidden.shape
        if self.config.kind is DrafterKind.DOMINO:
            head.input(ANCHOR_IDS, (batch,))[:] = anchors
            head.bind_input(HIDDEN, np.ascontiguousarray(hidden))
        head.bind_input(BASE_LOGITS, np.ascontiguousarray(base_logits))
        token_ids = head.output(DRAFT_IDS, (batch, count))
        uncertified = head.output(UNCERTIFIED, (batch,)) if self._is_pooled else None
        head.run()
        return Drafts(token_ids=token_ids, uncertified=uncertified)


def _filled_up(features: Sequence[FloatArray], rows: int) -> Array:
    """[B, rows, F], contiguous; of a single full piece without a copy."""
    if len(features) == 1 and len(features[0]) == rows:
        return np.ascontiguousarray(features[0])[None]
    filled = np.zeros((len(features), rows, features[0].shape[1]), features[0].dtype)
    for row, piece in zip(filled, features, strict=True):
        row[: len(piece)] = piece
    return filled
