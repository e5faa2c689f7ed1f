"""Target and drafter on TensorRT as the decode loop knows them, and the pair that waits for the device once per cycle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

import numpy as np

from domino_deploy.runtime.backends.trt_draft import DraftPasses
from domino_deploy.runtime.backends.trt_memory import Block, Stopwatch
from domino_deploy.runtime.backends.trt_target import TargetPasses
from domino_deploy.runtime.kv_cache import CacheRows
from domino_deploy.runtime.protocols import NOTHING_PROPOSED, Drafter, FloatArray, IntArray, Proposal, SpeculativePair, TargetRows, Verified
from domino_deploy.signature import DRAFT_IDS, GREEDY_IDS, UNCERTIFIED


class TrtTarget:
    """A target for one sequence (`protocols.PairingTarget`).

    Args:
        passes: of its engine.
        results: tokens that a cycle drafts and chooses.
        capacity: rows of the longest sequence.
    """

    def __init__(self, passes: TargetPasses, results: Block, capacity: int) -> None:
        self.passes = passes
        self._results = results
        self.rows = CacheRows(capacity)

    @property
    def vocab_size(self) -> int:
        return self.passes.vocab_size

    @property
    def capacity(self) -> int:
        return self.rows.limit

    @property
    def length(self) -> int:
        return self.rows.length

    def reset(self) -> None:
        self.rows.reset()
        self.passes.clear()

    def forward(self, token_ids: Sequence[int] | IntArray, num_logits: int) -> TargetRows:
        """See `protocols.Target`; beyond `num_speculative_tokens` + 1 rows there are logits of the last one alone."""
        passes, start, rows = self.passes, self.rows.length, len(token_ids)
        self.rows.reserve(rows)
        if rows <= passes.verify_rows:
            passes.write_ids(token_ids)
            passes.verify(start)
            passes.fetch_logits(rows)
            passes.fetch_features(rows)
            passes.stream.synchronise()
            return TargetRows(logits=passes.host_logits(rows)[-num_logits:], features=passes.host_features(rows))
        if num_logits != 1:
            raise ValueError(f"expected 1 row of logits of a pass over more than {passes.verify_rows} rows, found {num_logits}")
        features = []
        for piece in self.pieces(token_ids):
            passes.fetch_logits(1)
            passes.fetch_features(piece)
            passes.stream.synchronise()
            features.append(passes.host_features(piece).copy())
        return TargetRows(logits=passes.host_logits(1), features=np.concatenate(features))

    def pieces(self, token_ids: Sequence[int] | IntArray) -> Iterator[int]:
        """Run rows behind the committed ones in prefill passes; yields the rows of each, to be waited for before the next is asked for.

        Of each, the features of all rows and the logits of the last one lie on the device until the next.
        """
        most, start = self.passes.prefill_rows, self.rows.length
        for first in range(0, len(token_ids), most):
            piece = token_ids[first : first + most]
            self.passes.prefill(piece, start + first)
            yield len(piece)

    def commit(self, rows: int) -> None:
        self.rows.commit(rows)

    def verified(self, proposal: Proposal, verify_ms: float, *, needs_logits: bool) -> Verified:
        """The outcome of a verify pass over a proposal, whose results have come to the host."""
        rows = len(proposal.token_ids) + 1
        if needs_logits:
            return Verified(proposal=proposal, logits=self.passes.host_logits(rows), verify_ms=verify_ms)
        return Verified(proposal=proposal, greedy_ids=self._results.array(GREEDY_IDS)[0, :rows], verify_ms=verify_ms)

    def paired_with(self, drafter: Drafter | None, *, needs_logits: bool) -> SpeculativePair:
        """See `protocols.PairingTarget`."""
        if isinstance(drafter, TrtDrafter):
            return DevicePair(self, drafter, needs_logits=needs_logits)
        return HostDraftedPair(self, drafter, needs_logits=needs_logits)


class TrtDrafter:
    """A Domino or DFlash drafter for one sequence (`protocols.Drafter`).

    Args:
        passes: of its engines.
        results: tokens that a cycle drafts and chooses.
        max_proposals: tokens that the head drafts, always all of them.
        pooled: those of them that a correction chooses out of a candidate pool.
        most_rows: rows of its cache.
    """

    def __init__(self, passes: DraftPasses, results: Block, *, max_proposals: int, pooled: int, most_rows: int) -> None:
        self.passes = passes
        self.max_proposals = max_proposals
        self._results = results
        self._pooled = pooled
        self._rows = CacheRows(most_rows)

    def reset(self) -> None:
        self._rows.reset()
        self.passes.clear()

    def propose(self, token_ids: Sequence[int], features: FloatArray, count: int) -> Proposal:
        """See `protocols.Drafter`."""
        started = perf_counter()
        most = self.passes.most_rows
        self.expect_features(len(features), len(token_ids))
        for first in range(0, len(features), most):
            self.passes.stream.synchronise()  # the piece before has been read
            piece = features[first : first + most]
            self.passes.take_host_features(piece)
            self.append(len(piece), token_ids[-1])
        self.passes.head()
        self._results.download()
        self.passes.stream.synchronise()
        return self.proposal(count, draft_ms=(perf_counter() - started) * 1e3)

    def expect_features(self, rows: int, sequence: int) -> None:
        """Check that `rows` feature rows, behind those appended, cover all of `sequence` tokens but the anchor."""
        self._rows.expect_features(rows, sequence)

    def append(self, rows: int, anchor: int) -> None:
        """Put a pass on the stream that appends the features taken, and runs a block behind them."""
        self._rows.reserve(rows)
        self.passes.backbone(self._rows.length, rows, anchor)
        self._rows.commit(rows)

    def proposal(self, count: int, *, draft_ms: float, head_ms: float = 0.0) -> Proposal:
        """The first `count` drafted tokens, which have come to the host; the pool's counters are those of all drafted."""
        return Proposal(
            token_ids=self._results.array(DRAFT_IDS)[0, :count].copy(),
            draft_ms=draft_ms,
            head_ms=head_ms,
            pooled=self._pooled,
            uncertified=int(self._results.array(UNCERTIFIED)[0]) if self._pooled else 0,
        )


