"""Several sequences with ONNX Runtime on the CPU: one draft, one head and one verify pass for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from domino_deploy.bundle import Bundle
from domino_deploy.runtime.backends.ort import open_passes
from domino_deploy.runtime.backends.ort_passes import PieceRows, TargetPasses, TargetPiece
from domino_deploy.runtime.backends.ort_slot_caches import SlotCaches
from domino_deploy.runtime.backends.ort_slot_drafters import BackboneSlots, LookupSlots, Proposals, SlotDrafter, Wanted
from domino_deploy.runtime.decode import PREFILL_ROWS
from domino_deploy.runtime.kv_cache import check_room
from domino_deploy.runtime.protocols import NOTHING_PROPOSED, BatchVerified, FloatArray, SlotCycle, SlotRows, TermsMs, Verified


def open_slots(
    bundle: Bundle, *, capacity: int, num_slots: int, threads: int | None = None, with_drafter: bool = True, prompt_lookup: bool = False
) -> OrtSlots:
    """A bundle's target and a source of proposals for several sequences, on the CPU.

    Args:
        bundle: an opened bundle in a precision that this backend runs (`domino_deploy.backends`).
        capacity: tokens of the longest sequence.
        num_slots: sequences at a time; memory is taken for those that are there.
        threads: threads inside an operator; None for one per physical core.
        with_drafter: False leaves the drafter's graphs unread.
        prompt_lookup: propose by prompt lookup; without the drafter only.

    Raises:
        BundleError: ONNX Runtime refuses a graph.
    """
    target, passes = open_passes(bundle, threads=threads, with_drafter=with_drafter)
    drafter: SlotDrafter | None = LookupSlots(num_slots) if prompt_lookup else None
    if passes is not None:
        drafter = BackboneSlots(passes, num_slots)
    return OrtSlots(target, drafter, capacity=capacity, num_slots=num_slots)


@dataclass(frozen=True, kw_only=True)
class _Cycle:
    """The last cycle, until it is committed: its sequences and what the target made of each."""

    sequences: Sequence[SlotCycle]
    found: Sequence[PieceRows]


class OrtSlots:
    """Target and drafter over several slots (`protocols.SlotPair`); arrays handed out are valid until the next pass.

    A call that does not fit what the slots hold is a ValueError.

    Args:
        target: passes of the target.
        drafter: the source of proposals, or None.
        capacity: tokens of the longest sequence.
        num_slots: sequences at a time.
    """

    max_prefill_rows = PREFILL_ROWS
    reuses_prefixes = True
    gives_prompt_logits = True

    def __init__(self, target: TargetPasses, drafter: SlotDrafter | None, *, capacity: int, num_slots: int) -> None:
        self.capacity = capacity
        self.num_slots = num_slots
        self.vocab_size = target.vocab_size
        self.max_proposals = 0 if drafter is None else drafter.max_proposals
        self.caches = SlotCaches(target.graph, num_slots)
        self.drafter = drafter
        self._target = target
        self._cycle: _Cycle | None = None

    def rows(self, slot: int) -> SlotRows:
        """See `protocols.SlotPair`."""
        drafter = self.drafter
        if drafter is None:
            return SlotRows(target=self.caches.length(slot), drafter=0)
        return SlotRows(target=self.caches.length(slot), drafter=drafter.rows(slot), waiting_rows=drafter.waiting_rows(slot))

    def truncate(self, slot: int, rows: int) -> None:
        """See `protocols.SlotPair`."""
        self._check_rows(slot, rows)
        self.caches.truncate(slot, rows)
        if self.drafter is not None:
            self.drafter.truncate(slot, rows)

    def copy(self, source: int, destination: int, rows: int) -> None:
        """See `protocols.SlotPair`."""
        self._check_rows(source, rows)
        if source == destination:
            raise ValueError(f"expected two slots, found {source} twice: truncate it")
        self.caches.copy(source, destination, rows)
        if self.drafter is not None:
            self.drafter.copy(source, destination, rows)

    def prefill(self, slot: int, token_ids: Sequence[int], *, num_logits: int, with_drafter: bool) -> FloatArray:
        """See `protocols.SlotPair`."""
        rows = len(token_ids)
        if not 1 <= num_logits <= rows <= self.max_prefill_rows:
            raise ValueError(f"expected 1 to {self.max_prefill_rows} rows, 1 up to all with logits, found {rows} and {num_logits}")
        check_room(self.caches.length(slot), rows, self.capacity)
        self._check_drafter(slot, with_drafter)
        self._cycle = None
        (found,) = self._run([slot], [token_ids], [num_logits])
        self._append(slot, found.features, with_drafter)
        return found.logits

    def cycle(self, sequences: Sequence[SlotCycle]) -> BatchVerified:
        """See `protocols.SlotPair`."""
        slots = [sequence.slot for sequence in sequences]
        if not slots or len({*slots}) < len(slots):
            raise ValueError(f"expected at least one sequence, in each slot once, found {slots}")
        for sequence in sequences:
            self._check_sequence(sequence)
        self._cycle = None
        wanted = [
            Wanted(slot=sequence.slot, token_ids=sequence.token_ids, count=count)
            for sequence in sequences
            if (count := min(sequence.count, self.capacity - len(sequence.token_ids))) > 0
        ]
        drafted = Proposals(proposals=(), draft_ms=0.0)
        if wanted and self.drafter is not None:
            drafted = self.drafter.propose(wanted)
        proposals = {asked.slot: proposal for asked, proposal in zip(wanted, drafted.proposals, strict=True)}
        verified_from = perf_counter()
        pieces = [[sequence.token_ids[-1], *proposals.get(sequence.slot, NOTHING_PROPOSED).token_ids.tolist()] for sequence in sequences]
        found = self._run(slots, pieces, [len(piece) for piece in pieces])
        finished = perf_counter()
        self._cycle = _Cycle(sequences=sequences, found=found)
        terms = TermsMs(draft=drafted.draft_ms, head=drafted.head_ms, verify=(finished - verified_from) * 1e3)
        verified = [
            Verified(proposal=proposals.get(sequence.slot, NOTHING_PROPOSED), logits=rows.logits)
            for sequence, rows in zip(sequences, found, strict=True)
        ]
        return BatchVerified(sequences=tuple(verified), terms_ms=terms)

    def commit(self, rows: Sequence[int]) -> None:
        """See `protocols.SlotPair`."""
        offered = [] if self._cycle is None else [len(found.features) for found in self._cycle.found]
        if self._cycle is None or len(rows) != len(offered) or any(not 0 <= kept <= most for kept, most in zip(rows, offered, strict=True)):
            raise ValueError(f"expected at most {offered} rows, those of the last cycle, found {list(rows)}: commit once per cycle")
        for sequence, found, kept in zip(self._cycle.sequences, self._cycle.found, rows, strict=True):
            self._append(sequence.slot, found.features[:kept], sequence.with_drafter)
        self._cycle = None

    def _run(self, slots: Sequence[int], pieces: Sequence[Sequence[int]], num_logits: Sequence[int]) -> list[PieceRows]:
        """A target pass behind the rows of some slots; what it makes of each, in their order."""
        asked = [
            TargetPiece(token_ids=piece, start=self.caches.length(slot), num_logits=count)
            for slot, piece, count in zip(slots, pieces, num_logits, strict=True)
        ]
        needed = max(piece.start for piece in asked) + self._target.rows_for(asked)
        order, cache_slots = self.caches.bind(slots, needed)
        found = self._target.run([asked[index] for index in order], cache_slots)
        return [found[place] for place in np.argsort(order)]  # the inverse of the order

    def _append(self, slot: int, features: FloatArray, with_drafter: bool) -> None:
        self.caches.append(slot, len(features))
        if with_drafter and self.drafter is not None and len(features):
            self.drafter.take(slot, features)

    def _check_rows(self, slot: int, rows: int) -> None:
        if not 0 <= rows <= self.caches.length(slot):
            raise ValueError(f"expected 0 to {self.caches.length(slot)} rows, those of slot {slot}, found {rows}")

    def _check_sequence(self, sequence: SlotCycle) -> None:
        length = self.caches.length(sequence.slot)
        if len(sequence.token_ids) != length + 1:
            raise ValueError(f"slot {sequence.slot}: expected {length} tokens and an anchor, found {len(sequence.token_ids)}")
        check_room(length, 1, self.capacity)
        if sequence.count > self.max_proposals or (sequence.count and not sequence.with_drafter):
            raise ValueError(f"slot {sequence.slot}: expected {self.max_proposals} drafts at most, with a drafter, found {sequence}")
        self._check_drafter(sequence.slot, sequence.with_drafter)

    def _check_drafter(self, slot: int, with_drafter: bool) -> None:
        rows = self.rows(slot)
        if with_drafter and rows.drafter != rows.target:
            raise ValueError(
                f"slot {slot}: expected a drafter with the target's {rows.target} rows, found {rows.drafter}: keep it in step from the "
                "first row on, or truncate the slot"
            )
