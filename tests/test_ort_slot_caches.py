"""The memory of several sequences' caches, against lists of rows: whatever moves, every slot has its own."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from domino_deploy.runtime.backends.ort_slot_caches import SlotCaches
from domino_deploy.runtime.kv_cache import GROWTH_ROWS

HEADS, WIDTH = 2, 3
CACHES = ("key_cache.0", "value_cache.0")


class Graph:
    """What is bound; a pass writes into it."""

    def __init__(self) -> None:
        self.cache_shapes = {name: (HEADS, WIDTH, np.dtype(np.float32)) for name in CACHES}
        self.bound: dict[str, NDArray[np.float32]] = {}
        self.binds = 0

    def bind_cache(self, name: str, cache: NDArray[np.float32]) -> None:
        assert cache.flags.c_contiguous
        self.bound[name] = cache
        self.binds += 1

    def unbind_caches(self) -> None:
        self.bound.clear()


class Model:
    """Slots of `SlotCaches`, and beside them what each should hold: one number per row."""

    def __init__(self, num_slots: int) -> None:
        self.graph = Graph()
        self.caches = SlotCaches(self.graph, num_slots)  # type: ignore[arg-type]  # all that is used of it
        self.expected: list[list[float]] = [[] for _ in range(num_slots)]
        self.last_bound: list[int] = []  # the slots of the last pass, in the order of their places
        self._next = 0.0

    def run(self, slots: list[int], rows: int, kept: list[int]) -> int:
        """A pass of `rows` new rows for some slots, of which it keeps the first; the length of the caches bound."""
        order, cache_slots = self.caches.bind(slots, max(len(self.expected[slot]) for slot in slots) + rows)
        assert sorted(order) == [*range(len(slots))]
        self.last_bound = [slots[index] for index in order]
        for row, index in enumerate(order):
            slot, held = slots[index], len(self.expected[slots[index]])
            for number, name in enumerate(CACHES):
                cache = self.graph.bound[name]
                assert cache.shape == (len(slots), HEADS, cache_slots, WIDTH)
                assert np.isfinite(cache).all()
                np.testing.assert_array_equal(cache[row, :, :held], self._content(slot, number))
            new = [self._next + step for step in range(1, rows + 1)]
            self._next = new[-1]
            for number, name in enumerate(CACHES):
                self.graph.bound[name][row, :, held : held + rows] = _rows(new, number)
            self.expected[slot] += new[: kept[index]]
            self.caches.append(slot, kept[index])
        return cache_slots

    def truncate(self, slot: int, rows: int) -> None:
        self.caches.truncate(slot, rows)
        del self.expected[slot][rows:]

    def copy(self, source: int, destination: int, rows: int) -> None:
        self.caches.copy(source, destination, rows)
        self.expected[destination] = self.expected[source][:rows]

    def _content(self, slot: int, number: int) -> NDArray[np.float32]:
        return _rows(self.expected[slot], number)


def _rows(values: list[float], number: int) -> NDArray[np.float32]:
    """[heads, rows, width] of one number per row, of the cache with this number."""
    each = np.array(values, np.float32).reshape(1, -1, 1) + 1e5 * number
    heads = 1e4 * np.arange(HEADS, dtype=np.float32).reshape(-1, 1, 1)
    return np.broadcast_to(each + heads, (HEADS, len(values), WIDTH))


@pytest.mark.parametrize("seed", range(20))
def test_every_slot_has_its_own_rows_whatever_moves(seed):
    rng = np.random.default_rng(seed)
    num_slots = int(rng.integers(1, 7))
    model = Model(num_slots)
    for _ in range(150):
        slot, other = (int(slot) for slot in rng.integers(num_slots, size=2))
        held = len(model.expected[slot])
        match int(rng.integers(8)):
            case 0:
                model.truncate(slot, int(rng.integers(held + 1)) if rng.random() < 0.5 else 0)
            case 1 if other != slot:
                model.copy(slot, other, int(rng.integers(held + 1)))
            case 2:
                rows = int(rng.integers(1, 120))
                model.run([slot], rows, [rows])
            case _:
                slots = rng.permutation(num_slots)[: rng.integers(1, num_slots + 1)].tolist()
                model.run(slots, 4, rng.integers(0, 5, len(slots)).tolist())
        assert [model.caches.length(slot) for slot in range(num_slots)] == [len(rows) for rows in model.expected]


def test_passes_of_the_same_sequences_bind_and_copy_nothing_anew():
    model = Model(4)
    for slot in range(4):
        model.run([slot], 10, [10])
    model.run([0, 1, 2, 3], 4, [2, 2, 2, 2])
    memory, binds = model.graph.bound["key_cache.0"].base, model.graph.binds
    for _ in range(5):
        model.run([3, 2, 1, 0], 4, [1, 2, 3, 4])
    assert model.graph.bound["key_cache.0"].base is memory
    assert model.graph.binds == binds


def test_a_sequence_that_joins_moves_nobody():
    model = Model(4)
    for slot in (2, 0):
        model.run([slot], 10, [10])
    model.run([0, 2], 4, [1, 1])
    assert model.last_bound == [2, 0]
    model.run([1], 10, [10])
    model.run([0, 1, 2], 4, [1, 1, 1])
    assert model.last_bound == [2, 0, 1]


def test_caches_grow_by_little_and_shrink_when_the_long_one_has_gone():
    model = Model(2)
    assert model.run([0], GROWTH_ROWS, [GROWTH_ROWS]) == GROWTH_ROWS
    assert model.run([0], 1, [1]) == 2 * GROWTH_ROWS
    assert model.run([0], 5 * GROWTH_ROWS, [5 * GROWTH_ROWS]) == 7 * GROWTH_ROWS
    assert model.run([1], 5, [5]) == 7 * GROWTH_ROWS, "the other goes on"
    lengths = [model.run([1], 1, [1]) for _ in range(9)]
    assert lengths[-1] == GROWTH_ROWS, "the other waits: it is parked"
    assert model.run([0], 1, [1]) == 7 * GROWTH_ROWS
    model.truncate(0, 3)
    assert model.run([0, 1], 1, [1, 1]) == GROWTH_ROWS


def test_parked_slots_take_what_their_rows_take():
    model = Model(2)
    model.run([0], 10, [10])
    model.copy(0, 1, 7)
    row = len(CACHES) * HEADS * WIDTH * 4
    assert model.caches.num_bytes == GROWTH_ROWS * row + 7 * row
    model.truncate(1, 2)
    assert model.caches.num_bytes == GROWTH_ROWS * row + 2 * row
    model.truncate(0, 0)
    assert model.caches.num_bytes == 2 * row
    model.truncate(1, 0)
    assert model.caches.num_bytes == 0
