"""One slot over a target and a drafter of one sequence: how backends that do not batch serve requests in turn."""

from __future__ import annotations

from collections.abc import Sequence

from domino_deploy.runtime.decode import HostPair
from domino_deploy.runtime.kv_cache import check_room
from domino_deploy.runtime.protocols import (
    NOTHING_PROPOSED,
    BatchVerified,
    Drafter,
    FloatArray,
    PairingTarget,
    SlotCycle,
    SlotRows,
    SpeculativePair,
    Target,
    TermsMs,
    Verified,
)


class SingleSlot:
    """A pair with the slot 0 alone (`protocols.SlotPair`); a call that does not fit what it holds is a ValueError.

    Args:
        target: the target.
        drafter: a source of proposals, or None.
    """

    num_slots = 1
    max_prefill_rows = None
    reuses_prefixes = False
    gives_prompt_logits = False

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.capacity = target.capacity
        self.vocab_size = target.vocab_size
        self.max_proposals = 0 if drafter is None else drafter.max_proposals
        self._target = target
        self._drafter = drafter
        self._pair: SpeculativePair | None = None  # of the sequence that is there
        self._with_drafter = False
        self._rows = 0
        self._offered = 0  # rows of the last cycle that may be committed

    def rows(self, slot: int) -> SlotRows:
        """See `protocols.SlotPair`."""
        return SlotRows(target=self._rows, drafter=self._rows if self._with_drafter else 0)

    def truncate(self, slot: int, rows: int) -> None:
        """Forget the sequence; no part of its rows can be kept, only all."""
        if rows not in (0, self._rows):
            raise ValueError(f"expected 0 rows to keep, or all {self._rows}, found {rows}: this pair reuses no prefixes")
        if rows == 0 and self._pair is not None:
            self._pair.reset()
            self._pair, self._with_drafter, self._rows, self._offered = None, False, 0, 0

    def copy(self, source: int, destination: int, rows: int) -> None:
        """There is no second slot to copy to."""
        raise ValueError("expected no copies of a single slot, found one: this pair reuses no prefixes")

    def prefill(self, slot: int, token_ids: Sequence[int], *, num_logits: int, with_drafter: bool) -> FloatArray:
        """See `protocols.SlotPair`: a whole prompt in an empty slot, with the logits of its last row."""
        if self._pair is not None or num_logits != 1:
            raise ValueError(f"expected a whole prompt in an empty slot, 1 row with logits, found {self._rows} rows and {num_logits}")
        check_room(0, len(token_ids), self.capacity)
        drafter = self._drafter if with_drafter else None
        if isinstance(self._target, PairingTarget):
            self._pair = self._target.paired_with(drafter, needs_logits=True)
        else:
            self._pair = HostPair(self._target, drafter)
        self._with_drafter = drafter is not None
        self._pair.reset()
        logits = self._pair.prefill(token_ids)
        self._rows = len(token_ids)
        return logits[None]

    def cycle(self, sequences: Sequence[SlotCycle]) -> BatchVerified:
        """See `protocols.SlotPair`.

        A cycle that is to draft nothing drafts one token all the same where there is room, and drops it: a drafter of one sequence
        keeps in step by drafting alone.
        """
        if len(sequences) != 1 or self._pair is None or len(sequences[0].token_ids) != self._rows + 1:
            raise ValueError(f"expected the one sequence of {self._rows} rows and an anchor, found {list(sequences)}")
        (sequence,) = sequences
        if sequence.with_drafter != self._with_drafter or sequence.count > (self.max_proposals if self._with_drafter else 0):
            raise ValueError(f"expected a sequence that is served as its prompt was, found {sequence}")
        check_room(self._rows, 1, self.capacity)
        room = self.capacity - len(sequence.token_ids)
        verified = self._pair.cycle(sequence.token_ids, min(max(sequence.count, 1 if self._with_drafter else 0), room))
        proposal = verified.proposal
        terms = TermsMs(draft=proposal.draft_ms, head=proposal.head_ms, verify=verified.verify_ms)
        if sequence.count == 0:
            logits = None if verified.logits is None else verified.logits[:1]
            verified = Verified(proposal=NOTHING_PROPOSED, logits=logits)
        self._offered = len(verified.proposal.token_ids) + 1
        return BatchVerified(sequences=(verified,), terms_ms=terms)

    def commit(self, rows: Sequence[int]) -> None:
        """See `protocols.SlotPair`."""
        if self._pair is None or len(rows) != 1 or not 0 <= rows[0] <= self._offered or not self._offered:
            raise ValueError(f"expected 0 to {self._offered} rows of one sequence, found {list(rows)}: commit once per cycle")
        self._pair.commit(rows[0])
        self._rows, self._offered = self._rows + rows[0], 0
