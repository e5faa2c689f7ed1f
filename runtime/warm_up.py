"""Cycles of made-up sequences: they warm a pair up, and show what its cycles cost.

A large model takes minutes for it; who ends the engine meanwhile waits for one cycle.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from domino_deploy.runtime.controller import SpeculationController
from domino_deploy.runtime.protocols import SlotCycle, SlotPair, TermsMs

# Tokens of a made-up prompt: about a short chat message with its template.
_PROMPT_ROWS = 64
# Made-up sequences go round in so many tokens, so that drafting from the context finds something to copy.
_PERIOD = 7


class Interrupted(Exception):
    """A warm-up that is not wanted any more."""


def warm_up(pair: SlotPair, controller: SpeculationController, max_width: int, *, is_wanted: Callable[[], bool]) -> None:
    """Run every graph once, and measure what cycles cost for the controller.

    Args:
        pair: all its slots empty; they are so again behind it.
        controller: to be calibrated.
        max_width: drafts per cycle at most.
        is_wanted: asked before every cycle.

    Raises:
        Interrupted: it is not wanted any more; the slots are as they are.
    """
    sequences, slots = MadeUpSequences(pair), pair.num_slots

    def run(batch: int, width: int) -> TermsMs:
        if not is_wanted():
            raise Interrupted
        return sequences.run(batch, width)

    run(slots, max_width)
    batches = sorted({slots, *(1 << power for power in range(slots.bit_length()) if 1 << power <= slots)})
    controller.calibrate(run, batches)
    sequences.clear()


class MadeUpSequences:
    """Sequences in the first slots of a pair that nobody uses.

    Args:
        pair: all its slots empty; `clear` leaves them so.
    """

    def __init__(self, pair: SlotPair) -> None:
        self._pair = pair
        self._lengths = [0] * pair.num_slots  # tokens of each, the anchor included

    def run(self, batch: int, width: int) -> TermsMs:
        """One cycle of so many sequences with so many drafts each, and where its time went."""
        with_drafter = self._pair.max_proposals > 0
        for slot in range(batch):
            if self._lengths[slot] == 0 or self._lengths[slot] + width > self._pair.capacity:
                self._restart(slot, with_drafter)
        started = perf_counter()
        verified = self._pair.cycle(
            [
                SlotCycle(slot=slot, token_ids=self._tokens(self._lengths[slot]), count=width, with_drafter=with_drafter)
                for slot in range(batch)
            ]
        )
        self._pair.commit([1] * batch)
        for slot in range(batch):
            self._lengths[slot] += 1
        return verified.terms_ms.within((perf_counter() - started) * 1e3)

    def clear(self) -> None:
        """Leave all slots empty."""
        for slot, length in enumerate(self._lengths):
            if length:
                self._pair.truncate(slot, 0)
                self._lengths[slot] = 0

    def _restart(self, slot: int, with_drafter: bool) -> None:
        # Half of the capacity at most, so that cycles have room.
        rows = max(1, min(_PROMPT_ROWS, self._pair.capacity // 2, self._pair.max_prefill_rows or _PROMPT_ROWS))
        self._pair.truncate(slot, 0)
        self._pair.prefill(slot, self._tokens(rows), num_logits=1, with_drafter=with_drafter)
        self._lengths[slot] = rows + 1

    def _tokens(self, count: int) -> list[int]:
        period = min(_PERIOD, self._pair.vocab_size)
        return [index % period for index in range(count)]
