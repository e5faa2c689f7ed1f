"""What a decode loop needs of a target and of a drafter, and the records they exchange.

Protocols, because several implementations exist: ONNX Runtime, eager PyTorch, TensorRT, prompt lookup.  One sequence each,
but for `SlotPair`, which holds several; the arrays are numpy's, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class TargetRows:
    """What one target pass gives.

    logits: [N, V] of the last N rows asked for; features: [S, F] tapped features of all S new rows.  A backend may reuse
    their memory in its next pass.
    """

    logits: FloatArray
    features: FloatArray


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Drafted tokens (int64, at most as many as asked for) and what they cost in milliseconds.

    pooled: those that a correction chose out of a candidate pool; uncertified: those of them for which a token outside the
    pool could have won.
    """

    token_ids: IntArray
    draft_ms: float = 0.0
    head_ms: float = 0.0
    pooled: int = 0
    uncertified: int = 0


NOTHING_PROPOSED = Proposal(token_ids=np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What one cycle drafted and what the target makes of it, N = drafted tokens + 1 rows; a pair may reuse the memory in its next pass.

    logits: [N, V], or None where they were not asked for; greedy_ids: int64 [N], the highest logit of each row (the lowest id
    of equals; -1 where it is not finite), or None where the logits are there to find it; verify_ms: the target pass.
    """

    proposal: Proposal
    logits: FloatArray | None = None
    greedy_ids: IntArray | None = None
    verify_ms: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TermsMs:
    """Where the time of one cycle went, milliseconds: the three graphs, and everything outside them."""

    draft: float = 0.0
    head: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """The whole cycle, milliseconds."""
        return self.draft + self.head + self.verify + self.other

    def within(self, total: float) -> TermsMs:
        """The same graphs, and as `other` the rest of `total` milliseconds."""
        return replace(self, other=max(0.0, total - self.draft - self.head - self.verify))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One cycle of the decode loop (the first one is the prefill: one token, nothing proposed).

    token_ids: committed tokens, in order; proposed: drafted tokens that were verified; accepted: those among
    `token_ids`, so `accepted <= proposed` and, unless cut short, `len(token_ids) == accepted + 1`; pooled and uncertified
    as in `Proposal`.
    finish_reason: "stop", "length", or None while generation goes on.
    """

    token_ids: tuple[int, ...]
    proposed: int = 0
    accepted: int = 0
    terms_ms: TermsMs = field(default_factory=TermsMs)
    finish_reason: str | None = None
    pooled: int = 0
    uncertified: int = 0


class Target(Protocol):
    """A target with its KV cache for one sequence."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Rows the cache can hold at most."""

    @property
    def length(self) -> int:
        """Rows committed so far."""

    def reset(self) -> None:
        """Forget the sequence."""

    def forward(self, token_ids: Sequence[int] | IntArray, num_logits: int) -> TargetRows:
        """Run new rows behind the committed ones; logits of the last `num_logits`.  Commits nothing.

        Raises:
            CapacityError: `length + len(token_ids) > capacity`.
        """

    def commit(self, rows: int) -> None:
        """Keep the first `rows` rows of the last pass."""


class Drafter(Protocol):
    """A source of proposals for one sequence."""

    @property
    def max_proposals(self) -> int: ...

    def reset(self) -> None:
        """Forget the sequence."""

    def propose(self, token_ids: Sequence[int], features: FloatArray, count: int) -> Proposal:
        """Propose at most `count` tokens to follow `token_ids`.

        Args:
            token_ids: every committed token, the anchor last.
            features: [L, F] target features of the tokens committed since the last call, the anchor excluded (its row
                does not exist yet): over all calls, exactly `token_ids[:-1]` once.
            count: 1 up to `max_proposals`.
        """


class SpeculativePair(Protocol):
    """A target and its source of proposals for one request; drafted tokens and features pass between them without the loop."""

    def reset(self) -> None:
        """Forget the sequence."""

    def prefill(self, prompt_ids: Sequence[int]) -> FloatArray:
        """Run a prompt and commit it; logits [V] of its last row."""

    def cycle(self, token_ids: Sequence[int], count: int) -> Verified:
        """Draft at most `count` tokens behind `token_ids` (every committed token, the anchor last) and run the target over them.

        Raises:
            CapacityError: the target's cache has no room for `count + 1` rows.
        """

    def commit(self, rows: int) -> None:
        """Keep the first `rows` rows of the last cycle."""


@runtime_checkable
class PairingTarget(Target, Protocol):
    """A target that does more with a drafter than `forward` lets it: on a device, the host need not see what passes between them."""

    def paired_with(self, drafter: Drafter | None, *, needs_logits: bool) -> SpeculativePair:
        """The pair that serves one request; without `needs_logits`, cycles give greedy tokens alone."""


@dataclass(frozen=True, kw_only=True)
class SlotCycle:
    """One sequence's part in a batched cycle.

    slot: where its caches are; token_ids: every committed token, the anchor last; count: tokens to draft, 0 for none;
    with_drafter: keep the drafter's cache in step, so that later cycles can draft.  `count > 0` needs it, in every cycle and
    prefill of this sequence before.
    """

    slot: int
    token_ids: Sequence[int]
    count: int
    with_drafter: bool


@dataclass(frozen=True, kw_only=True)
class BatchVerified:
    """What a batched cycle gives: `sequences` in the order asked for, each with logits (its own times are 0), and the times of the
    whole pass, draft, head and verify."""

    sequences: tuple[Verified, ...]
    terms_ms: TermsMs


@dataclass(frozen=True, kw_only=True)
class SlotRows:
    """Rows of one slot: committed ones of the target; of the drafter those it holds, or has the features for, and how many of these
    features wait for its next draft, which takes the longer for it."""

    target: int
    drafter: int
    waiting_rows: int = 0


class SlotPair(Protocol):
    """A target and its source of proposals over several slots, one sequence each; sequences come and go between passes.

    A slot that nothing serves keeps its rows until it is truncated: a later prompt that begins alike may start from them.
    """

    @property
    def num_slots(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence, prompt and answer together; room for a block behind them is apart."""

    @property
    def max_proposals(self) -> int:
        """0 without a drafter."""

    @property
    def max_prefill_rows(self) -> int | None:
        """Rows of one prefill at most; None where a prompt must come whole, in one call, into an empty slot."""

    @property
    def reuses_prefixes(self) -> bool:
        """Whether `truncate` to more than 0 rows and `copy` are to be had."""

    @property
    def gives_prompt_logits(self) -> bool:
        """Whether `prefill` gives logits of more than its last row."""

    def rows(self, slot: int) -> SlotRows: ...

    def truncate(self, slot: int, rows: int) -> None:
        """Keep the first `rows` rows, in both caches (the drafter may have fewer)."""

    def copy(self, source: int, destination: int, rows: int) -> None:
        """Make the destination hold the first `rows` rows of the source, in both caches (the drafter may have fewer)."""

    def prefill(self, slot: int, token_ids: Sequence[int], *, num_logits: int, with_drafter: bool) -> FloatArray:
        """Run a piece of a prompt behind the slot's rows and commit it; logits [num_logits, V] of its last rows.

        Raises:
            CapacityError: the sequence becomes longer than `capacity`.
        """

    def cycle(self, sequences: Sequence[SlotCycle]) -> BatchVerified:
        """One draft, one head and one verify pass for all of them; commits nothing.

        A sequence whose rest of `capacity` is short gets at most that many drafts.

        Raises:
            CapacityError: a sequence has no row left for its anchor.
        """

    def commit(self, rows: Sequence[int]) -> None:
        """Keep the first `rows[i]` rows of sequence i of the last cycle; the first row is the anchor's."""
