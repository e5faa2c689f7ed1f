"""The scheduler, step by step: who runs when, who leaves when, and what is counted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from domino_deploy.errors import RequestError, VerificationError
from domino_deploy.runtime.controller import SpeculationController
from domino_deploy.runtime.protocols import FloatArray, TermsMs
from domino_deploy.runtime.requests import ERROR, GenerationParams, RequestStatistics
from domino_deploy.runtime.sampling import SamplingParams
from tests.support.doubles import ToyTarget, toy_logits
from tests.support.scheduled_runs import EOS, Answer, Bench, alone, bench, plain_view
from tests.support.toy_pair import TOY_TERMS, ToyPair

PROMPT = [3, 1, 4]
# Never ends by itself before its length.
ENDLESS = {"ignore_eos": True, "max_new_tokens": 40}


def long_prompt(length: int) -> list[int]:
    return [(7 * index + index // 3) % 7 for index in range(length)]


def calls_of(served: Bench) -> list[tuple[str, int]]:
    assert isinstance(served.pair, ToyPair)
    return served.pair.calls


def test_a_long_prompt_makes_others_wait_for_one_piece_at_a_time():
    served = bench(ToyPair(2, capacity=200), prefill_rows=10)
    served.submit("talks", PROMPT, ignore_eos=True, max_new_tokens=150, num_speculative_tokens=0)
    served.scheduler.step()
    served.submit("reads", long_prompt(95), **ENDLESS)
    del calls_of(served)[:]
    for _ in range(10):
        served.scheduler.step()
    assert calls_of(served)[:19] == [("prefill", 10), ("cycle", 1)] * 9 + [("prefill", 5)]


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one():
    served = bench(ToyPair(2, capacity=200), prefill_rows=10)
    served.submit("long", long_prompt(100), **ENDLESS)
    short = served.submit("short", PROMPT, **ENDLESS)
    served.scheduler.step()
    served.scheduler.step()
    assert len(short.tokens) > 0
    assert served.answers["long"].outputs == []


def test_short_prompts_that_come_together_share_what_a_piece_may_have():
    """Or the last of eight would wait for seven cycles of the others besides the prompts before its own."""
    served = bench(ToyPair(4), prefill_rows=10)
    for number, length in enumerate([4, 5, 3, 9]):
        served.submit(str(number), [number, *long_prompt(length - 1)], ignore_eos=True, max_new_tokens=30)
    for _ in range(3):
        served.scheduler.step()
    # 4 and 5 rows fit, 3 more do not; nor do 9 behind the 3.
    passes = [call for call in calls_of(served) if call[0] != "copy"]
    assert passes == [("prefill", 4), ("prefill", 5), ("cycle", 2), ("prefill", 3), ("cycle", 3), ("prefill", 9), ("cycle", 4)]


def test_a_rest_that_is_known_counts_no_rows():
    served = bench(ToyPair(2), prefill_rows=10)
    served.submit("before", long_prompt(20), max_new_tokens=1)
    served.run()
    del calls_of(served)[:]
    served.submit("new", [6, 6, 6, 6], **ENDLESS)
    served.submit("known", long_prompt(22), **ENDLESS)
    served.scheduler.step()
    assert [call for call in calls_of(served) if call[0] == "prefill"] == [("prefill", 4), ("prefill", 2)]


def test_pieces_are_no_longer_than_the_pair_takes():
    served = bench(ToyPair(1, max_prefill_rows=3), prefill_rows=10)
    served.submit("0", long_prompt(8), max_new_tokens=1)
    served.run()
    assert calls_of(served) == [("prefill", 3), ("prefill", 3), ("prefill", 2)]


def test_prompts_that_begin_alike_are_computed_once_even_side_by_side():
    served = bench(ToyPair(2, capacity=200), prefill_rows=10)
    prompt = long_prompt(100)
    answers = [served.submit(str(number), prompt, max_new_tokens=5) for number in range(2)]
    served.run()
    prefilled = sum(rows for call, rows in calls_of(served) if call == "prefill")
    # The last token of each is always run, with what its last piece has besides.
    assert 100 < prefilled <= 120
    assert sum(answer.statistics.cached_tokens for answer in answers) == 200 - prefilled
    assert answers[0].ids == answers[1].ids == alone(prompt, GenerationParams(max_new_tokens=5), ToyTarget(8, 200)).ids


def test_log_probabilities_of_a_prompt_come_with_the_first_output_and_reuse_nothing():
    served = bench(ToyPair(1), prefill_rows=4)
    prompt = long_prompt(11)
    served.submit("before", prompt, max_new_tokens=2)
    served.run()
    answer = served.submit("reads", prompt, max_new_tokens=3, prompt_logprobs=2)
    served.run()
    assert answer.statistics.cached_tokens == 0
    assert answer.prompt_logprobs == alone(prompt, GenerationParams(max_new_tokens=3, prompt_logprobs=2)).prompt_logprobs
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == 11


def test_requests_are_admitted_in_order_as_slots_become_free():
    served = bench(ToyPair(2))
    for number, length in enumerate([12, 4, 4, 4]):
        served.submit(str(number), [number + 1], ignore_eos=True, max_new_tokens=length, num_speculative_tokens=0)
    served.scheduler.step()
    assert (served.scheduler.snapshot().running, served.scheduler.snapshot().waiting) == (2, 2)
    served.run()
    assert [entry[0] for entry in served.journal.of("finished")] == ["1", "2", "3", "0"]  # type: ignore[index]


def test_the_snapshot_counts_rows_in_use():
    served = bench(ToyPair(2, capacity=50), prefill_rows=100)
    served.submit("0", PROMPT, ignore_eos=True, max_new_tokens=40, num_speculative_tokens=0)
    served.scheduler.step()
    # Three of the prompt and that of the first token; the second token has none yet.
    snapshot = served.scheduler.snapshot()
    assert (snapshot.used_rows, snapshot.total_rows) == (4, 100)


def test_a_request_near_the_model_length_is_cut_as_alone():
    served = bench(ToyPair(1, capacity=12))
    params = GenerationParams(max_new_tokens=100, ignore_eos=True)
    answer = served.submit_params("0", long_prompt(11), params)
    served.run()
    assert plain_view(answer) == plain_view(alone(long_prompt(11), params, ToyTarget(8, 12)))
    assert (len(answer.tokens), answer.finish_reason) == (2, "length")


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding"])
def test_a_cancelled_request_is_gone_within_one_step(state: str):
    served = bench(ToyPair(1), prefill_rows=2)
    if state == "waiting":
        served.submit("other", PROMPT, **ENDLESS)
    answer = served.submit("left", long_prompt(9), **ENDLESS)
    for _ in range({"waiting": 1, "prefilling": 1, "decoding": 6}[state]):
        served.scheduler.step()
    assert bool(answer.tokens) == (state == "decoding")
    served.scheduler.cancel("left")
    successor = served.submit("next", PROMPT, max_new_tokens=3)
    served.scheduler.step()
    assert answer.finish_reason == "abort"
    assert answer.outputs[-1].error is None
    assert answer.statistics.has_run_prompt == (state == "decoding")
    assert served.scheduler.snapshot().running == 1
    if state == "waiting":
        served.scheduler.cancel("other")
    served.run()
    assert successor.ids == alone(PROMPT, GenerationParams(max_new_tokens=3)).ids


def test_a_request_that_leaves_gets_what_was_held_back():
    text = alone(PROMPT, GenerationParams(**ENDLESS)).text  # type: ignore[arg-type]
    served = bench(ToyPair(1))
    # All of it may yet begin this stop string, so nothing is released.
    answer = served.submit("0", PROMPT, **ENDLESS, stop_strings=(text[:20] + "?",), num_speculative_tokens=0)
    for _ in range(5):
        served.scheduler.step()
    assert answer.tokens == ()
    served.scheduler.cancel("0")
    served.run()
    assert (answer.finish_reason, answer.text) == ("abort", text[: answer.statistics.generated_tokens])
    assert len(answer.tokens) == answer.statistics.generated_tokens > 0


def test_to_cancel_who_is_gone_or_never_came_does_nothing():
    served = bench(ToyPair(1))
    served.submit("0", PROMPT, max_new_tokens=1)
    served.run()
    served.scheduler.cancel("0")
    served.scheduler.cancel("nobody")
    assert not served.scheduler.has_work


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding"])
def test_a_request_whose_time_is_over_is_ended_with_what_it_has(state: str):
    served = bench(ToyPair(1), prefill_rows=2)
    if state == "waiting":
        served.submit("other", PROMPT, **ENDLESS)
    answer = served.submit("late", long_prompt(9), **ENDLESS, time_limit=5.0)
    for _ in range({"waiting": 1, "prefilling": 1, "decoding": 6}[state]):
        served.scheduler.step()
    served.clock.advance(4.9)
    served.scheduler.step()
    assert not answer.is_finished
    served.clock.advance(0.1)
    served.scheduler.step()
    assert answer.finish_reason == "abort"
    assert isinstance(answer.outputs[-1].error, TimeoutError)
    assert "5 s" in str(answer.outputs[-1].error)
    assert answer.statistics.total_seconds == pytest.approx(5.0)
    assert answer.ids == alone(long_prompt(9), GenerationParams(**ENDLESS)).ids[: len(answer.ids)]  # type: ignore[arg-type]


def test_a_client_that_cannot_be_told_is_dropped_and_does_no_harm(caplog: pytest.LogCaptureFixture):
    def gone(output: object) -> None:
        raise ConnectionError("the client has left")

    served = bench(ToyPair(2))
    served.submit("gone", PROMPT, **ENDLESS, deliver=gone)
    answer = served.submit("here", PROMPT, max_new_tokens=9)
    served.run(most_steps=20)
    assert answer.ids == alone(PROMPT, GenerationParams(max_new_tokens=9)).ids
    assert "gone" in caplog.text


@pytest.mark.parametrize("length", [3, 6])
def test_logits_that_are_no_numbers_end_that_request_alone(length: int, caplog: pytest.LogCaptureFixture):
    """At the end of a prompt (3 tokens), or in the midst of a draft."""

    def logits(prefix: tuple[int, ...], vocab_size: int) -> np.ndarray:
        row = toy_logits(prefix, vocab_size)
        return np.full_like(row, np.nan) if prefix[0] == 2 and len(prefix) >= length else row

    served = bench(ToyPair(2, logits=logits, hit_chance=0.5))
    damaged = served.submit("damaged", [2, 2, 2], **ENDLESS)
    answer = served.submit("whole", PROMPT, max_new_tokens=20)
    served.run()
    assert damaged.finish_reason == "error"
    assert isinstance(damaged.outputs[-1].error, VerificationError)
    assert plain_view(answer) == plain_view(alone(PROMPT, GenerationParams(max_new_tokens=20)))
    assert "request damaged failed" in caplog.text
    assert not served.scheduler.has_work


@pytest.mark.parametrize(("damaged_from", "has_run_prompt"), [(5, True), (6, True), (4, False)])
@pytest.mark.parametrize("params", [{}, {"prompt_logprobs": 0}])
def test_a_prompt_was_run_though_its_last_piece_gave_no_token(
    damaged_from: int, has_run_prompt: bool, params: dict[str, int], caplog: pytest.LogCaptureFixture
):
    """Six tokens, in pieces of four; unless the prompt is read, nothing but its last row is looked at."""

    def logits(prefix: tuple[int, ...], vocab_size: int) -> np.ndarray:
        row = toy_logits(prefix, vocab_size)
        return np.full_like(row, np.nan) if len(prefix) >= damaged_from else row

    served = bench(ToyPair(1, logits=logits), prefill_rows=4)
    answer = served.submit("0", long_prompt(6), **ENDLESS, **params)
    served.run()
    assert answer.finish_reason == "error"
    assert (answer.statistics.generated_tokens, answer.statistics.first_token_seconds) == (0, None)
    assert answer.statistics.has_run_prompt == (has_run_prompt or not params)


def test_nobody_starts_from_the_rows_of_a_request_that_failed(caplog: pytest.LogCaptureFixture):
    """They may be what is wrong with it."""
    is_damaged = True

    def logits(prefix: tuple[int, ...], vocab_size: int) -> np.ndarray:
        row = toy_logits(prefix, vocab_size)
        return np.full_like(row, np.nan) if is_damaged and len(prefix) >= 12 else row

    served = bench(ToyPair(2, logits=logits), prefill_rows=10)
    failed = served.submit("failed", long_prompt(10), **ENDLESS)
    served.run()
    assert failed.finish_reason == "error"
    is_damaged = False
    answer = served.submit("again", long_prompt(10), max_new_tokens=9)
    served.run()
    assert answer.statistics.cached_tokens == 0
    assert answer.ids == alone(long_prompt(10), GenerationParams(max_new_tokens=9)).ids


def test_an_error_of_the_pair_passes_through_and_ends_nobody_silently():
    pair = ToyPair(1)
    served = bench(pair)
    running, waiting = served.submit("0", PROMPT, **ENDLESS), served.submit("1", PROMPT, **ENDLESS)
    pair.fail_at = 3
    with pytest.raises(RuntimeError, match="on fire") as caught:
        served.run()
    served.scheduler.end_all(ERROR, caught.value)
    for answer in (running, waiting):
        assert (answer.finish_reason, answer.outputs[-1].error) == ("error", caught.value)
    assert not served.scheduler.has_work


class Alternating:
    """A matcher: an even token after an odd one and the other way round; gives up after so many tokens."""

    def __init__(self, most: int = 1000) -> None:
        self.last, self.left = 0, most

    def mask(self, logits_V: FloatArray) -> None:
        logits_V[self.last % 2 :: 2] = -np.inf

    def advance(self, token_id: int) -> None:
        if self.left == 0:
            raise RequestError("the grammar is too large")
        self.last, self.left = token_id, self.left - 1


def test_a_grammar_holds_at_every_position_of_a_draft():
    served = bench(ToyPair(2, hit_chance=0.8))
    bound = served.submit("bound", PROMPT, **ENDLESS, matcher=Alternating())
    free = served.submit("free", PROMPT, **ENDLESS)
    served.run()
    assert any(accepted for _, accepted in bound.statistics.steps)
    assert [token % 2 for token in bound.ids[:4]] == [1, 0, 1, 0]
    params = GenerationParams(**ENDLESS)  # type: ignore[arg-type]
    assert plain_view(bound) == plain_view(alone(PROMPT, params, matcher=Alternating()))
    assert plain_view(free) == plain_view(alone(PROMPT, params))


@pytest.mark.parametrize("most", [0, 7])
def test_a_grammar_that_fails_ends_its_own_request(most: int, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    served = bench(ToyPair(2))
    bound = served.submit("bound", PROMPT, **ENDLESS, matcher=Alternating(most))
    free = served.submit("free", PROMPT, **ENDLESS)
    served.run()
    assert bound.finish_reason == "error"
    assert isinstance(bound.outputs[-1].error, RequestError)
    assert len(bound.ids) <= most
    assert "request bound is refused" in caplog.text
    assert "the grammar is too large" not in caplog.text, "it may quote what the client asked"
    assert plain_view(free) == plain_view(alone(PROMPT, GenerationParams(**ENDLESS)))  # type: ignore[arg-type]
    assert served.scheduler.snapshot().running == 0


def certain(**params: object) -> tuple[Bench, Answer]:
    """One request whose drafts are always right."""
    served = bench(ToyPair(1, max_proposals=4, hit_chance=1.0))
    answer = served.submit("0", PROMPT, **params)
    served.run()
    return served, answer


@pytest.mark.parametrize("length", range(1, 9))
def test_drafts_are_counted_up_to_the_length(length: int):
    _, answer = certain(ignore_eos=True, max_new_tokens=length)
    assert len(answer.tokens) == length
    assert sum(accepted for _, accepted in answer.statistics.steps) == sum(token.drafted for token in answer.tokens)
    # Nobody drafts what cannot be kept: besides the draft there is always the target's own token.
    assert all(proposed < length for proposed, _ in answer.statistics.steps)


def test_a_stop_string_inside_an_accepted_run_cuts_tokens_and_counters():
    _, whole = certain(ignore_eos=True, max_new_tokens=12)
    stops = {place: whole.text[place - 1 : place + 1] for place in range(2, 10)}
    first = {place: stop for place, stop in stops.items() if whole.text.find(stop) == place - 1}
    assert len({place % 5 for place in first}) == 5, "at every place of an accepted run"
    for place, stop in first.items():
        served, answer = certain(ignore_eos=True, max_new_tokens=40, stop_strings=(stop,))
        assert answer.text == whole.text[: place - 1]
        assert answer.ids == whole.ids[: place + 1]
        assert (answer.finish_reason, answer.outputs[-1].stop_reason) == ("stop", stop)
        assert answer.statistics.generated_tokens == place + 1
        assert sum(record.accepted for record in served.journal.records) == sum(token.drafted for token in answer.tokens)


def test_a_stop_token_inside_an_accepted_run_cuts_tokens_and_counters():
    _, whole = certain(ignore_eos=True, max_new_tokens=12)
    for stop in set(whole.ids):
        place = whole.ids.index(stop)
        _, answer = certain(ignore_eos=True, max_new_tokens=40, stop_token_ids=(stop,))
        assert answer.ids == whole.ids[: place + 1]
        # The first token is the prefill's; each cycle gives four drafts and one of the target's own, until the stop token.
        cycles, rest = divmod(place, 5)
        assert answer.statistics.steps == ((4, 4),) * cycles + ((4, rest),) * (rest > 0)


def test_log_probabilities_are_the_released_tokens_own():
    params = GenerationParams(ignore_eos=True, max_new_tokens=20, logprobs=2, stop_strings=("ab", "fg"))
    served = bench(ToyPair(1, hit_chance=0.8))
    answer = served.submit_params("0", PROMPT, params)
    served.run()
    assert [token.logprobs.token_id for token in answer.tokens if token.logprobs is not None] == answer.ids
    assert plain_view(answer) == plain_view(alone(PROMPT, params))


def test_a_stop_token_is_the_reason_and_the_targets_own_end_is_none():
    first = alone(PROMPT, GenerationParams(max_new_tokens=1, ignore_eos=True)).ids[0]
    _, stopped = certain(stop_token_ids=(first,), ignore_eos=True)
    assert (stopped.finish_reason, stopped.outputs[-1].stop_reason, stopped.text) == ("stop", first, "")
    _, ended = certain(sampling=SamplingParams(logit_bias={EOS: 100.0}))
    assert (ended.finish_reason, ended.outputs[-1].stop_reason, ended.ids) == ("stop", None, [EOS])


def test_times_are_told_from_arrival_on():
    served = bench(ToyPair(1), prefill_rows=2)
    served.submit("first", PROMPT, ignore_eos=True, max_new_tokens=2, num_speculative_tokens=0)
    answer = served.submit("second", PROMPT[:2], ignore_eos=True, max_new_tokens=2, num_speculative_tokens=0)
    while served.scheduler.has_work:
        served.clock.advance(1.0)
        served.scheduler.step()
    found = answer.statistics
    # "first" takes two steps: two pieces, the second with a cycle; "second" comes in with the third, which is all it takes.
    assert found == RequestStatistics(
        prompt_tokens=2,
        generated_tokens=2,
        has_run_prompt=True,
        queue_seconds=3.0,
        first_token_seconds=3.0,
        prefill_seconds=0.0,
        decode_seconds=0.0,
        total_seconds=3.0,
    )


def test_the_time_between_ends_is_the_time_of_serving_one_over_the_slots():
    served = bench(ToyPair(2))
    assert served.scheduler.seconds_between_ends() is None
    for number in range(2):
        served.submit(str(number), [number], ignore_eos=True, max_new_tokens=6, num_speculative_tokens=0)
    while served.scheduler.has_work:
        served.scheduler.step()
        served.clock.advance(1.0)
    serving = [answer.statistics.total_seconds - answer.statistics.queue_seconds for answer in served.answers.values()]
    found = served.scheduler.seconds_between_ends()
    assert found is not None
    assert min(serving) / 2 <= found <= max(serving) / 2
    assert min(serving) > 0


def test_plain_requests_draft_nothing_beside_others_that_do():
    served = bench(ToyPair(2, hit_chance=0.9))
    plain = served.submit("plain", PROMPT, ignore_eos=True, max_new_tokens=10, num_speculative_tokens=0)
    served.submit("drafts", PROMPT, **ENDLESS)
    served.run()
    assert plain.statistics.steps == ()
    assert not any(token.drafted for token in plain.tokens)
    assert any(record.batch == 2 and record.drafts == 1 for record in served.journal.records)


def test_a_request_may_ask_for_fewer_drafts_than_the_engine_offers():
    served = bench(ToyPair(1, hit_chance=1.0))
    answer = served.submit("0", PROMPT, **ENDLESS, num_speculative_tokens=2)
    served.run()
    assert {proposed for proposed, _ in answer.statistics.steps[:-1]} == {2}


def test_cycle_records_carry_the_pairs_times_and_the_observer_hears_of_all_in_order():
    served = bench(ToyPair(1, max_proposals=3, hit_chance=1.0), prefill_rows=10)
    served.submit("0", PROMPT, ignore_eos=True, max_new_tokens=10)
    served.run()
    assert served.journal.records[0].terms_ms == TermsMs(draft=TOY_TERMS.draft, head=TOY_TERMS.head, verify=TOY_TERMS.verify)
    kinds = [kind for kind, _ in served.journal.events]
    assert kinds[:3] == ["queued", "prefilled", "delivered"]
    assert kinds[-1] == "finished"
    assert [interval is None for _, _, interval in served.journal.of("delivered")] == [True, False, False, False]  # type: ignore[misc]
    # The second cycle ends the request but for one token, which nobody drafts: that is no choice of the controller.
    assert served.journal.of("width_chosen") == [(3, "fixed")]


@pytest.mark.parametrize("make", [ToyPair, lambda slots: ToyPair(slots, max_prefill_rows=None, reuses_prefixes=False)])
def test_a_request_that_wants_no_token_ends_behind_its_prompt(make: Callable[[int], ToyPair]):
    served = bench(make(1), prefill_rows=2)
    answer = served.submit("0", PROMPT, max_new_tokens=0)
    served.run()
    assert (answer.tokens, answer.finish_reason, len(answer.outputs)) == ((), "length", 1)
    assert (answer.statistics.generated_tokens, answer.statistics.first_token_seconds) == (0, None)
    assert sum(rows for kind, rows in calls_of(served) if kind == "prefill") == len(PROMPT)
    assert all(kind == "prefill" for kind, _ in calls_of(served))
    assert plain_view(answer) == plain_view(alone(PROMPT, GenerationParams(max_new_tokens=0)))


def test_the_width_is_0_while_nobody_wants_drafts():
    served = bench(ToyPair(1, hit_chance=1.0, max_proposals=3))
    served.submit("drafts", PROMPT, ignore_eos=True, max_new_tokens=9)
    served.submit("plain", PROMPT, ignore_eos=True, max_new_tokens=9, num_speculative_tokens=0)
    widths = []
    while served.scheduler.has_work:
        served.scheduler.step()
        widths.append(served.scheduler.snapshot().width)
    assert widths[0] == 3
    assert set(widths[-8:]) == {0}
    assert served.journal.of("width_chosen") == [(3, "fixed")], "nobody's choice"


class Decided(SpeculationController):
    """Always makes the same choice."""

    def __init__(self, width: int, reason: str) -> None:
        super().__init__(3, adaptive=False)
        self._choice = width, reason

    def width(self, *args: object, **options: object) -> int:
        width, self.last_reason = self._choice
        return width


@pytest.mark.parametrize("choice", [(3, "pays"), (0, "others_join")])
def test_a_while_in_which_nobody_wants_drafts_does_not_make_the_same_choice_a_new_one(choice: tuple[int, str]):
    served = bench(ToyPair(2, hit_chance=1.0, max_proposals=3), prefill_rows=10, controller=Decided(*choice))
    served.submit("plain", PROMPT, **ENDLESS, num_speculative_tokens=0)
    widths = []
    for number in range(2):
        answer = served.submit(str(number), PROMPT, ignore_eos=True, max_new_tokens=9)
        served.scheduler.step()
        widths.append(served.scheduler.snapshot().width)
        while not answer.is_finished:
            served.scheduler.step()
        served.scheduler.step()
        widths.append(served.scheduler.snapshot().width)
    assert widths == [choice[0], 0, choice[0], 0]
    assert served.journal.of("width_chosen") == [choice]


def test_the_snapshot_tells_width_and_acceptance_length():
    served = bench(ToyPair(1, hit_chance=1.0, max_proposals=3))
    assert (served.scheduler.snapshot().width, served.scheduler.snapshot().acceptance_length) == (None, None)
    answer = served.submit("0", PROMPT, **ENDLESS)
    served.run()
    steps = answer.statistics.steps
    assert served.scheduler.snapshot().acceptance_length == pytest.approx(1 + sum(accepted for _, accepted in steps) / len(steps))
