"""What proposes for several sequences at a time: the bundle's drafter with its caches, or prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np

from domino_deploy.runtime.backends.ort_passes import DraftPasses, DraftPiece
from domino_deploy.runtime.backends.ort_slot_caches import SlotCaches
from domino_deploy.runtime.decode import PREFILL_ROWS
from domino_deploy.runtime.prompt_lookup import PromptLookupDrafter
from domino_deploy.runtime.protocols import FloatArray, Proposal

# Rows whose features may wait with a sequence until it drafts: while plain decoding is faster, they are spared their passes, and what a
# pass costs beside its rows is shared by many.  Of an 8B model with 5 taps, so many are 20 MB.
_MOST_WAITING = PREFILL_ROWS


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A sequence to draft for: its slot, every committed token (the anchor last), and how many tokens, at least 1."""

    slot: int
    token_ids: Sequence[int]
    count: int


@dataclass(frozen=True, kw_only=True)
class Proposals:
    """One for each sequence, in the order asked for (their own times are 0), and what they cost together in milliseconds."""

    proposals: Sequence[Proposal]
    draft_ms: float
    head_ms: float = 0.0


class SlotDrafter(Protocol):
    """Prompt lookup or a bundle's drafter, for several sequences.  Its rows are those of the target's features it was given."""

    @property
    def max_proposals(self) -> int: ...

    def rows(self, slot: int) -> int: ...

    def waiting_rows(self, slot: int) -> int:
        """Rows that the next draft has to take in first."""

    def take(self, slot: int, features: FloatArray) -> None:
        """Take the features [S, F] of a sequence's next rows; their memory is the caller's again."""

    def truncate(self, slot: int, rows: int) -> None:
        """Keep at most `rows` rows."""

    def copy(self, source: int, destination: int, rows: int) -> None:
        """Make the destination hold the first rows of the source, at most `rows`."""

    def propose(self, sequences: Sequence[Wanted]) -> Proposals: ...


class LookupSlots:
    """Prompt lookup: nothing is remembered but how many rows were given.

    Args:
        num_slots: sequences at most.
    """

    def __init__(self, num_slots: int) -> None:
        self._drafter = PromptLookupDrafter()
        self._rows = [0] * num_slots

    @property
    def max_proposals(self) -> int:
        return self._drafter.max_proposals

    def rows(self, slot: int) -> int:
        return self._rows[slot]

    def waiting_rows(self, slot: int) -> int:
        return 0

    def take(self, slot: int, features: FloatArray) -> None:
        self._rows[slot] += len(features)

    def truncate(self, slot: int, rows: int) -> None:
        self._rows[slot] = min(self._rows[slot], rows)

    def copy(self, source: int, destination: int, rows: int) -> None:
        self._rows[destination] = min(self._rows[source], rows)

    def propose(self, sequences: Sequence[Wanted]) -> Proposals:
        started = perf_counter()
        no_features = np.zeros((0, 0), dtype=np.float32)
        found = [self._drafter.propose(wanted.token_ids, no_features, wanted.count).token_ids for wanted in sequences]
        proposals = [Proposal(token_ids=token_ids) for token_ids in found]
        return Proposals(proposals=proposals, draft_ms=(perf_counter() - started) * 1e3)


