"""A pair over several slots whose target is `ToyTarget`'s: what single runs and scheduled runs say must be the same.

It holds its caller to `protocols.SlotPair`: a token in the wrong place, a row used after it was truncated, a drafter left behind,
a commit that does not fit the cycle, all raise `Misuse`.  Logits of an earlier pass turn to NaN, since backends reuse their memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from domino_deploy.errors import CapacityError
from domino_deploy.runtime.protocols import BatchVerified, FloatArray, Proposal, SlotCycle, SlotRows, TermsMs, Verified
from tests.support.doubles import toy_logits

Prefix = tuple[int, ...]
# What a toy cycle costs, milliseconds: fixed, so that a controller's choices can be told in advance.
TOY_TERMS = TermsMs(draft=2.0, head=1.0, verify=10.0)


class Misuse(BaseException):
    """The caller broke the protocol; no ordinary error, so that nothing takes it for a failure of the pair."""


class ToyPair:
    """Slots of a toy target and of a drafter that is right with a seeded chance.

    Args:
        num_slots: sequences at a time.
        vocab_size: of the target.
        capacity: tokens of the longest sequence.
        max_proposals: drafts per cycle at most.
        hit_chance: how often a draft is the target's likeliest token.
        seed: of the drafts.
        max_prefill_rows, reuses_prefixes, gives_prompt_logits: as in the protocol.
        logits: those behind a prefix, for that many tokens.
    """

    def __init__(
        self,
        num_slots: int = 4,
        vocab_size: int = 8,
        capacity: int = 64,
        max_proposals: int = 6,
        *,
        hit_chance: float = 0.7,
        seed: int = 0,
        max_prefill_rows: int | None = 512,
        reuses_prefixes: bool = True,
        gives_prompt_logits: bool = True,
        logits: Callable[[Prefix, int], FloatArray] = toy_logits,
    ) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.capacity = capacity
        self.max_proposals = max_proposals
        self.max_prefill_rows = max_prefill_rows
        self.reuses_prefixes = reuses_prefixes
        self.gives_prompt_logits = gives_prompt_logits
        self.calls: list[tuple[str, int]] = []  # ("prefill", rows), ("cycle", sequences), ("copy", rows): what was asked, in order
        self.fail_at: int | None = None  # number of the prefill or cycle that dies
        self.failure: BaseException = RuntimeError("the machine is on fire")
        self._hit_chance = hit_chance
        self._seed = seed
        self._logits = logits
        self._tokens: list[list[int]] = [[] for _ in range(num_slots)]  # committed rows of the target
        self._drafter_rows = [0] * num_slots
        self._pending: list[tuple[SlotCycle, list[int]]] | None = None  # the last cycle and its drafts, until it is committed
        self._handed_out: list[FloatArray] = []
        self._passes = 0

    def fail_after(self, passes: int) -> None:
        """Of the prefills and cycles from now on, so many succeed and the next one dies."""
        self.fail_at = self._passes + passes + 1

    def rows(self, slot: int) -> SlotRows:
        return SlotRows(target=len(self._tokens[slot]), drafter=self._drafter_rows[slot])

    def held(self, slot: int) -> list[int]:
        """The tokens of a slot's rows."""
        return list(self._tokens[slot])

    def truncate(self, slot: int, rows: int) -> None:
        self._expect(self._pending is None, "a commit before the slots change")
        self._expect(0 <= rows <= len(self._tokens[slot]), f"0 to {len(self._tokens[slot])} rows to keep, found {rows}")
        self._expect(rows == 0 or self.reuses_prefixes, "truncation to 0 rows only")
        del self._tokens[slot][rows:]
        self._drafter_rows[slot] = min(self._drafter_rows[slot], rows)

    def copy(self, source: int, destination: int, rows: int) -> None:
        self._expect(self._pending is None, "a commit before the slots change")
        self._expect(self.reuses_prefixes, "no copy at all")
        self._expect(source != destination, "two slots")
        self._expect(1 <= rows <= len(self._tokens[source]), f"1 to {len(self._tokens[source])} rows to copy, found {rows}")
        self._tokens[destination] = self._tokens[source][:rows]
        self._drafter_rows[destination] = min(self._drafter_rows[source], rows)
        self.calls.append(("copy", rows))

    def prefill(self, slot: int, token_ids: Sequence[int], *, num_logits: int, with_drafter: bool) -> FloatArray:
        tokens, rows = self._tokens[slot], len(token_ids)
        self._expect(self._pending is None, "a commit before the next pass")
        self._expect(rows >= 1, "at least one row")
        self._expect(1 <= num_logits <= rows, f"logits of 1 to {rows} rows, found {num_logits}")
        self._expect(num_logits == 1 or self.gives_prompt_logits, f"logits of one row, found {num_logits}")
        if self.max_prefill_rows is None:
            self._expect(not tokens, "a prompt in one piece, in an empty slot")
        else:
            self._expect(rows <= self.max_prefill_rows, f"at most {self.max_prefill_rows} rows, found {rows}")
        self._expect_drafter(slot, with_drafter)
        self._begin("prefill", rows)
        if len(tokens) + rows > self.capacity:
            raise CapacityError(f"expected at most {self.capacity} tokens, found {len(tokens) + rows}")
        tokens += map(int, token_ids)
        if with_drafter:
            self._drafter_rows[slot] = len(tokens)
        return self._logits_behind(tokens, num_logits)

    def cycle(self, sequences: Sequence[SlotCycle]) -> BatchVerified:
        self._expect(self._pending is None, "a commit before the next pass")
        self._expect(len(sequences) >= 1, "at least one sequence")
        slots = [sequence.slot for sequence in sequences]
        self._expect(len(set(slots)) == len(slots), f"each slot once, found {slots}")
        for sequence in sequences:
            held = self._tokens[sequence.slot]
            self._expect(
                list(sequence.token_ids[:-1]) == held, f"slot {sequence.slot}: {held} and an anchor, found {list(sequence.token_ids)}"
            )
            self._expect(0 <= sequence.count <= self.max_proposals, f"0 to {self.max_proposals} drafts, found {sequence.count}")
            self._expect(sequence.with_drafter or sequence.count == 0, "drafts of a drafter that is kept in step only")
            self._expect_drafter(sequence.slot, sequence.with_drafter)
        self._begin("cycle", len(sequences))
        self._pending = []
        verified = []
        for sequence in sequences:
            prefix = tuple(map(int, sequence.token_ids))
            if len(prefix) > self.capacity:
                raise CapacityError(f"expected at most {self.capacity} tokens, found {len(prefix)}")
            drafts = self._drafts(prefix, min(sequence.count, self.capacity - len(prefix)))
            self._pending.append((sequence, drafts))
            logits = self._logits_behind([*prefix, *drafts], len(drafts) + 1)
            verified.append(Verified(proposal=Proposal(token_ids=np.array(drafts, dtype=np.int64)), logits=logits))
        terms = TOY_TERMS if any(drafts for _, drafts in self._pending) else TermsMs(verify=TOY_TERMS.verify)
        return BatchVerified(sequences=tuple(verified), terms_ms=terms)

    def commit(self, rows: Sequence[int]) -> None:
        self._expect(self._pending is not None, "a cycle before its commit")
        assert self._pending is not None
        self._expect(len(rows) == len(self._pending), f"{len(self._pending)} numbers of rows, found {len(rows)}")
        for (sequence, drafts), kept in zip(self._pending, rows, strict=True):
            self._expect(0 <= kept <= len(drafts) + 1, f"0 to {len(drafts) + 1} rows to keep, found {kept}")
            self._tokens[sequence.slot] += [int(sequence.token_ids[-1]), *drafts][:kept]
            if sequence.with_drafter:
                self._drafter_rows[sequence.slot] = len(self._tokens[sequence.slot])
        self._pending = None

    def _drafts(self, prefix: Prefix, count: int) -> list[int]:
        """Fewer than asked for at times, as prompt lookup's; never where every draft is to be right."""
        drafts: list[int] = []
        while len(drafts) < count:
            behind = (*prefix, *drafts)
            chance = zlib.crc32(repr((self._seed, behind)).encode()) / 2**32
            best = int(self._logits(behind, self.vocab_size).argmax())
            if chance > 0.97 and self._hit_chance < 1:
                break
            drafts.append(best if chance < self._hit_chance else (best + 1) % self.vocab_size)
        return drafts

    def _logits_behind(self, tokens: Sequence[int], count: int) -> FloatArray:
        """Logits [count, V] of the last rows."""
        logits = np.stack([self._logits(tuple(tokens[:end]), self.vocab_size) for end in range(len(tokens) - count + 1, len(tokens) + 1)])
        self._handed_out.append(logits)
        return logits

    def _begin(self, kind: str, size: int) -> None:
        for logits in self._handed_out:
            logits.fill(np.nan)
        self._handed_out = []
        self.calls.append((kind, size))
        self._passes += 1
        if self._passes == self.fail_at:
            raise self.failure

    def _expect_drafter(self, slot: int, with_drafter: bool) -> None:
        held = self.rows(slot)
        behind = with_drafter and held.drafter != held.target
        self._expect(not behind, f"slot {slot}: a drafter with {held.target} rows, found {held.drafter}")
        self._expect(not with_drafter or self.max_proposals > 0, "no use of a drafter that is not there")

    def _expect(self, holds: bool, expectation: str) -> None:
        if not holds:
            raise Misuse(f"expected {expectation}")
