"""Cache bookkeeping and masks, against definitions written out one element at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from domino_deploy.errors import CapacityError
from domino_deploy.runtime.kv_cache import CacheRows, block_mask, causal_mask, placed_block_mask, sliding_block_mask


def test_commit_keeps_the_first_rows_of_a_pass_and_the_next_pass_starts_there():
    rows = CacheRows(limit=10)
    rows.reserve(4)
    rows.commit(4)
    rows.reserve(5)
    rows.commit(2)
    assert rows.length == 6
    rows.reserve(4)
    rows.commit(4)
    assert rows.length == 10


def test_a_pass_that_does_not_fit_names_both_numbers_and_changes_nothing():
    rows = CacheRows(limit=10)
    rows.reserve(8)
    rows.commit(8)
    with pytest.raises(CapacityError, match=r"at most 10 rows.*found 8 \+ 3.*max_model_len"):
        rows.reserve(3)
    assert rows.length == 8


@pytest.mark.parametrize("count", [-1, 4])
def test_rows_that_were_not_computed_cannot_be_committed(count):
    rows = CacheRows(limit=10)
    rows.reserve(3)
    with pytest.raises(ValueError, match="expected 0 to 3 rows"):
        rows.commit(count)


def test_a_pass_is_committed_once():
    rows = CacheRows(limit=10)
    rows.reserve(3)
    rows.commit(1)
    with pytest.raises(ValueError, match="expected 0 to 0 rows"):
        rows.commit(1)


def test_reset_forgets_the_sequence():
    rows = CacheRows(limit=10)
    rows.reserve(9)
    rows.commit(9)
    rows.reset()
    assert rows.length == 0
    rows.reserve(10)


@pytest.mark.parametrize(("rows", "slots"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 20), (20, 20)])
def test_slots_grow_in_steps_up_to_the_limit(rows, slots):
    assert CacheRows(limit=20, growth=8).slots(rows) == slots


@pytest.mark.parametrize(("length", "rows", "sequence"), [(0, 0, 1), (3, 2, 5), (3, 2, 7)])
def test_features_that_skip_or_repeat_a_token_are_refused(length, rows, sequence):
    cache = CacheRows(limit=10)
    cache.reserve(length)
    cache.commit(length)
    with pytest.raises(ValueError, match="pass each token's row once"):
        cache.expect_features(rows, sequence)


def test_features_of_all_tokens_but_the_anchor_are_taken():
    cache = CacheRows(limit=10)
    cache.expect_features(4, 5)


@pytest.mark.parametrize(("start", "rows", "capacity"), [(0, 1, 1), (0, 3, 5), (4, 3, 7), (4, 3, 12)])
def test_causal_mask(start, rows, capacity):
    expected = [[slot <= start + row for slot in range(capacity)] for row in range(rows)]
    np.testing.assert_array_equal(causal_mask(start, np.empty((rows, capacity), dtype=bool)), expected)


@pytest.mark.parametrize(("context", "block", "capacity"), [(1, 4, 5), (7, 4, 16)])
def test_block_mask_is_not_causal_inside_the_block(context, block, capacity):
    expected = [[slot < context + block for slot in range(capacity)]] * block
    np.testing.assert_array_equal(block_mask(context, np.empty((block, capacity), dtype=bool)), expected)


@pytest.mark.parametrize(("context", "block", "capacity", "window"), [(1, 4, 5, 1), (7, 4, 16, 3), (7, 4, 16, 5), (7, 4, 16, 100)])
def test_sliding_block_mask_windows_the_context_and_leaves_the_block_whole(context, block, capacity, window):
    expected = [
        [(slot > context + row - window and slot < context) or context <= slot < context + block for slot in range(capacity)]
        for row in range(block)
    ]
    np.testing.assert_array_equal(sliding_block_mask(context, window, np.empty((block, capacity), dtype=bool)), expected)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(("context", "block_slot"), [(0, 0), (7, 7), (7, 9), (30, 36)])
def test_a_block_with_a_gap_before_it_sees_context_and_itself_alone(context, block_slot, window):
    block, capacity = 4, 40
    mask = placed_block_mask(context, block_slot, window, np.empty((block, capacity), dtype=np.bool_))
    for row, slot in itertools.product(range(block), range(capacity)):
        in_window = window is None or slot > context + row - window
        assert mask[row, slot] == ((slot < context and in_window) or block_slot <= slot < block_slot + block), (row, slot)