class BackboneSlots:
    """The bundle's drafter: one backbone pass and one head pass for all sequences that draft.

    Features wait with their sequence until its next draft; many of them are appended by a pass of their own, so that neither the
    others' passes nor the memory grow with them.

    Args:
        passes: of its graphs.
        num_slots: sequences at most.
    """

    def __init__(self, passes: DraftPasses, num_slots: int) -> None:
        self._passes = passes
        self.caches = SlotCaches(passes.graph, num_slots)
        nothing = np.zeros((0, passes.config.feature_size), dtype=passes.feature_dtype)
        self._waiting = [_WaitingFeatures(nothing) for _ in range(num_slots)]

    @property
    def max_proposals(self) -> int:
        return self._passes.config.num_proposals

    def rows(self, slot: int) -> int:
        return self.caches.length(slot) + self._waiting[slot].rows

    def waiting_rows(self, slot: int) -> int:
        return self._waiting[slot].rows

    def take(self, slot: int, features: FloatArray) -> None:
        self._waiting[slot].append(features.copy())
        if self._waiting[slot].rows >= _MOST_WAITING:
            self._catch_up([slot])

    def truncate(self, slot: int, rows: int) -> None:
        cached = min(self.caches.length(slot), rows)
        self.caches.truncate(slot, cached)
        self._waiting[slot].replace(self._waiting[slot].features()[: rows - cached].copy())

    def copy(self, source: int, destination: int, rows: int) -> None:
        cached = min(self.caches.length(source), rows)
        self.caches.copy(source, destination, cached)
        self._waiting[destination].replace(self._waiting[source].features()[: rows - cached].copy())

    def propose(self, sequences: Sequence[Wanted]) -> Proposals:
        started, passes = perf_counter(), self._passes
        # No more than a cycle can leave: every sequence of the pass is filled up to the most.
        self._catch_up([wanted.slot for wanted in sequences if self._waiting[wanted.slot].rows > passes.config.block_size])
        count = max(wanted.count for wanted in sequences)
        anchors = {wanted.slot: wanted.token_ids[-1] for wanted in sequences}
        order, hidden = self._run_backbone({slot: (self._waiting[slot].features(), anchor) for slot, anchor in anchors.items()})
        for slot in order:
            self._waiting[slot].clear()
        hidden = hidden[:, :count]
        base_logits = passes.base_logits(hidden)
        drafted_at = perf_counter()
        drafts = passes.run_head([anchors[slot] for slot in order], hidden, base_logits)
        proposals = []
        for wanted in sequences:
            row, pooled = order.index(wanted.slot), passes.pooled(wanted.count)
            # The head counts over the longest proposal of the pass; a shorter one has no more than its own.
            uncertified = 0 if drafts.uncertified is None else min(int(drafts.uncertified[row]), pooled)
            proposals.append(Proposal(token_ids=drafts.token_ids[row, : wanted.count].copy(), pooled=pooled, uncertified=uncertified))
        return Proposals(proposals=proposals, draft_ms=(drafted_at - started) * 1e3, head_ms=(perf_counter() - drafted_at) * 1e3)

    def _catch_up(self, slots: Sequence[int]) -> None:
        """Make the features that wait part of the caches, at most `PREFILL_ROWS` of each in a pass; the blocks behind them are for
        nothing."""
        waiting, anchor = {slot: self._waiting[slot].features() for slot in slots}, self._passes.config.mask_token_id
        for first in range(0, max(map(len, waiting.values()), default=0), PREFILL_ROWS):
            pieces = {slot: features[first : first + PREFILL_ROWS] for slot, features in waiting.items() if len(features) > first}
            self._run_backbone({slot: (features, anchor) for slot, features in pieces.items()})
        for slot in slots:
            self._waiting[slot].clear()

    def _run_backbone(self, pieces: dict[int, tuple[FloatArray, int]]) -> tuple[list[int], FloatArray]:
        """Append the features of some slots, each with its anchor; the slots in the order of the hidden states [B, P, M], and those."""
        caches, slots = self.caches, [*pieces]
        rows = max(1, *(len(features) for features, _ in pieces.values()))
        needed = max(caches.length(slot) for slot in slots) + rows + self._passes.config.block_size
        order, cache_slots = caches.bind(slots, needed)
        slots = [slots[index] for index in order]
        hidden = self._passes.run_backbone(
            [DraftPiece(features=pieces[slot][0], start=caches.length(slot), anchor=pieces[slot][1]) for slot in slots], cache_slots
        )
        for slot in slots:
            caches.append(slot, len(pieces[slot][0]))
        return slots, hidden


class _WaitingFeatures:
    """Features of a slot behind those in its cache, in the pieces they came in.

    Args:
        nothing: no features, [0, F].
    """

    def __init__(self, nothing: FloatArray) -> None:
        self._nothing = nothing
        self._pieces: list[FloatArray] = []
        self.rows = 0

    def append(self, features: FloatArray) -> None:
        self._pieces.append(features)
        self.rows += len(features)

    def features(self) -> FloatArray:
        """All of them, [rows, F]."""
        return self._pieces[0] if len(self._pieces) == 1 else np.concatenate([self._nothing, *self._pieces])

    def replace(self, features: FloatArray) -> None:
        self.clear()
        self.append(features)

    def clear(self) -> None:
        self._pieces.clear()
        self.rows = 0
