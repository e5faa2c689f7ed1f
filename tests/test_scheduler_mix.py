"""Requests in any company say what they say alone: random mixes on a toy pair that checks every call."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.runtime.sampling import SamplingParams
from tests.support.doubles import ToyTarget
from tests.support.scheduled_runs import Answer, Bench, alone, bench, plain_view
from tests.support.toy_pair import ToyPair

VOCAB, CAPACITY = 8, 40
# Few beginnings, so that many prompts share one.
STEMS = ([3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 1, 2, 4, 6, 1], [3, 1, 4, 1, 5, 2, 0, 0, 2, 6, 5, 1], [2])


@dataclass(frozen=True)
class Client:
    """One request of a mix; it comes before step `arrival`, and is cancelled before step `arrival + patience` if that is not None."""

    prompt: list[int]
    params: GenerationParams
    arrival: int
    patience: int | None


prompts = st.builds(
    lambda stem, length, tail: [*STEMS[stem][:length], *tail] or [1],
    st.integers(0, 2),
    st.integers(0, 16),
    st.lists(st.integers(0, VOCAB - 1), max_size=4),
)
sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.8, 1.5]),
    top_k=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {}, {7: -100.0}, {2: 3.0}]),
)
params = st.builds(
    lambda least, more, **others: GenerationParams(min_new_tokens=least, max_new_tokens=least + more, **others),
    st.sampled_from([0, 0, 0, 4]),
    st.integers(1, 24),
    sampling=sampling,
    stop_strings=st.sampled_from([(), (), ("ab",), ("b", "cad"), ("ggg",), ("fe", "fedcba")]),
    stop_token_ids=st.sampled_from([(), (), (0,), (5, 6)]),
    ignore_eos=st.booleans(),
    num_speculative_tokens=st.sampled_from([None, None, 0, 2]),
    logprobs=st.sampled_from([None, None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, None, None, 2]),
)
clients = st.builds(Client, prompts, params, st.integers(0, 12), st.none() | st.none() | st.integers(0, 10))


def check(answer: Answer, client: Client) -> None:
    expected = alone(client.prompt, client.params, ToyTarget(VOCAB, CAPACITY))
    if answer.finish_reason == "abort":
        assert client.patience is not None
        assert answer.ids == expected.ids[: len(answer.ids)]
        # Text held back, as it could have become a stop string, is given out at the end.
        held = answer.text.removeprefix(expected.text) if answer.text.startswith(expected.text) else ""
        assert expected.text.startswith(answer.text.removesuffix(held))
        assert any(stop.startswith(held) for stop in (*client.params.stop_strings, ""))
    else:
        assert plain_view(answer) == plain_view(expected)
    statistics = answer.statistics
    assert statistics.prompt_tokens == len(client.prompt)
    assert statistics.generated_tokens == len(answer.tokens)
    assert sum(token.drafted for token in answer.tokens) == sum(accepted for _, accepted in statistics.steps)
    assert all(0 <= accepted <= proposed and proposed > 0 for proposed, accepted in statistics.steps)
    if client.params.num_speculative_tokens == 0:
        assert statistics.steps == ()


def serve(served: Bench, mix: list[Client]) -> None:
    """All clients of a mix, to the end; then no slot may be lost, and the counters must add up."""
    last_arrival = max(client.arrival for client in mix)
    for step in range(10_000):
        for number, client in enumerate(mix):
            if client.arrival == step:
                served.submit_params(str(number), client.prompt, client.params)
            if client.patience is not None and client.arrival + client.patience == step:
                served.scheduler.cancel(str(number))
        if step >= last_arrival and not served.scheduler.has_work:
            break
        served.scheduler.step()
    for number, client in enumerate(mix):
        check(served.answers[str(number)], client)
    snapshot = served.scheduler.snapshot()
    assert (snapshot.running, snapshot.waiting, snapshot.used_rows) == (0, 0, 0)
    check_counters(served)


def check_counters(served: Bench) -> None:
    records = served.journal.records
    statistics = [answer.statistics for answer in served.answers.values()]
    steps = [step for entry in statistics for step in entry.steps]
    assert sum(record.drafts for record in records) == len(steps)
    assert sum(record.proposed for record in records) == sum(proposed for proposed, _ in steps)
    assert sum(record.accepted for record in records) == sum(accepted for _, accepted in steps)
    assert all(sum(record.accepted_per_position) == record.accepted for record in records)
    assert all(len(record.accepted_per_position) <= record.width for record in records)
    for record in records:
        for reached, accepted in zip(record.reached_per_position, record.accepted_per_position, strict=True):
            assert record.drafts >= reached >= accepted
    first_tokens = sum(entry.first_token_seconds is not None for entry in statistics)
    assert sum(record.tokens for record in records) == sum(entry.generated_tokens for entry in statistics) - first_tokens
    prefilled = sum(rows for rows in served.journal.of("prefilled"))  # type: ignore[misc]
    whole = [entry for entry in statistics if entry.first_token_seconds is not None]
    assert prefilled >= sum(entry.prompt_tokens - entry.cached_tokens for entry in whole)


@given(
    mix=st.lists(clients, min_size=1, max_size=8),
    slots=st.integers(1, 4),
    prefill_rows=st.integers(1, 9),
    max_drafts=st.integers(0, 6),
    adaptive=st.booleans(),
    least_reused_rows=st.integers(1, 6),
    hit_chance=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    pair_seed=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_request_says_what_it_says_alone(mix, slots, prefill_rows, max_drafts, adaptive, least_reused_rows, hit_chance, pair_seed):
    pair = ToyPair(slots, VOCAB, CAPACITY, 6, hit_chance=hit_chance, seed=pair_seed)
    serve(
        bench(pair, prefill_rows=prefill_rows, max_drafts=max_drafts, adaptive=adaptive, least_reused_rows=least_reused_rows),
        mix,
    )


@given(mix=st.lists(clients, min_size=1, max_size=6), max_drafts=st.integers(0, 6), slots=st.integers(1, 2))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_pair_without_pieces_and_prefixes_serves_the_same(mix, max_drafts, slots):
    mix = [replace(client, params=replace(client.params, prompt_logprobs=None)) for client in mix]
    pair = ToyPair(slots, VOCAB, CAPACITY, 6, max_prefill_rows=None, reuses_prefixes=False, gives_prompt_logits=False)
    serve(bench(pair, max_drafts=max_drafts), mix)


@pytest.mark.parametrize("seed", range(3))
def test_no_slot_is_lost_after_500_requests(seed):
    rng = random.Random(seed)
    served = bench(ToyPair(3, VOCAB, CAPACITY, 6, seed=seed), adaptive=True)
    mix = []
    for number in range(500):
        stem = rng.choice(STEMS)
        wanted = GenerationParams(
            max_new_tokens=rng.randint(1, 8),
            stop_strings=rng.choice([(), ("ab",), ("g",)]),
            num_speculative_tokens=rng.choice([None, 0, 3]),
        )
        prompt = [*stem[: rng.randint(1, len(stem))], rng.randrange(VOCAB)]
        mix.append(Client(prompt, wanted, number // 2, rng.choice([None, None, None, rng.randint(0, 9)])))
    serve(served, mix)
    # Every slot still serves: as many requests as there are slots run side by side.
    for number in range(3):
        served.submit(f"last {number}", [number + 1], max_new_tokens=20, ignore_eos=True)
    served.scheduler.step()
    assert served.scheduler.snapshot().running == 3
    served.run()
    assert all(len(served.answers[f"last {number}"].tokens) == 20 for number in range(3))


def test_a_request_whose_last_output_cannot_be_made_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A decoder that fails once the request is cancelled: others go on, and are told nothing of it."""
    is_broken = False

    def failing_decode(token_ids: Sequence[int]) -> str:
        if is_broken:
            raise ValueError("no such text")
        return "\ufffd"  # inside a character for ever: something is held back

    served = bench(ToyPair(2), decode=failing_decode)
    cancelled = served.submit("cancelled", [1, 2, 3], max_new_tokens=50, ignore_eos=True)
    for _ in range(3):
        served.scheduler.step()
    served.scheduler.cancel("cancelled")
    is_broken = True
    served.scheduler.step()
    assert cancelled.finish_reason == "error"
    assert "request cancelled" in caplog.text
    is_broken = False
    after = served.submit("after", [1, 2, 3], max_new_tokens=5, ignore_eos=True)
    served.run()
    assert after.finish_reason == "length"
