"""One slot over parts that serve one sequence: the eager backend's, and pairs that keep features on their device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from domino_deploy.bundle import open_bundle
from domino_deploy.errors import CapacityError
from domino_deploy.runtime.backends import eager
from domino_deploy.runtime.decode import HostPair
from domino_deploy.runtime.prompt_lookup import PromptLookupDrafter
from domino_deploy.runtime.protocols import Drafter, SlotCycle, SlotRows, SpeculativePair, Target
from domino_deploy.runtime.single_slot import SingleSlot
from tests.support.scheduled_runs import bench
from tests.support.slot_scripts import assert_same, random_script, run_alone, run_together

CAPACITY = 120
ATOL = 2e-5


@pytest.fixture(scope="module")
def parts(tiny_bundle) -> tuple[Target, Drafter]:
    target, drafter = eager.open_pair(open_bundle(tiny_bundle), capacity=CAPACITY, threads=1)
    assert drafter is not None
    return target, drafter


class Pairing:
    """A target that pairs itself, as TensorRT's does; notes whether logits are wanted."""

    def __init__(self, target: Target) -> None:
        self.vocab_size, self.capacity = target.vocab_size, target.capacity
        self.reset, self.forward, self.commit = target.reset, target.forward, target.commit
        self.needs_logits: list[bool] = []
        self._target = target

    @property
    def length(self) -> int:
        return self._target.length

    def paired_with(self, drafter: Drafter | None, *, needs_logits: bool) -> SpeculativePair:
        self.needs_logits.append(needs_logits)
        return HostPair(self._target, drafter)


@pytest.fixture
def pair(parts) -> SingleSlot:
    return SingleSlot(*parts)


def begun(pair: SingleSlot, length: int) -> list[int]:
    """Prefill a prompt; its tokens and an anchor."""
    prompt = np.random.default_rng(length).integers(3, 290, length).tolist()
    pair.prefill(0, prompt, num_logits=1, with_drafter=True)
    return [*prompt, 7]


def cycle_of(tokens: Sequence[int], count: int, *, with_drafter: bool = True) -> SlotCycle:
    return SlotCycle(slot=0, token_ids=tokens, count=count, with_drafter=with_drafter)


@pytest.mark.parametrize("make", [lambda target: target, Pairing], ids=["host", "pairing"])
@pytest.mark.parametrize("lookup", [False, True], ids=["drafter", "prompt lookup"])
def test_sequences_one_after_the_other_are_what_they_are_alone(parts, make: Callable[[Target], Target], lookup: bool):
    target, drafter = parts[0], PromptLookupDrafter() if lookup else parts[1]
    made = make(target)
    pair = SingleSlot(made, drafter)
    rng = np.random.default_rng(5)
    vocab_size = 8 if lookup else 290
    scripts = [random_script(rng, pair.max_proposals, longest=40, largest_piece=10**6, vocab_size=vocab_size) for _ in range(5)]
    scripts = [replace(script, pieces=(len(script.prompt),)) for script in scripts]
    plain = [count == 0 for script in scripts if script.with_drafter for count, _ in script.cycles]
    assert any(plain)
    assert not all(plain)
    assert any(not script.with_drafter for script in scripts)
    for found, script in zip(run_together(pair, scripts, rng), scripts, strict=True):
        assert_same(found, run_alone(target, drafter, script), atol=ATOL)
    if isinstance(made, Pairing):
        assert made.needs_logits == [True] * 5


def test_the_slot_says_what_it_holds_and_cannot_do(pair):
    assert (pair.num_slots, pair.capacity, pair.max_proposals) == (1, CAPACITY, 6)
    assert (pair.max_prefill_rows, pair.reuses_prefixes, pair.gives_prompt_logits) == (None, False, False)
    assert pair.rows(0) == SlotRows(target=0, drafter=0)
    tokens = begun(pair, 9)
    assert pair.rows(0) == SlotRows(target=9, drafter=9)
    pair.cycle([cycle_of(tokens, 3)])
    pair.commit([2])
    pair.truncate(0, 11)
    assert pair.rows(0) == SlotRows(target=11, drafter=11)
    pair.truncate(0, 0)
    assert pair.rows(0) == SlotRows(target=0, drafter=0)
    pair.prefill(0, tokens, num_logits=1, with_drafter=False)
    assert pair.rows(0) == SlotRows(target=10, drafter=0)


