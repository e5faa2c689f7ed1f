"""Which slot serves a new prompt, and how much of the prompt is already in a cache: the rows of equal beginnings are equal.

Rows of a slot stay when its request ends; a later prompt that begins alike starts from them, in the same slot or in a copy.  The
memory is the `SlotPair`'s; here is only the knowledge of which tokens its rows were made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from domino_deploy.runtime.protocols import SlotPair

# Fewer rows are not worth a copy: they are run with the others of the first piece, in the same time.  Nearly every two prompts share a
# token or two, a chat template's beginning or so.
LEAST_REUSED_ROWS = 16


class PrefixCache:
    """What the slots of a pair hold.

    Args:
        pair: its slots, all empty.
        least_rows: rows that are worth a copy, at least one.
    """

    def __init__(self, pair: SlotPair, *, least_rows: int = LEAST_REUSED_ROWS) -> None:
        self._pair = pair
        self._least_rows = least_rows
        self._tokens: list[Sequence[int]] = [() for _ in range(pair.num_slots)]  # the first of them are the slot's rows
        self._last_use = [0] * pair.num_slots
        self._uses = 0

    def occupy(self, slot: int, tokens: Sequence[int]) -> None:
        """Note what the rows of a slot are made of from now on; the sequence may grow at its end, with the rows."""
        self._tokens[slot] = tokens
        self.touch(slot)

    def touch(self, slot: int) -> None:
        """Note a use; the slot used least recently is the first to be given away."""
        self._uses += 1
        self._last_use[slot] = self._uses

    def start(self, prompt: Sequence[int], free: Iterable[int], *, with_drafter: bool, may_reuse: bool) -> tuple[int, int]:
        """Choose a slot out of `free` (at least one), and leave in it the rows of the prompt's longest known beginning.

        A slot that would give up less than half of its rows is taken over; otherwise its rows are copied, so that what it was made
        for finds them again.

        Args:
            with_drafter: rows must be in the drafter's cache too.
            may_reuse: False for a prompt whose every row must be run.

        Returns:
            The slot, and how many rows it holds: fewer than the prompt has tokens, so that at least one is run.
        """
        candidates = sorted(free, key=lambda slot: (self._pair.rows(slot).target > 0, self._last_use[slot]))
        source, rows = self._longest(prompt, with_drafter, 0) if may_reuse and self._pair.reuses_prefixes else (None, 0)
        if source is not None and source in candidates and (2 * rows >= self._pair.rows(source).target or len(candidates) == 1):
            self._pair.truncate(source, rows)
            slot = source
        else:
            # Any other than the source, which is to keep its rows.
            slot = next((candidate for candidate in candidates if candidate != source), candidates[0])
            self._pair.truncate(slot, 0)
            if source is not None:
                self._pair.copy(source, slot, rows)
        if source is not None:
            self.touch(source)
        self.occupy(slot, prompt)
        return slot, rows

    def catch_up(self, slot: int, *, with_drafter: bool) -> int:
        """Copy into a slot what another has since computed of the same prompt; how many rows were won."""
        if not self._pair.reuses_prefixes:
            return 0
        held = self._pair.rows(slot).target
        source, rows = self._longest(self._tokens[slot], with_drafter, held)
        if source is None:
            return 0
        self._pair.copy(source, slot, rows)
        self.touch(source)
        return rows - held

    def _longest(self, prompt: Sequence[int], with_drafter: bool, held: int) -> tuple[int | None, int]:
        """The slot with the longest beginning of a prompt, and its rows; (None, 0) where none is worth a copy over `held` rows."""
        source, most = None, held + self._least_rows - 1
        for slot, tokens in enumerate(self._tokens):
            there = self._pair.rows(slot)
            usable = min(there.target, len(prompt) - 1, there.drafter if with_drafter else there.target)
            if usable > most and (rows := common_length(prompt, tokens, usable)) > most:
                source, most = slot, rows
        return (None, 0) if source is None else (source, most)


def common_length(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """How many tokens two sequences have in common at their beginning, `most` at most."""
    most = min(most, len(one), len(other))
    return next((index for index in range(most) if one[index] != other[index]), most)
