"""The decode loop on a toy target: speculation changes nothing but the number of cycles, at every edge."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domino_deploy.errors import CapacityError, VerificationError
from domino_deploy.runtime import decode
from domino_deploy.runtime.decode import generate
from domino_deploy.runtime.protocols import Proposal, Step, TargetRows
from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.runtime.sampling import Sampler, SamplingParams
from tests.support.doubles import MatchedDrafter, RandomDrafter, ScriptedDrafter, ToyTarget, toy_logits

VOCAB = 8
PROMPT = [3, 1, 4]


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def run(drafter=None, *, prompt: Sequence[int] = PROMPT, capacity: int = 64, count: int = 0, **params) -> list[Step]:
    return list(generate(ToyTarget(VOCAB, capacity), drafter, prompt, GenerationParams(**params), num_speculative_tokens=count))


def by_hand(prompt: Sequence[int], capacity: int, params: GenerationParams) -> tuple[list[int], str]:
    """Plain decoding from the definition, one token after the other."""
    tokens, sampler = list(prompt), Sampler(params.sampling)
    while True:
        tokens.append(sampler.choose(toy_logits(tuple(tokens), VOCAB), len(tokens)))
        if tokens[-1] in params.stop_token_ids:
            return tokens[len(prompt) :], "stop"
        if len(tokens) - len(prompt) == params.max_new_tokens or len(tokens) > capacity:
            return tokens[len(prompt) :], "length"


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 2**64 - 1),
)


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    room=st.integers(1, 12),
    max_new_tokens=st.integers(1, 20),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=2),
    sampling=sampling_params,
    count=st.integers(0, 6),
    script=st.lists(st.integers(-2, VOCAB - 1) | st.just(-1), max_size=12),
)
@settings(max_examples=400, deadline=None)
def test_speculative_output_is_plain_output(prompt, room, max_new_tokens, stops, sampling, count, script):
    params = GenerationParams(sampling=sampling, max_new_tokens=max_new_tokens, stop_token_ids=tuple(stops))
    capacity = len(prompt) + room
    expected, reason = by_hand(prompt, capacity, params)

    plain = list(generate(ToyTarget(VOCAB, capacity), None, prompt, params, num_speculative_tokens=0))
    assert (tokens_of(plain), plain[-1].finish_reason) == (expected, reason)
    assert [len(step.token_ids) for step in plain] == [1] * len(expected)

    drafter = ScriptedDrafter(script, [*prompt, *expected], VOCAB)
    steps = list(generate(ToyTarget(VOCAB, capacity), drafter, prompt, params, num_speculative_tokens=count))
    assert (tokens_of(steps), steps[-1].finish_reason) == (expected, reason)
    for step in steps:
        assert 0 <= step.accepted <= step.proposed <= count
        assert len(step.token_ids) == step.accepted + (0 if step is steps[-1] and len(step.token_ids) == step.accepted else 1)
    assert [step.finish_reason for step in steps[:-1]] == [None] * (len(steps) - 1)


def test_a_matched_drafter_needs_fewer_cycles():
    steps = run(MatchedDrafter(VOCAB), count=4, max_new_tokens=11)
    assert [(len(step.token_ids), step.proposed, step.accepted) for step in steps] == [(1, 0, 0), (5, 4, 4), (5, 4, 4)]


def test_a_random_drafter_is_harmless():
    assert tokens_of(run(RandomDrafter(VOCAB), count=5, max_new_tokens=30)) == tokens_of(run(max_new_tokens=30))


def test_the_same_seed_gives_the_same_text_with_and_without_speculation_and_another_seed_another():
    def sampled(seed, drafter=None, count=0):
        return tokens_of(run(drafter, count=count, max_new_tokens=30, sampling=SamplingParams(temperature=1.0, seed=seed)))

    assert sampled(1) == sampled(1, RandomDrafter(VOCAB), 3) == sampled(1, MatchedDrafter(VOCAB), 6)
    assert sampled(1) != sampled(2)


@pytest.mark.parametrize("place", range(6))
def test_a_stop_token_inside_an_accepted_run_cuts_tokens_and_counters(place):
    vocab = 1000  # so many that no token comes twice
    target, drafter = ToyTarget(vocab), MatchedDrafter(vocab)
    plain = tokens_of(list(generate(target, None, PROMPT, GenerationParams(max_new_tokens=7), num_speculative_tokens=0)))
    params = GenerationParams(max_new_tokens=40, stop_token_ids=(plain[place],))
    steps = list(generate(target, drafter, PROMPT, params, num_speculative_tokens=5))
    assert tokens_of(steps) == plain[: place + 1]
    assert steps[-1].finish_reason == "stop"
    # The first token is the prefill's; the others are the first `place` drafts of one cycle that verified five.
    assert [(step.proposed, step.accepted) for step in steps] == [(0, 0)] + [(5, place)] * (place > 0)


def test_a_stop_token_that_is_also_the_last_one_wanted_stops():
    first = tokens_of(run(max_new_tokens=1))[0]
    assert run(max_new_tokens=1, stop_token_ids=(first,))[-1].finish_reason == "stop"
    assert run(max_new_tokens=1)[-1].finish_reason == "length"


@pytest.mark.parametrize("max_new_tokens", range(1, 9))
def test_no_more_is_drafted_than_can_be_kept(max_new_tokens):
    steps = run(MatchedDrafter(VOCAB), count=4, max_new_tokens=max_new_tokens)
    assert len(tokens_of(steps)) == max_new_tokens
    assert steps[-1].finish_reason == "length"
    assert all(step.proposed == step.accepted for step in steps)


@pytest.mark.parametrize("drafter", [None, MatchedDrafter(VOCAB)])
def test_near_the_capacity_fewer_tokens_are_verified_and_every_slot_is_used(drafter):
    target = ToyTarget(VOCAB, capacity=11)
    steps = list(generate(target, drafter, PROMPT, GenerationParams(), num_speculative_tokens=0 if drafter is None else 6))
    # 8 rows are left behind the prompt, and the last token needs none.
    assert len(tokens_of(steps)) == 9
    assert target.length == 11
    assert steps[-1].finish_reason == "length"


def test_the_longest_prompt_yields_two_tokens_the_last_of_which_needs_no_row():
    steps = run(MatchedDrafter(VOCAB), count=3, prompt=[1] * 63)
    assert len(tokens_of(steps)) == 2
    assert steps[-1].finish_reason == "length"


def test_a_prompt_one_token_too_long_is_refused_with_both_numbers():
    with pytest.raises(CapacityError, match=r"at most 63 tokens, the model length 64 .*found 64"):
        generate(ToyTarget(VOCAB, 64), None, [1] * 64, GenerationParams(), num_speculative_tokens=0)


def test_a_prompt_of_one_token_works():
    assert tokens_of(run(MatchedDrafter(VOCAB), count=3, prompt=[5], max_new_tokens=6)) == tokens_of(run(prompt=[5], max_new_tokens=6))


@pytest.mark.parametrize("length", [decode.PREFILL_ROWS - 1, decode.PREFILL_ROWS, decode.PREFILL_ROWS + 1, 2 * decode.PREFILL_ROWS + 3])
def test_a_long_prompt_is_prefilled_in_pieces_and_the_drafter_gets_all_its_features(length):
    prompt = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    target = ToyTarget(VOCAB, length + 20)
    params = GenerationParams(max_new_tokens=12)
    steps = list(generate(target, MatchedDrafter(VOCAB), prompt, params, num_speculative_tokens=4))  # the double checks the features
    assert max(target.passes) == min(length, decode.PREFILL_ROWS)
    assert tokens_of(steps) == by_hand(prompt, target.capacity, params)[0]


def test_two_requests_in_a_row_equal_two_fresh_ones():
    target, drafter = ToyTarget(VOCAB), MatchedDrafter(VOCAB)
    params = GenerationParams(max_new_tokens=15)
    for prompt in ([1, 2, 3], [6], [1, 2, 3]):
        reused = [replace(step, terms_ms=None) for step in generate(target, drafter, prompt, params, num_speculative_tokens=5)]
        fresh = [replace(step, terms_ms=None) for step in run(MatchedDrafter(VOCAB), count=5, prompt=prompt, max_new_tokens=15)]
        assert reused == fresh


def test_a_generation_left_half_way_does_no_harm_to_the_next():
    target, drafter = ToyTarget(VOCAB), RandomDrafter(VOCAB)
    params = GenerationParams(max_new_tokens=15)
    steps = generate(target, drafter, PROMPT, params, num_speculative_tokens=5)
    for _ in range(3):
        next(steps)
    steps.close()
    assert tokens_of(list(generate(target, drafter, [2, 2], params, num_speculative_tokens=5))) == tokens_of(
        run(prompt=[2, 2], max_new_tokens=15)
    )


def test_a_drafter_may_propose_nothing():
    steps = run(ScriptedDrafter([-2], []), count=4, max_new_tokens=6)
    assert tokens_of(steps) == tokens_of(run(max_new_tokens=6))
    assert all(step.proposed == 0 for step in steps)


def test_the_terms_of_a_cycle_add_up_and_leave_out_the_time_of_the_consumer(monkeypatch):
    now = 0.0
    monkeypatch.setattr(decode, "perf_counter", lambda: now)

    class SlowTarget(ToyTarget):
        def forward(self, token_ids, num_logits):
            nonlocal now
            now += 0.010
            return super().forward(token_ids, num_logits)

    class SlowDrafter(MatchedDrafter):
        def propose(self, token_ids, features, count):
            nonlocal now
            now += 0.004
            return Proposal(token_ids=super().propose(token_ids, features, count).token_ids, draft_ms=2.5, head_ms=1.0)

    steps = generate(SlowTarget(VOCAB), SlowDrafter(VOCAB), PROMPT, GenerationParams(max_new_tokens=11), num_speculative_tokens=4)
    for step in steps:
        now += 5.0
        terms = step.terms_ms
        assert terms.verify == pytest.approx(10.0)
        assert (terms.draft, terms.head) == ((2.5, 1.0) if step.proposed else (0.0, 0.0))
        assert terms.other == pytest.approx(0.5 if step.proposed else 0.0)


def test_what_a_candidate_pool_left_open_is_told_by_the_step_that_verified_it():
    class PooledDrafter(MatchedDrafter):
        def propose(self, token_ids, features, count):
            return replace(super().propose(token_ids, features, count), pooled=count - 1, uncertified=len(token_ids) % 2)

    steps = list(generate(ToyTarget(VOCAB), PooledDrafter(VOCAB), PROMPT, GenerationParams(max_new_tokens=11), num_speculative_tokens=4))
    lengths = itertools.accumulate((len(step.token_ids) for step in steps), initial=len(PROMPT))
    for length, step in zip(lengths, steps, strict=False):
        expected = (step.proposed - 1, length % 2) if step.proposed else (0, 0)
        assert (step.pooled, step.uncertified) == expected
    assert sum(step.pooled for step in steps) > 0


def test_bad_logits_end_the_generation_with_their_position():
    class BrokenTarget(ToyTarget):
        def forward(self, token_ids, num_logits):
            rows = super().forward(token_ids, num_logits)
            return rows if self.length < 5 else TargetRows(logits=rows.logits * np.nan, features=rows.features)

    steps = generate(BrokenTarget(VOCAB), None, PROMPT, GenerationParams(), num_speculative_tokens=0)
    with pytest.raises(VerificationError, match="position 6, found 8 NaN"):
        list(steps)
