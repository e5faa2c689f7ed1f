"""The engine: one thread, requests from many, and its life from start to close."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from domino_deploy.errors import CapacityError, DrainingError, OutOfRangeError, QueueFullError, RequestError
from domino_deploy.runtime.engine import Engine, EngineSettings
from domino_deploy.runtime.requests import GenerationParams, Output, Request
from tests.support.doubles import ToyTarget
from tests.support.scheduled_runs import EOS, PATIENCE, Client, alone, decode, plain_view
from tests.support.toy_pair import ToyPair

PROMPT = [3, 1, 4]


class GatedPair(ToyPair):
    """Cycles wait until the gate is open."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gate = threading.Event()
        self.gate.set()

    def cycle(self, sequences: Any) -> Any:
        assert self.gate.wait(PATIENCE)
        return super().cycle(sequences)


def engine_of(pair: ToyPair, **settings: Any) -> Engine:
    bundle: Any = SimpleNamespace(manifest=SimpleNamespace(num_speculative_tokens=5), target=SimpleNamespace(eos_token_ids=(EOS,)))
    tokenizer: Any = SimpleNamespace(decode=decode, source="{}")
    return Engine(bundle, tokenizer, pair, EngineSettings(**settings))


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    """Engines that are closed in the end."""
    engines: list[Engine] = []

    def started(pair: ToyPair, **settings: Any) -> Engine:
        engines.append(engine_of(pair, **settings))
        engines[-1].start()
        return engines[-1]

    yield started
    for engine in engines:
        if isinstance(engine._pair, GatedPair):
            engine._pair.gate.set()
        engine.close()


def request(request_id: str, client: Client, prompt: list[int] = PROMPT, time_limit: float | None = None, **params: Any) -> Request:
    return Request(
        request_id=request_id, prompt_ids=prompt, params=GenerationParams(**params), deliver=client.deliver, time_limit=time_limit
    )


def submit(engine: Engine, request_id: str, prompt: list[int] = PROMPT, **params: Any) -> Client:
    client = Client()
    engine.submit(request(request_id, client, prompt, **params))
    return client


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_request_gets_its_single_run(start):
    client = submit(start(ToyPair()), "0", max_new_tokens=20)
    assert plain_view(client.wait()) == plain_view(alone(PROMPT, GenerationParams(max_new_tokens=20)))


def test_many_threads_submit_and_cancel_at_once(start):
    engine = start(ToyPair(4), max_queued=1000)
    clients: dict[str, tuple[Client, list[int], GenerationParams]] = {}
    problems: list[BaseException] = []

    def visitor(number: int) -> None:
        rng = random.Random(number)
        try:
            for turn in range(25):
                prompt = [rng.randrange(8) for _ in range(rng.randint(1, 9))]
                params = GenerationParams(max_new_tokens=rng.randint(1, 20), num_speculative_tokens=rng.choice([None, 0, 2]))
                client, request_id = Client(), f"{number}-{turn}"
                clients[request_id] = client, prompt, params
                engine.submit(Request(request_id=request_id, prompt_ids=prompt, params=params, deliver=client.deliver))
                if rng.random() < 0.3:
                    engine.cancel(request_id)
                if rng.random() < 0.5:
                    client.wait()
                engine.snapshot()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=visitor, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert problems == []
    assert engine.drain(PATIENCE)
    for client, prompt, params in clients.values():
        answer, expected = client.wait(), alone(prompt, params)
        if answer.finish_reason == "abort":
            assert answer.ids == expected.ids[: len(answer.ids)]
        else:
            assert plain_view(answer) == plain_view(expected)
    assert (engine.snapshot().running, engine.snapshot().waiting) == (0, 0)


def test_an_idle_engine_makes_no_passes_and_wakes_for_a_request(start):
    pair = ToyPair()
    engine = start(pair)
    until(lambda: engine.is_ready)
    submit(engine, "0", max_new_tokens=3).wait()
    passes = len(pair.calls)
    stepped = threading.Event()
    engine._scheduler.step = stepped.set  # type: ignore[method-assign]
    assert not stepped.wait(0.2)
    assert len(pair.calls) == passes
    engine.cancel("nobody")
    assert not stepped.wait(0.05)
    submit(engine, "1", max_new_tokens=3)
    assert stepped.wait(PATIENCE)


def test_a_cancelled_request_is_told_so_and_its_slot_serves_the_next(start):
    pair = GatedPair(1)
    engine = start(pair)
    until(lambda: engine.is_ready)
    pair.gate.clear()
    left = submit(engine, "left", ignore_eos=True, max_new_tokens=60)
    assert left.began.wait(PATIENCE)
    waiting = submit(engine, "next", max_new_tokens=4)
    engine.cancel("left")
    pair.gate.set()
    assert left.wait().finish_reason == "abort"
    assert waiting.wait().ids == alone(PROMPT, GenerationParams(max_new_tokens=4)).ids
    engine.cancel("left")
    engine.cancel("nobody")


