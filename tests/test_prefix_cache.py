"""Which slot a prompt gets, and which rows it finds there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domino_deploy.runtime.prefix_cache import PrefixCache, common_length
from tests.support.toy_pair import ToyPair

DOCUMENT = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 1]


def run_in(pair: ToyPair, cache: PrefixCache, prompt: Sequence[int], free: Sequence[int], *, with_drafter: bool = True) -> tuple[int, int]:
    """Start a prompt and run the rest of it."""
    slot, rows = cache.start(prompt, free, with_drafter=with_drafter, may_reuse=True)
    assert pair.rows(slot).target == rows < len(prompt)
    pair.prefill(slot, prompt[rows:], num_logits=1, with_drafter=with_drafter)
    return slot, rows


def test_the_next_turn_of_a_conversation_goes_on_where_the_last_one_ended():
    pair = ToyPair(3)
    cache = PrefixCache(pair, least_rows=4)
    slot, rows = run_in(pair, cache, DOCUMENT, range(3))
    assert rows == 0
    assert run_in(pair, cache, [*DOCUMENT, 2, 2], range(3)) == (slot, len(DOCUMENT))
    assert "copy" not in dict(pair.calls)


def test_the_same_prompt_again_runs_its_last_token():
    pair = ToyPair(1)
    cache = PrefixCache(pair, least_rows=4)
    run_in(pair, cache, DOCUMENT, [0])
    assert run_in(pair, cache, DOCUMENT, [0]) == (0, len(DOCUMENT) - 1)


def test_a_slot_in_use_is_copied_from():
    pair = ToyPair(2)
    cache = PrefixCache(pair, least_rows=4)
    slot, _ = run_in(pair, cache, DOCUMENT, [0, 1])
    other = 1 - slot
    assert run_in(pair, cache, [*DOCUMENT[:8], 0, 0], [other]) == (other, 8)
    assert pair.rows(slot).target == len(DOCUMENT)


def test_who_shares_a_small_part_takes_a_copy_and_leaves_the_original():
    pair = ToyPair(2)
    cache = PrefixCache(pair, least_rows=4)
    slot, _ = run_in(pair, cache, DOCUMENT, [0, 1])
    assert run_in(pair, cache, [*DOCUMENT[:5], 7, 7], [0, 1]) == (1 - slot, 5)
    assert pair.rows(slot).target == len(DOCUMENT)


def test_the_only_free_slot_is_taken_over_however_small_the_part():
    pair = ToyPair(1)
    cache = PrefixCache(pair, least_rows=4)
    run_in(pair, cache, DOCUMENT, [0])
    assert run_in(pair, cache, [*DOCUMENT[:5], 7, 7], [0]) == (0, 5)


def test_a_short_beginning_is_not_worth_it():
    pair = ToyPair(2)
    cache = PrefixCache(pair, least_rows=4)
    run_in(pair, cache, DOCUMENT, [0, 1])
    assert run_in(pair, cache, [*DOCUMENT[:3], 7, 7, 7], [0, 1])[1] == 0


def test_rows_that_the_drafter_lacks_serve_plain_requests_only():
    pair = ToyPair(2)
    cache = PrefixCache(pair, least_rows=4)
    slot, _ = run_in(pair, cache, DOCUMENT, [0, 1], with_drafter=False)
    assert run_in(pair, cache, [*DOCUMENT, 0], [1 - slot], with_drafter=True)[1] == 0
    pair.truncate(1 - slot, 0)
    assert run_in(pair, cache, [*DOCUMENT, 0], [1 - slot], with_drafter=False)[1] == len(DOCUMENT)


def test_empty_slots_go_first_then_the_one_used_least_recently():
    pair = ToyPair(3)
    cache = PrefixCache(pair, least_rows=4)
    slots = [run_in(pair, cache, [token] * 6, range(3))[0] for token in (1, 2, 3)]
    assert sorted(slots) == [0, 1, 2]
    cache.touch(slots[0])
    assert run_in(pair, cache, [4] * 6, range(3)) == (slots[1], 0)
    # What was found is in use again, too.
    assert run_in(pair, cache, [3] * 7, range(3)) == (slots[2], 6)
    assert run_in(pair, cache, [5] * 6, range(3)) == (slots[0], 0)


def test_rows_that_were_copied_from_count_as_used():
    pair = ToyPair(3)
    cache = PrefixCache(pair, least_rows=4)
    shared, other, third = (run_in(pair, cache, prompt, range(3))[0] for prompt in (DOCUMENT, [2] * 6, [7] * 6))
    assert run_in(pair, cache, [*DOCUMENT[:5], 7, 7], [other, third]) == (other, 5)
    assert run_in(pair, cache, [6] * 6, range(3)) == (third, 0)
    assert run_in(pair, cache, [5] * 6, [shared, other]) == (shared, 0)


def test_a_prompt_that_may_reuse_nothing_starts_empty():
    pair = ToyPair(2)
    cache = PrefixCache(pair, least_rows=1)
    run_in(pair, cache, DOCUMENT, [0, 1])
    slot, rows = cache.start(DOCUMENT, [0, 1], with_drafter=True, may_reuse=False)
    assert (rows, pair.rows(slot).target) == (0, 0)


@pytest.mark.parametrize("reuses_prefixes", [True, False])
def test_a_prompt_under_way_catches_up_with_another(reuses_prefixes: bool):
    pair = ToyPair(2, reuses_prefixes=reuses_prefixes)
    cache = PrefixCache(pair, least_rows=3)
    slots = [cache.start(list(DOCUMENT), [number], with_drafter=True, may_reuse=True)[0] for number in range(2)]
    for slot in slots:
        pair.prefill(slot, DOCUMENT[:2], num_logits=1, with_drafter=True)
    pair.prefill(slots[0], DOCUMENT[2:4], num_logits=1, with_drafter=True)
    assert cache.catch_up(slots[1], with_drafter=True) == 0  # two more are not worth it
    pair.prefill(slots[0], DOCUMENT[4:], num_logits=1, with_drafter=True)
    won = cache.catch_up(slots[1], with_drafter=True)
    assert won == (len(DOCUMENT) - 3 if reuses_prefixes else 0)
    assert pair.rows(slots[1]).target == 2 + won


@given(
    prompts=st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(0, 2), st.booleans()), max_size=12),
    least_rows=st.integers(1, 5),
)
@settings(max_examples=200, deadline=None)
def test_rows_found_are_the_prompts_own(prompts, least_rows):
    """The toy pair's rows are its tokens: whatever happened before, a slot holds the beginning of the prompt it was started for."""
    pair = ToyPair(3)
    cache = PrefixCache(pair, least_rows=least_rows)
    for prompt, busy, with_drafter in prompts:
        free = [slot for slot in range(3) if slot != busy]
        slot, rows = run_in(pair, cache, prompt, free, with_drafter=with_drafter)
        assert slot in free
        assert rows == 0 or rows >= least_rows
        # Its next cycle would refuse another beginning.
        assert pair.held(slot) == prompt


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8), st.integers(0, 9))
def test_common_length_is_the_longest_common_beginning(one, other, most):
    expected = max(length for length in range(9) if length <= min(len(one), len(other), most) and one[:length] == other[:length])
    assert common_length(one, other, most) == expected