class DevicePair:
    """Target and drafter of one set of engines: a cycle's tokens and features stay on the device, and the host waits once.

    Args:
        target: the target.
        drafter: its drafter.
        needs_logits: whether cycles bring logits to the host.
    """

    def __init__(self, target: TrtTarget, drafter: TrtDrafter, *, needs_logits: bool) -> None:
        self._target = target
        self._drafter = drafter
        self._needs_logits = needs_logits
        self._kept = 0  # feature rows of the last pass that the drafter has not read
        self._stopwatch = Stopwatch(target.passes.stream, marks=4)

    def reset(self) -> None:
        self._target.reset()
        self._drafter.reset()

    def prefill(self, prompt_ids: Sequence[int]) -> FloatArray:
        target, drafter, passes = self._target, self._drafter, self._target.passes
        target.rows.reserve(len(prompt_ids))
        left = len(prompt_ids)
        for rows in target.pieces(prompt_ids):
            left -= rows
            if left:
                drafter.passes.take_features(passes.features.address, rows)
                drafter.append(rows, prompt_ids[-1])
            else:  # the first draft reads the last piece's features
                passes.fetch_logits(1)
                self._kept = rows
            passes.stream.synchronise()
        target.commit(len(prompt_ids))
        logits: FloatArray = passes.host_logits(1)[0]
        return logits

    def cycle(self, token_ids: Sequence[int], count: int) -> Verified:
        target, drafter, passes = self._target, self._drafter, self._target.passes
        target.rows.reserve(count + 1)
        anchor = token_ids[-1]
        self._stopwatch.mark(0)
        if count:
            drafter.expect_features(self._kept, len(token_ids))
            drafter.passes.take_features(passes.features.address, self._kept)
            drafter.append(self._kept, anchor)
            self._stopwatch.mark(1)
            drafter.passes.head()
            passes.write_drafted(anchor)
        else:  # the last token wanted: there is nothing to draft for
            self._stopwatch.mark(1)
            passes.write_ids([anchor])
        self._stopwatch.mark(2)
        passes.verify(target.length)
        if self._needs_logits:
            passes.fetch_logits(count + 1)
        self._stopwatch.mark(3)
        passes.stream.synchronise()
        draft_ms, head_ms, verify_ms = self._stopwatch.spans_ms()
        proposal = drafter.proposal(count, draft_ms=draft_ms, head_ms=head_ms) if count else NOTHING_PROPOSED
        return target.verified(proposal, verify_ms, needs_logits=self._needs_logits)

    def commit(self, rows: int) -> None:
        self._target.commit(rows)
        self._kept = rows


class HostDraftedPair:
    """A target on the device, with a drafter on the host or none (plain decoding).

    Args:
        target: the target.
        drafter: the drafter.
        needs_logits: whether cycles bring logits to the host.
    """

    def __init__(self, target: TrtTarget, drafter: Drafter | None, *, needs_logits: bool) -> None:
        self._target = target
        self._drafter = drafter
        self._needs_logits = needs_logits
        self._features: FloatArray = np.zeros((0, 0), dtype=np.float32)

    def reset(self) -> None:
        self._target.reset()
        if self._drafter is not None:
            self._drafter.reset()

    def prefill(self, prompt_ids: Sequence[int]) -> FloatArray:
        target, passes = self._target, self._target.passes
        target.rows.reserve(len(prompt_ids))
        features = []
        for rows in target.pieces(prompt_ids):
            passes.fetch_logits(1)
            if self._drafter is not None:
                passes.fetch_features(rows)
            passes.stream.synchronise()
            if self._drafter is not None:
                features.append(passes.host_features(rows).copy())
        if features:
            self._features = np.concatenate(features)
        target.commit(len(prompt_ids))
        logits: FloatArray = passes.host_logits(1)[0]
        return logits

    def cycle(self, token_ids: Sequence[int], count: int) -> Verified:
        target, passes, proposal = self._target, self._target.passes, NOTHING_PROPOSED
        if self._drafter is not None and count:
            proposal = self._drafter.propose(token_ids, self._features, min(count, passes.verify_rows - 1))
        rows = len(proposal.token_ids) + 1
        target.rows.reserve(rows)
        started = perf_counter()
        passes.write_ids([token_ids[-1], *proposal.token_ids.tolist()])
        passes.verify(target.length)
        if self._needs_logits:
            passes.fetch_logits(rows)
        if self._drafter is not None:
            passes.fetch_features(rows)
        passes.stream.synchronise()
        if self._drafter is not None:
            self._features = passes.host_features(rows)
        return target.verified(proposal, (perf_counter() - started) * 1e3, needs_logits=self._needs_logits)

    def commit(self, rows: int) -> None:
        self._target.commit(rows)
        self._features = self._features[:rows]
