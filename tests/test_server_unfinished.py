"""Answers that do not end by themselves: clients that go away, and answers whose time is over."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from domino_deploy.errors import QueueFullError
from domino_deploy.runtime.requests import Request
from tests.support.exchange import Exchange
from tests.support.fake_engine import ScriptedEngine, client_of

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
    PLAIN: {"prompt": "Hello", "max_tokens": 99},
}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "temperature": 0, "stream": True, **BODIES[path], **fields}


REQUEST_LOG = "domino_deploy.server.requests"


def log_line(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """The named values of the one request's line."""
    (line,) = [record for record in caplog.records if record.name == REQUEST_LOG]
    fields: dict[str, Any] = line.domino_fields  # type: ignore[attr-defined]
    return fields


@pytest.mark.parametrize("stream", [True, False])
def test_the_log_counts_the_tokens_of_an_answer_whose_time_was_over(tiny_bundle: Path, stream: bool, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", REQUEST_LOG)
    with ScriptedEngine(tiny_bundle, [50] * 2000, max_model_len=4096, seconds_per_row=0.002) as engine:
        client_of(engine, request_timeout_seconds=0.3).post(CHAT, json=body_of(CHAT, stream=stream))
        ((_, _, statistics),) = engine.witness.ends
    line = log_line(caplog)
    assert (line["finish_reason"], line["error"]) == ("abort", "request_timeout")
    assert (line["prompt_tokens"], line["generated_tokens"]) == (statistics.prompt_tokens, statistics.generated_tokens)
    assert 0 < statistics.generated_tokens < 1000


class FullEngine(ScriptedEngine):
    """Has no room for later prompts until it was asked so often."""

    def __init__(self, *args: Any, refusals: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.refusals = refusals

    def submit(self, request: Request) -> None:
        if self.requests and self.refusals > 0:
            self.refusals -= 1
            raise QueueFullError("full", retry_after_seconds=1.0)
        super().submit(request)


class TestTimeOfSeveralPrompts:
    @pytest.mark.parametrize("stream", [True, False])
    def test_is_that_of_the_whole_request(self, tiny_bundle: Path, stream: bool) -> None:
        # Each prompt by itself takes a small part of the limit.
        with ScriptedEngine(tiny_bundle, "Hi", max_sequences=1, seconds_per_row=0.02) as engine:
            client = client_of(engine, request_timeout_seconds=4.0)
            answer = client.post(PLAIN, json=body_of(PLAIN, stream=stream, prompt=["a"] * 1000))
        assert '"request_timeout"' in answer.text
        assert answer.status_code == (200 if stream else 408)
        assert "within 4 s, the time limit, found" in answer.text
        reasons = [reason for _, reason, _ in engine.witness.ends]
        assert reasons[0] == "stop"
        assert len(reasons) < 1000

    @pytest.mark.parametrize("stream", [True, False])
    def test_goes_on_while_the_queue_is_full(self, tiny_bundle: Path, stream: bool) -> None:
        with FullEngine(tiny_bundle, "Hi", max_sequences=1, refusals=float("inf")) as engine:
            client = client_of(engine, request_timeout_seconds=1.0)
            answer = client.post(PLAIN, json=body_of(PLAIN, stream=stream, prompt=["a", "b"]))
        assert '"request_timeout"' in answer.text
        assert [reason for _, reason, _ in engine.witness.ends] == ["stop"]

    def test_is_filled_with_comments_meanwhile(self, tiny_bundle: Path) -> None:
        with FullEngine(tiny_bundle, "Hi", max_sequences=1, refusals=8) as engine:
            answer = client_of(engine, keep_alive_seconds=0.15).post(PLAIN, json=body_of(PLAIN, prompt=["a", "b"]))
        first, second = (answer.text.index(f'"index":{index},"text":"H') for index in range(2))
        assert answer.text[first:second].count(": keep-alive") >= 2
        assert answer.text.endswith("data: [DONE]\n\n")

    def test_begins_before_a_grammar_is_compiled(self, tiny_bundle: Path) -> None:
        with ScriptedEngine(tiny_bundle, "Hi") as engine:
            compile_as_ever = engine._compiler.matcher
            engine._compiler.matcher = lambda constraint: (time.sleep(0.5), compile_as_ever(constraint))[1]  # type: ignore[method-assign]
            body = body_of(CHAT, stream=False, response_format={"type": "json_object"})
            assert client_of(engine, request_timeout_seconds=0.4).post(CHAT, json=body).status_code == 408
            assert [statistics.generated_tokens for _, _, statistics in engine.witness.ends] == [0]


class TestClientsThatGoAway:
    def test_a_streams_request_is_cancelled(self, tiny_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", REQUEST_LOG)
        with ScriptedEngine(tiny_bundle, [50] * 2000, max_model_len=4096, seconds_per_row=0.002) as engine:

            async def exchange() -> None:
                going = Exchange(engine, CHAT, body_of(CHAT))
                await going.start()
                await going.leave()
                assert b"[DONE]" not in b"".join(message.get("body", b"") for message in going.sent)

            asyncio.run(exchange())
            assert engine.witness.ended.wait(30)
            ((_, reason, statistics),) = engine.witness.ends
            assert (reason, engine.snapshot().running) == ("abort", 0)
            assert statistics.generated_tokens < 1000
            line = log_line(caplog)
            assert (line["client"], line["finish_reason"]) == ("disconnected", "abort")
            assert line["generated_tokens"] == statistics.generated_tokens

    def test_a_stream_that_nobody_waits_for_is_cancelled(self, tiny_bundle: Path) -> None:
        with ScriptedEngine(tiny_bundle, [50] * 2000, max_model_len=4096, seconds_per_row=0.002) as engine:

            async def exchange() -> None:
                going = Exchange(engine, CHAT, body_of(CHAT))
                going._has_left.set()
                await going._run()

            asyncio.run(exchange())
            assert engine.drain(timeout_seconds=30)
            assert [reason for _, reason, _ in engine.witness.ends] == ["abort"]
            assert engine.witness.ends[0][2].generated_tokens < 1000

    def test_a_whole_answers_request_is_cancelled(self, tiny_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", REQUEST_LOG)
        with ScriptedEngine(tiny_bundle, [50] * 2000, max_model_len=4096, seconds_per_row=0.002) as engine:

            async def exchange() -> None:
                going = Exchange(engine, CHAT, body_of(CHAT, stream=False))
                task = asyncio.ensure_future(going._run())
                while not engine.snapshot().running:
                    await asyncio.sleep(0.01)
                going._has_left.set()
                await task

            asyncio.run(exchange())
            assert engine.witness.ended.wait(30)
            ((_, reason, statistics),) = engine.witness.ends
            assert reason == "abort"
            line = log_line(caplog)
            assert (line["client"], line["finish_reason"]) == ("disconnected", "abort")
            assert line["generated_tokens"] == statistics.generated_tokens

    def test_all_prompts_of_a_request_are_cancelled(self, tiny_bundle: Path) -> None:
        with ScriptedEngine(tiny_bundle, [50] * 2000, max_model_len=4096, max_sequences=2, seconds_per_row=0.002) as engine:

            async def exchange() -> None:
                going = Exchange(engine, PLAIN, body_of(PLAIN, stream=False, prompt=["a", "b", "c", "d", "e"], max_tokens=2000, echo=True))
                task = asyncio.ensure_future(going._run())
                while engine.snapshot().running < 2:
                    await asyncio.sleep(0.01)
                going._has_left.set()
                await task

            asyncio.run(exchange())
            assert engine.drain(timeout_seconds=30)
            assert [reason for _, reason, _ in engine.witness.ends] == ["abort"] * 2