def test_the_last_rows_of_the_capacity_are_used_and_no_more(pair):
    tokens = begun(pair, CAPACITY - 3)
    (verified,) = pair.cycle([cycle_of(tokens, 6)]).sequences
    assert len(verified.proposal.token_ids) == 2
    pair.commit([3])
    with pytest.raises(CapacityError, match=f"at most {CAPACITY} rows"):
        pair.cycle([cycle_of([*tokens, 8, 9, 10], 0)])
    pair.truncate(0, 0)
    with pytest.raises(CapacityError, match=f"at most {CAPACITY} rows"):
        begun(pair, CAPACITY + 1)
    begun(pair, CAPACITY)


def test_a_cycle_at_the_last_row_drafts_nothing(pair):
    tokens = begun(pair, CAPACITY - 1)
    (verified,) = pair.cycle([cycle_of(tokens, 6)]).sequences
    assert verified.proposal.token_ids.size == 0
    assert verified.logits is not None
    assert len(verified.logits) == 1


def test_a_request_that_wants_no_token_ends_behind_its_prompt_and_leaves_the_slot_free(parts):
    served = bench(SingleSlot(*parts), eos_token_ids=(), decode=lambda token_ids: "x" * len(token_ids))
    answers = [served.submit(str(number), [5, 9, 7], max_new_tokens=tokens) for number, tokens in enumerate((0, 4, 0))]
    served.run()
    assert [len(answer.tokens) for answer in answers] == [0, 4, 0]
    assert {answer.finish_reason for answer in answers} == {"length"}


class TestMisuse:
    def test_prefixes(self, pair):
        begun(pair, 9)
        with pytest.raises(ValueError, match="reuses no prefixes"):
            pair.truncate(0, 5)
        with pytest.raises(ValueError, match="reuses no prefixes"):
            pair.copy(0, 1, 5)

    def test_a_prompt_in_pieces_or_with_all_its_logits(self, pair):
        with pytest.raises(ValueError, match="1 row with logits, found 0 rows and 2"):
            pair.prefill(0, [5, 6], num_logits=2, with_drafter=True)
        begun(pair, 9)
        with pytest.raises(ValueError, match="an empty slot"):
            pair.prefill(0, [5], num_logits=1, with_drafter=True)

    def test_a_sequence_that_is_not_there(self, pair):
        with pytest.raises(ValueError, match="the one sequence of 0 rows"):
            pair.cycle([cycle_of([7], 0)])
        tokens = begun(pair, 9)
        for sequences in ([], [cycle_of(tokens, 0)] * 2, [cycle_of(tokens[:-1], 0)]):
            with pytest.raises(ValueError, match="the one sequence of 9 rows"):
                pair.cycle(sequences)

    def test_a_sequence_that_is_served_otherwise_than_its_prompt(self, pair):
        tokens = begun(pair, 9)
        for cycle in (cycle_of(tokens, 0, with_drafter=False), cycle_of(tokens, 7)):
            with pytest.raises(ValueError, match="served as its prompt was"):
                pair.cycle([cycle])

    def test_a_commit_that_is_not_the_cycle_s(self, pair):
        tokens = begun(pair, 9)
        pair.cycle([cycle_of(tokens, 0)])
        for rows in ([2], [-1], [], [1, 1]):
            with pytest.raises(ValueError, match="0 to 1 rows of one sequence"):
                pair.commit(rows)
        pair.commit([1])
        with pytest.raises(ValueError, match="commit once per cycle"):
            pair.commit([1])