def test_the_warm_up_leaves_every_slot_empty_and_measures_for_the_controller(start):
    pair = ToyPair(3)
    engine = start(pair)
    until(lambda: engine.is_ready)
    assert [pair.rows(slot).target for slot in range(3)] == [0, 0, 0]
    assert {size for call, size in pair.calls if call == "cycle"} == {1, 2, 3}


def test_a_pair_of_few_tokens_is_warmed_up_too(start):
    engine = start(ToyPair(2, capacity=4))
    client = submit(engine, "0", [1, 2], ignore_eos=True, max_new_tokens=9)
    assert plain_view(client.wait()) == plain_view(
        alone([1, 2], GenerationParams(ignore_eos=True, max_new_tokens=9), ToyTarget(8, capacity=4))
    )


def test_requests_may_come_before_the_engine_is_ready(start):
    pair = GatedPair(1)
    pair.gate.clear()
    engine = start(pair)
    client = submit(engine, "0", max_new_tokens=4)
    assert not engine.is_ready
    assert engine.snapshot().waiting == 1
    pair.gate.set()
    assert client.wait().finish_reason is not None
    assert engine.is_ready


@pytest.mark.parametrize(("setting", "proposals", "expected"), [(None, 6, 5), (None, 3, 3), (2, 6, 2), (0, 6, 0), (9, 6, 6)])
def test_speculation_is_limited_by_bundle_settings_and_drafter(setting: int | None, proposals: int, expected: int):
    assert engine_of(ToyPair(max_proposals=proposals), num_speculative_tokens=setting).max_speculative_tokens == expected


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "at least one token"),
        ([1, 8], {}, r"prompt_ids must be token ids in \[0, 8\), found 8"),
        ([1], {"stop_token_ids": (9,)}, r"stop_token_ids must be token ids in \[0, 8\), found 9"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once(start, prompt, params, message):
    with pytest.raises(RequestError, match=message):
        submit(start(ToyPair()), "0", prompt, **params)


def test_a_prompt_that_leaves_no_room_is_refused_with_both_lengths(start):
    engine = start(ToyPair(capacity=20))
    with pytest.raises(CapacityError, match=r"(?s)at most 19 tokens.*20.*found 20"):
        submit(engine, "0", [1] * 20)
    assert submit(engine, "1", [1] * 19, ignore_eos=True).wait().finish_reason == "length"


def test_prompt_log_probabilities_are_refused_where_there_are_none(start):
    engine = start(ToyPair(max_prefill_rows=None, reuses_prefixes=False, gives_prompt_logits=False))
    with pytest.raises(RequestError, match="prompt_logprobs"):
        submit(engine, "0", prompt_logprobs=1)


def test_two_requests_with_one_id_are_refused_until_the_first_has_ended(start):
    pair = GatedPair(1)
    pair.gate.clear()
    engine = start(pair)
    first = submit(engine, "0", max_new_tokens=2)
    with pytest.raises(RequestError, match="'0' once more"):
        submit(engine, "0")
    pair.gate.set()
    first.wait()
    submit(engine, "0", max_new_tokens=2).wait()


def test_a_full_queue_refuses_and_says_when_to_come_back(start):
    pair = GatedPair(2)
    engine = start(pair, max_queued=3)
    submit(engine, "before", max_new_tokens=2).wait()
    pair.gate.clear()
    clients = [submit(engine, str(number), ignore_eos=True, max_new_tokens=8) for number in range(5)]
    with pytest.raises(QueueFullError, match="2 running and 3 waiting") as caught:
        submit(engine, "one too many")
    assert 1 <= caught.value.retry_after_seconds <= 120
    pair.gate.set()
    for client in clients:
        client.wait()
    submit(engine, "one too many", max_new_tokens=2).wait()


def test_settings_out_of_range_are_refused_all_at_once():
    with pytest.raises(OutOfRangeError, match="Expected values in range, found 5 out of it") as caught:
        EngineSettings(max_sequences=0, max_queued=-1, prefill_rows=True, num_speculative_tokens=-2, adaptive=1)  # type: ignore[arg-type]
    for name in ("max_sequences", "max_queued", "prefill_rows", "num_speculative_tokens", "adaptive"):
        assert name in str(caught.value)


def test_a_request_before_the_start_is_refused():
    with pytest.raises(DrainingError, match="not started"):
        submit(engine_of(ToyPair()), "0")


def test_draining_finishes_what_is_there_and_refuses_more(start):
    pair = GatedPair(1)
    engine = start(pair)
    until(lambda: engine.is_ready)
    pair.gate.clear()
    clients = [submit(engine, str(number), max_new_tokens=5) for number in range(3)]
    assert not engine.drain(0.01)
    with pytest.raises(DrainingError, match="shutting down"):
        submit(engine, "late")
    pair.gate.set()
    assert engine.drain(PATIENCE)
    for client in clients:
        assert client.wait().ids == alone(PROMPT, GenerationParams(max_new_tokens=5)).ids


def test_closing_ends_who_is_left_and_the_thread(start):
    pair = GatedPair(1)
    engine = start(pair)
    until(lambda: engine.is_ready)
    pair.gate.clear()
    clients = [submit(engine, str(number), ignore_eos=True, max_new_tokens=60) for number in range(3)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(lambda: not engine.is_ready)
    pair.gate.set()
    closing.join(PATIENCE)
    assert [client.wait().finish_reason for client in clients] == ["abort"] * 3
    assert not engine._thread.is_alive()
    assert not engine.is_ready
    engine.close()


def test_closing_an_engine_that_never_started_does_nothing():
    engine_of(ToyPair()).close()


def test_an_engine_that_is_closed_while_it_warms_up_does_not_go_on_with_it(start):
    pair = GatedPair(4)
    pair.gate.clear()
    engine = start(pair)
    client = submit(engine, "0")
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(lambda: engine._is_closing)
    pair.gate.set()
    closing.join(PATIENCE)
    assert (client.wait().finish_reason, engine.failure) == ("abort", None)
    assert [name for name, _ in pair.calls].count("cycle") <= 1


def test_who_has_the_last_output_is_not_found_running_any_more(start):
    """The iteration that made it goes on with others."""
    engine = start(ToyPair(2, capacity=2000))
    submit(engine, "long", max_new_tokens=1500, ignore_eos=True).began.wait(PATIENCE)
    found: list[int] = []
    ended = threading.Event()

    def deliver(output: Output) -> None:
        if output.finish_reason is not None:
            found.append(engine.snapshot().running)
            ended.set()

    params = GenerationParams(max_new_tokens=5, ignore_eos=True, num_speculative_tokens=0)
    engine.submit(Request(request_id="short", prompt_ids=PROMPT, params=params, deliver=deliver))
    assert ended.wait(PATIENCE)
    engine.cancel("long")
    assert found == [1]


@pytest.mark.parametrize("moment", ["warm-up", "prefill", "cycle"])
def test_the_death_of_the_pair_ends_everybody_with_an_error(start, moment: str, caplog: pytest.LogCaptureFixture):
    pair = GatedPair(1)
    if moment == "warm-up":
        pair.gate.clear()
        pair.fail_at = 3
    engine = start(pair)
    if moment != "warm-up":
        until(lambda: engine.is_ready)
        pair.gate.clear()
        pair.fail_at = len(pair.calls) + {"prefill": 1, "cycle": 2}[moment]
    clients = [submit(engine, "0", ignore_eos=True, max_new_tokens=60)]
    if moment != "prefill":  # which waits for no gate: a second one may come too late
        clients.append(submit(engine, "1", ignore_eos=True, max_new_tokens=60))
    pair.gate.set()
    for client in clients:
        answer = client.wait()
        assert (answer.finish_reason, answer.outputs[-1].error) == ("error", engine.failure)
    until(lambda: engine.failure is not None)
    assert "on fire" in str(engine.failure)
    assert not engine.is_ready
    with pytest.raises(DrainingError, match="one that failed"):
        submit(engine, "late")
    assert engine.drain(PATIENCE)
    assert "the engine failed" in caplog.text


def test_a_panic_which_is_no_exception_ends_everybody_too(start, caplog: pytest.LogCaptureFixture):
    class Panic(BaseException):
        """As pyo3 makes them of a library's in Rust."""

    pair = GatedPair(1)
    engine = start(pair)
    until(lambda: engine.is_ready)
    pair.fail_at, pair.failure = len(pair.calls) + 2, Panic("index out of bounds")
    answer = submit(engine, "0", ignore_eos=True, max_new_tokens=60).wait()
    assert answer.finish_reason == "error"
    until(lambda: engine.failure is not None)
    assert "index out of bounds" in str(engine.failure)
    assert not engine.is_ready


def test_a_time_limit_ends_a_request_that_waits_behind_a_long_one(start):
    pair = GatedPair(1)
    engine = start(pair)
    submit(engine, "long", ignore_eos=True, max_new_tokens=50)
    client = Client()
    engine.submit(request("late", client, time_limit=1e-9))
    answer = client.wait()
    assert (answer.finish_reason, answer.tokens) == ("abort", ())
    assert isinstance(answer.outputs[-1].error, TimeoutError)
