"""The caches of one graph for several sequences, in one memory: a pass binds the part that its sequences lie in.

For each cache an array [places, heads, cache slots, width].  A pass over B sequences binds B neighbouring places, so those that take
part are moved to the front; a "slot" of the pair may lie in any place, or be parked: kept apart, no longer than its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from domino_deploy.runtime.backends.ort_binding import Array, BoundGraph
from domino_deploy.runtime.kv_cache import GROWTH_ROWS, next_multiple

# A slot that the last passes left alone is parked when the memory changes its shape.  A prompt that comes in pieces has every
# second pass, a sequence that decodes all of them or, where prompts come first, one in a few.
_FRESH_PASSES = 8


class SlotCaches:
    """Rows of the caches of up to `num_slots` sequences.

    Args:
        graph: the graph; its caches are bound here and nowhere else.
        num_slots: sequences at most.
    """

    def __init__(self, graph: BoundGraph, num_slots: int) -> None:
        self._graph = graph
        self._lengths = [0] * num_slots
        self._memory: dict[str, Array] = {}  # cache -> [places, heads, cache slots, width]
        self._places: list[int | None] = []  # place -> the slot that lies there
        self._parked: dict[int, dict[str, Array]] = {}  # slot -> cache -> [heads, rows, width]
        self._last_pass = [0] * num_slots
        self._passes = 0
        self._bound: tuple[int, int] | None = None  # first place and number of those bound

    @property
    def num_slots(self) -> int:
        return len(self._lengths)

    @property
    def num_bytes(self) -> int:
        """What all of it takes."""
        arrays = [*self._memory.values(), *(cache for caches in self._parked.values() for cache in caches.values())]
        return sum(array.nbytes for array in arrays)

    def length(self, slot: int) -> int:
        """Rows of a slot that count."""
        return self._lengths[slot]

    def append(self, slot: int, rows: int) -> None:
        """Let `rows` rows count that the last pass wrote behind those of the slot."""
        self._lengths[slot] += rows

    def truncate(self, slot: int, rows: int) -> None:
        """Keep the first `rows` rows, of those that count."""
        self._lengths[slot] = rows
        if slot in self._parked:
            self._parked[slot] = {name: cache[:, :rows].copy() for name, cache in self._parked[slot].items()}
        if rows == 0:
            self._forget(slot)

    def copy(self, source: int, destination: int, rows: int) -> None:
        """Make the destination hold the first `rows` rows of another slot; it is parked with them until a pass wants it."""
        self._forget(destination)
        if rows:
            self._parked[destination] = self._copied(source, rows)
        self._lengths[destination] = rows

    def bind(self, slots: Sequence[int], cache_slots: int) -> tuple[list[int], int]:
        """Bind the caches of some slots for a pass that needs at least `cache_slots` of each.

        Returns:
            Which of `slots` lies in each row of the bound caches (indexes into `slots`), and how long the caches are.
        """
        self._passes += 1
        for slot in slots:
            self._last_pass[slot] = self._passes
        self._shape(slots, cache_slots)
        for slot in slots:
            if slot not in self._places:
                self._place(slot)
        first = self._gather(slots)
        places = (first, len(slots))
        if self._bound != places:
            for name, memory in self._memory.items():
                self._graph.bind_cache(name, memory[first : first + len(slots)])
            self._bound = places
        return [slots.index(slot) for slot in self._places[first : first + len(slots)] if slot is not None], self._cache_slots

    @property
    def _cache_slots(self) -> int:
        return int(next(iter(self._memory.values())).shape[2]) if self._memory else 0

    def _shape(self, slots: Sequence[int], cache_slots: int) -> None:
        """Give the memory the room that a pass needs, and not much more than the sequences that go on need.

        Attention reads all of a bound cache: 64 unused slots take 3 % of a pass over 8 sequences of a 135M-parameter target.  Another
        shape takes one copy of the rows: a third of such a pass at 450 rows each.
        """
        fresh = {slot for slot in self._places if slot is not None and self._passes - self._last_pass[slot] < _FRESH_PASSES} | {*slots}
        longest = max(cache_slots, *(self._lengths[slot] for slot in fresh))
        needed = next_multiple(longest, GROWTH_ROWS)
        placed = {slot for slot in self._places if slot is not None} | {*slots}
        fits = needed <= self._cache_slots and len(placed) <= len(self._places)
        # Shrunk only where that frees a quarter of the length or three quarters of the places: each time is a copy.
        if fits and 4 * needed > 3 * self._cache_slots and 4 * len(placed) > len(self._places):
            return
        for slot in placed - fresh:
            self._parked[slot] = self._copied(slot, self._lengths[slot])
            self._places[self._places.index(slot)] = None
        self._move(needed, len(fresh))

    def _move(self, cache_slots: int, needed_places: int) -> None:
        """To memory of another shape: for what takes part, up to the next power of two."""
        kept = [slot for slot in self._places if slot is not None]
        places = min(1 << (needed_places - 1).bit_length(), self.num_slots)
        self._bound = None
        self._graph.unbind_caches()  # else it would keep the old memory
        for name, (heads, width, dtype) in self._graph.cache_shapes.items():
            # Zeros: a masked slot still takes part, times 0, and garbage may be NaN.
            memory = np.zeros((places, heads, cache_slots, width), dtype)
            for place, slot in enumerate(kept):
                rows = self._lengths[slot]
                memory[place, :, :rows] = self._memory[name][self._places.index(slot), :, :rows]
            self._memory[name] = memory
        self._places = [*kept, *([None] * (places - len(kept)))]

    def _place(self, slot: int) -> None:
        """Put a slot that has no place into the first that is free; rows of the one before it are wiped, as they may be NaN."""
        place = self._places.index(None)
        parked, rows = self._parked.pop(slot, None), self._lengths[slot]
        for name, memory in self._memory.items():
            memory[place, :, rows:] = 0
            if parked is not None:
                memory[place, :, :rows] = parked[name]
        self._places[place] = slot

    def _gather(self, slots: Sequence[int]) -> int:
        """Make the places of `slots` neighbours; returns the first."""
        if len(slots) == 1:
            return self._places.index(slots[0])
        foreign = [place for place, slot in enumerate(self._places[: len(slots)]) if slot not in slots]
        outside = [place for place, slot in enumerate(self._places) if slot in slots and place >= len(slots)]
        for one, other in zip(foreign, outside, strict=True):
            for memory in self._memory.values():
                memory[[one, other]] = memory[[other, one]]
            self._places[one], self._places[other] = self._places[other], self._places[one]
        return 0

    def _copied(self, slot: int, rows: int) -> dict[str, Array]:
        """The first rows of every cache of a slot, wherever it is: [heads, rows, width]."""
        if slot in self._parked:
            return {name: cache[:, :rows].copy() for name, cache in self._parked[slot].items()}
        place = self._places.index(slot)
        return {name: memory[place, :, :rows].copy() for name, memory in self._memory.items()}

    def _forget(self, slot: int) -> None:
        self._parked.pop(slot, None)
        if slot in self._places:
            self._places[self._places.index(slot)] = None
        if not any(place is not None for place in self._places):
            self._places, self._memory, self._bound = [], {}, None
            self._graph.unbind_caches()
