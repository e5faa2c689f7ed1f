"""Batched passes with ONNX Runtime: every sequence gets what it gets alone, whoever shares the pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from domino_deploy.bundle import Bundle, open_bundle
from domino_deploy.errors import CapacityError
from domino_deploy.runtime.backends import ort
from domino_deploy.runtime.backends.ort_slots import OrtSlots, open_slots
from domino_deploy.runtime.prompt_lookup import PromptLookupDrafter
from domino_deploy.runtime.protocols import Drafter, SlotCycle, Target
from tests.support.slot_scripts import Script, assert_same, random_script, run_alone, run_together

CAPACITY = 200
# Logits of the tiny targets lie around 1; a row alone in its pass rounds otherwise than one among several, in the seventh digit.
ATOL = 2e-5
KINDS = ("domino", "dflash", "int8", "draft vocabulary")


@pytest.fixture(scope="module")
def bundles(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Bundle]:
    """A bundle of each of KINDS, exported when it is first asked for."""
    from domino_deploy.exporters.export import export_bundle
    from domino_deploy.exporters.options import ExportOptions
    from domino_deploy.precision import Dtype, Precision

    options = {
        "int8": ExportOptions(precision=Precision.of(Dtype.INT8, block_size=16)),
        "draft vocabulary": ExportOptions(draft_vocab=tuple(range(0, 300, 2)), candidate_pool=8),
    }

    @cache
    def bundle(kind: str) -> Bundle:
        if kind == "domino":
            return open_bundle(tiny_bundle)
        if kind == "dflash":
            return open_bundle(request.getfixturevalue("tiny_dflash_bundle"))
        folder, pair = tmp_path_factory.mktemp("slots"), tiny_bundle.parent
        return export_bundle(pair / "drafter", pair / "target", folder / "bundle", options[kind], verify=False)

    return bundle


@pytest.fixture(scope="module")
def alone(bundles: Callable[[str], Bundle]) -> Callable[[str], tuple[Target, Drafter | None]]:
    return cache(lambda kind: ort.open_pair(bundles(kind), capacity=CAPACITY, threads=1))


@pytest.fixture
def slots(bundles: Callable[[str], Bundle]) -> Callable[..., OrtSlots]:
    def opened(kind: str = "domino", *, num_slots: int = 4, capacity: int = CAPACITY, **choices: bool) -> OrtSlots:
        return open_slots(bundles(kind), capacity=capacity, num_slots=num_slots, threads=1, **choices)

    return opened


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 290, length).tolist()


def begin(pair: OrtSlots, slot: int, prompt: list[int]) -> None:
    """A prompt in pieces as large as may be."""
    for first in range(0, len(prompt), pair.max_prefill_rows):
        pair.prefill(slot, prompt[first : first + pair.max_prefill_rows], num_logits=1, with_drafter=pair.max_proposals > 0)


def one_cycle(pair: OrtSlots, slot: int, tokens: list[int], count: int, kept: int = 1) -> tuple[list[int], np.ndarray]:
    """A cycle of one sequence: its drafts, and its logits [drafts + 1, V]."""
    cycle = SlotCycle(slot=slot, token_ids=tokens, count=count, with_drafter=pair.max_proposals > 0)
    (verified,) = pair.cycle([cycle]).sequences
    assert verified.logits is not None
    found = verified.proposal.token_ids.tolist(), verified.logits.copy()
    pair.commit([kept])
    return found


def row_counts(pair: OrtSlots, slot: int) -> tuple[int, int]:
    """Rows of the target and of the drafter."""
    rows = pair.rows(slot)
    return rows.target, rows.drafter


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_sequences_get_together_what_they_get_alone(kind, seed, slots, alone):
    rng = np.random.default_rng(seed)
    pair = slots(kind)
    scripts = [random_script(rng, pair.max_proposals) for _ in range(9)]
    target, drafter = alone(kind)
    for found, script in zip(run_together(pair, scripts, rng), scripts, strict=True):
        assert_same(found, run_alone(target, drafter, script), atol=ATOL)


def test_plain_phases_longer_than_features_are_held_back_change_no_draft(slots, alone):
    plain = tuple((0, 0.0) for _ in range(80))
    script = Script(prompt=(5,) * 7, pieces=(7,), cycles=(*plain, (6, 1.0), (6, 1.0), *plain[:9], (6, 0.5)), anchors=(*tokens_of(93),))
    short = Script(prompt=(9, 8), pieces=(2,), cycles=((6, 0.7),) * 20, anchors=(*tokens_of(21, seed=1),))
    records = run_together(slots(), [script, short], np.random.default_rng(0))
    for found, its in zip(records, [script, short], strict=True):
        assert_same(found, run_alone(*alone("domino"), its), atol=ATOL)


def test_prompt_lookup_proposes_for_each_sequence_what_it_has(slots, alone):
    rng = np.random.default_rng(3)
    pair = slots(with_drafter=False, prompt_lookup=True)
    assert pair.max_proposals == PromptLookupDrafter().max_proposals
    # Few different tokens repeat themselves soon, so that proposals are of all lengths.
    scripts = [random_script(rng, pair.max_proposals, vocab_size=8) for _ in range(6)]
    target, _ = alone("domino")
    records = run_together(pair, scripts, rng)
    for found, script in zip(records, scripts, strict=True):
        assert_same(found, run_alone(target, PromptLookupDrafter(), script), atol=ATOL)
    assert len({len(drafts) for record in records for drafts, _ in record.cycles}) > 3


def test_without_a_drafter_cycles_are_plain(slots, alone):
    pair = slots(with_drafter=False)
    assert pair.max_proposals == 0
    scripts = [random_script(np.random.default_rng(seed), 0) for seed in range(40)]
    scripts = [script for script in scripts if not script.with_drafter]
    assert len(scripts) > 3
    for found, script in zip(run_together(pair, scripts, np.random.default_rng(0)), scripts, strict=True):
        assert_same(found, run_alone(alone("domino")[0], None, script), atol=ATOL)


@pytest.mark.parametrize("kind", ["domino", "dflash"])
@pytest.mark.parametrize("way", ["copy", "truncate"])
@pytest.mark.parametrize("rows", [1, 30, 63, 66, 69])
def test_a_known_beginning_is_as_good_as_a_fresh_one(kind, way, rows, slots):
    """The prompt has 63 rows; of the 7 behind it, the drafter has the features and has not read the last of them."""
    pair, fresh = slots(kind), slots(kind)
    tokens = tokens_of(63)
    begin(pair, 0, tokens)
    tokens.append(7)
    for count, kept in ((5, 4), (0, 1), (0, 1), (0, 1)):
        drafts, _ = one_cycle(pair, 0, tokens, count, kept)
        tokens += [*drafts[: kept - 1], 7]
    assert row_counts(pair, 0) == (70, 70)

    slot = 0
    if way == "copy":
        slot = 2
        pair.copy(0, slot, rows)
    else:
        pair.truncate(slot, rows)
    assert row_counts(pair, slot) == (rows, rows)
    rest = tokens_of(9, seed=1)
    found = pair.prefill(slot, rest, num_logits=9, with_drafter=True).copy()
    begin(fresh, 1, tokens[:rows])
    np.testing.assert_allclose(found, fresh.prefill(1, rest, num_logits=9, with_drafter=True), rtol=0, atol=ATOL)
    whole = [*tokens[:rows], *rest, 11]
    drafts, logits = one_cycle(pair, slot, whole, pair.max_proposals)
    expected_drafts, expected = one_cycle(fresh, 1, whole, pair.max_proposals)
    assert drafts == expected_drafts
    np.testing.assert_allclose(logits, expected, rtol=0, atol=ATOL)


def test_rows_wait_for_the_drafter_until_it_drafts(slots):
    pair = slots()
    tokens = tokens_of(40)
    begin(pair, 0, tokens)
    tokens.append(7)
    waiting = []
    for count in (0, 0, 5, 0, 5):
        waiting.append(pair.rows(0).waiting_rows)
        one_cycle(pair, 0, tokens, count, 1)
        tokens.append(7)
    assert waiting == [40, 41, 42, 1, 2]
    pair.copy(0, 1, 44)
    assert (pair.rows(1).waiting_rows, row_counts(pair, 1)) == (0, (44, 44))
    lookup = slots(with_drafter=False, prompt_lookup=True)
    begin(lookup, 0, tokens_of(40))
    assert lookup.rows(0).waiting_rows == 0


def test_a_copy_leaves_its_source_as_it_was(slots):
    pair = slots()
    tokens = tokens_of(40)
    begin(pair, 0, tokens)
    pair.copy(0, 1, 25)
    begin(pair, 1, tokens_of(9, seed=1))
    fresh = slots()
    begin(fresh, 0, tokens)
    for found, expected in zip(one_cycle(pair, 0, [*tokens, 7], 4), one_cycle(fresh, 0, [*tokens, 7], 4), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)


def test_rows_without_a_drafter_can_be_copied_but_not_drafted_from(slots):
    pair = slots()
    pair.prefill(0, tokens_of(10), num_logits=1, with_drafter=True)
    pair.prefill(0, tokens_of(5, seed=1), num_logits=1, with_drafter=False)
    assert row_counts(pair, 0) == (15, 10)
    pair.copy(0, 1, 12)
    assert row_counts(pair, 1) == (12, 10)
    with pytest.raises(ValueError, match="a drafter with the target's 12 rows, found 10"):
        pair.prefill(1, [5], num_logits=1, with_drafter=True)
    pair.truncate(1, 10)
    pair.prefill(1, [5], num_logits=1, with_drafter=True)
    assert row_counts(pair, 1) == (11, 11)


@pytest.mark.parametrize("kind", ["domino", "int8"])
def test_the_last_rows_of_the_capacity_are_used_and_no_more(kind, slots, alone):
    pair = slots(kind, capacity=70)
    tokens = tokens_of(66)
    begin(pair, 0, tokens)
    begin(pair, 1, tokens_of(3, seed=1))
    tokens.append(7)
    short = [*tokens_of(3, seed=1), 7]
    first = SlotCycle(slot=0, token_ids=tokens, count=6, with_drafter=True)
    other = SlotCycle(slot=1, token_ids=short, count=6, with_drafter=True)
    verified = pair.cycle([first, other])
    assert [len(its.proposal.token_ids) for its in verified.sequences] == [3, 6]
    target, drafter = alone(kind)
    script = Script(prompt=(*tokens[:-1],), pieces=(66,), cycles=((3, 1.0), (0, 0.0)), anchors=(7, 7, 7))
    expected = run_alone(target, drafter, script)
    drafts, logits = expected.cycles[0]
    assert verified.sequences[0].proposal.token_ids.tolist() == drafts
    np.testing.assert_allclose(verified.sequences[0].logits, logits, rtol=0, atol=ATOL)
    pair.commit([4, 1])
    with pytest.raises(CapacityError, match="at most 70 rows"):
        pair.cycle([SlotCycle(slot=0, token_ids=[*tokens, *drafts, 7], count=0, with_drafter=True)])
    with pytest.raises(CapacityError, match=r"70.*found 4 \+ 67"):
        pair.prefill(1, tokens_of(67), num_logits=1, with_drafter=True)
    assert row_counts(pair, 1) == (4, 4), "a refusal changes nothing"


def test_memory_is_that_of_the_sequences_there(slots):
    pair = slots(num_slots=8)
    assert pair.caches.num_bytes == pair.drafter.caches.num_bytes == 0
    begin(pair, 0, tokens_of(10))
    one = pair.caches.num_bytes
    for slot in range(1, 8):
        begin(pair, slot, tokens_of(10))
    assert pair.caches.num_bytes == 8 * one
    for slot in range(8):
        pair.truncate(slot, 0)
    assert pair.caches.num_bytes == pair.drafter.caches.num_bytes == 0


def test_a_long_sequence_that_waits_is_parked_and_lengthens_no_pass(slots):
    pair = slots(num_slots=2)
    long = tokens_of(180)
    begin(pair, 0, long)
    begin(pair, 1, [5])
    bound = pair._target.graph._caches["key_cache.0"]
    assert bound.shape[2] >= 180
    tokens = [5, 6]
    for _ in range(10):
        one_cycle(pair, 1, tokens, 0)
        tokens.append(7)
    bound = pair._target.graph._caches["key_cache.0"]
    assert bound.shape[2] == 64
    fresh = slots(num_slots=2)
    begin(fresh, 0, long)
    np.testing.assert_allclose(one_cycle(pair, 0, [*long, 7], 0)[1], one_cycle(fresh, 0, [*long, 7], 0)[1], rtol=0, atol=ATOL)


def test_not_a_number_in_one_sequence_stays_there(slots):
    pair = slots(num_slots=2)
    begin(pair, 0, tokens_of(30))
    begin(pair, 1, tokens_of(5, seed=1))
    for caches in (pair.caches, pair.drafter.caches):
        for memory in caches._memory.values():
            memory[caches._places.index(0)] = np.nan
    pair.truncate(0, 0)
    begin(pair, 0, tokens_of(4, seed=2))
    sequences = [
        SlotCycle(slot=slot, token_ids=tokens, count=3, with_drafter=True)
        for slot, tokens in ((0, [*tokens_of(4, seed=2), 7]), (1, [*tokens_of(5, seed=1), 7]))
    ]
    assert all(np.isfinite(its.logits).all() for its in pair.cycle(sequences).sequences)


def test_quantised_weights_are_never_multiplied_by_a_single_row_of_a_sequence(slots):
    """One row takes another path through the product, whatever the batch, and rounds its activations otherwise."""
    pair = slots("int8")
    for slot in range(3):
        begin(pair, slot, tokens_of(5))
    pair.cycle([SlotCycle(slot=slot, token_ids=tokens_of(6), count=0, with_drafter=True) for slot in range(3)])
    assert pair._target.graph._bound["input_ids"].shape == (3, 2)


def test_times_are_of_the_whole_pass(slots):
    pair = slots()
    begin(pair, 0, tokens_of(5))
    terms = pair.cycle([SlotCycle(slot=0, token_ids=[*tokens_of(5), 7], count=3, with_drafter=True)]).terms_ms
    assert min(terms.draft, terms.head, terms.verify) > 0
    pair.commit([1])
    terms = pair.cycle([SlotCycle(slot=0, token_ids=[*tokens_of(5), 7, 8], count=0, with_drafter=True)]).terms_ms
    assert (terms.draft, terms.head) == (0, 0)


class TestMisuse:
    def test_a_sequence_that_is_not_the_slot_s(self, slots):
        pair = slots()
        begin(pair, 0, tokens_of(5))
        with pytest.raises(ValueError, match="slot 0: expected 5 tokens and an anchor, found 5"):
            pair.cycle([SlotCycle(slot=0, token_ids=tokens_of(5), count=0, with_drafter=True)])

    def test_drafts_without_a_drafter_or_too_many(self, slots):
        pair = slots()
        begin(pair, 0, tokens_of(5))
        for count, with_drafter in ((1, False), (7, True)):
            with pytest.raises(ValueError, match="expected 6 drafts at most, with a drafter"):
                pair.cycle([SlotCycle(slot=0, token_ids=tokens_of(6), count=count, with_drafter=with_drafter)])

    def test_a_slot_twice_in_one_cycle(self, slots):
        pair = slots()
        begin(pair, 0, tokens_of(5))
        cycle = SlotCycle(slot=0, token_ids=tokens_of(6), count=0, with_drafter=True)
        with pytest.raises(ValueError, match=r"in each slot once, found \[0, 0\]"):
            pair.cycle([cycle, cycle])

    def test_rows_that_are_not_there(self, slots):
        pair = slots()
        begin(pair, 0, tokens_of(5))
        for misused in (lambda: pair.truncate(0, 6), lambda: pair.copy(0, 1, 6), lambda: pair.truncate(1, 1)):
            with pytest.raises(ValueError, match="those of slot"):
                misused()
        with pytest.raises(ValueError, match="expected two slots"):
            pair.copy(0, 0, 2)

    def test_a_commit_that_is_not_the_cycle_s(self, slots):
        pair = slots()
        begin(pair, 0, tokens_of(5))
        with pytest.raises(ValueError, match="commit once per cycle"):
            pair.commit([1])
        pair.cycle([SlotCycle(slot=0, token_ids=tokens_of(6), count=2, with_drafter=True)])
        for rows in ([4], [-1], [1, 1]):
            with pytest.raises(ValueError, match=r"at most \[3\] rows"):
                pair.commit(rows)
        pair.commit([3])
        with pytest.raises(ValueError, match="commit once per cycle"):
            pair.commit([1])

    def test_a_piece_of_a_prompt_that_is_too_large_or_empty(self, slots):
        for rows, num_logits in ((257, 1), (0, 0), (2, 3)):
            with pytest.raises(ValueError, match="expected 1 to 256 rows"):
                slots().prefill(0, tokens_of(rows), num_logits=num_logits, with_drafter=True)
