"""Streams of both endpoints: the order of chunks, usage, errors on the way, and silence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from domino_deploy.server.settings import StatisticsLevel
from tests.support.exchange import Exchange
from tests.support.fake_engine import ScriptedEngine, client_of

TEXT = "A drafter proposes: naïve café, 東京 🙂 and\u2028more.\n"
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]},
    PLAIN: {"prompt": "Hello", "max_tokens": 99},
}


@pytest.fixture
def engine(tiny_bundle: Path) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(tiny_bundle, TEXT) as engine:
        yield engine


@pytest.fixture
def client(engine: ScriptedEngine) -> TestClient:
    return client_of(engine)


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "temperature": 0, "stream": True, **BODIES[path], **fields}


def events(client: TestClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The JSON of all events but the last, which is [DONE]."""
    answer = client.post(path, json=body_of(path, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert "content-length" not in answer.headers
    pieces = answer.text.split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""]
    data = [piece for piece in pieces[:-2] if not piece.startswith(":")]
    assert all(piece.startswith("data: {") and len(piece.splitlines()) == 1 for piece in data)
    return [json.loads(piece.removeprefix("data: ")) for piece in data]


class TestChunks:
    def test_a_chat_begins_with_the_role_and_ends_with_the_reason(self, client: TestClient) -> None:
        chunks = events(client, CHAT)
        assert {(chunk["id"], chunk["object"], chunk["model"], chunk["created"]) for chunk in chunks} == {
            (chunks[0]["id"], "chat.completion.chunk", "tiny", chunks[0]["created"])
        }
        assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert choices[-1]["delta"] == {}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert all("\N{REPLACEMENT CHARACTER}" not in choice["delta"].get("content", "") for choice in choices)
        assert len(choices) > 5

    def test_a_completion_is_its_text_and_one_reason(self, client: TestClient) -> None:
        chunks = events(client, PLAIN)
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["stop"]

    @pytest.mark.parametrize("path", [CHAT, PLAIN])
    def test_usage_comes_last_if_asked_for(self, client: TestClient, engine: ScriptedEngine, path: str) -> None:
        chunks = events(client, path, stream_options={"include_usage": True})
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["prompt_tokens"] == len(engine.prompts[-1])
        assert chunks[-1]["usage"]["completion_tokens"] == len(engine.tokenizer.encode(TEXT)) + 1
        assert "metrics" not in chunks[-1]

    def test_statistics_ride_on_the_usage_chunk(self, engine: ScriptedEngine) -> None:
        client = client_of(engine, statistics_level=StatisticsLevel.SUMMARY)
        chunks = events(client, CHAT, stream_options={"include_usage": True})
        assert chunks[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
        assert all("metrics" not in chunk for chunk in chunks[:-1])
        assert all("metrics" not in chunk for chunk in events(client, CHAT))

    def test_a_stop_string_never_shows_in_part(self, client: TestClient) -> None:
        chunks = events(client, CHAT, stop=["café, 東"])
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "A drafter proposes: naïve "
        assert (chunks[-1]["choices"][0]["finish_reason"], chunks[-1]["choices"][0]["stop_reason"]) == ("stop", "café, 東")

    @pytest.mark.parametrize("path", [CHAT, PLAIN])
    def test_logprobs_in_pieces_are_those_of_the_whole(self, client: TestClient, path: str) -> None:
        asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2, "echo": True}
        whole = client.post(path, json=body_of(path, **asked, stream=False)).json()["choices"][0]["logprobs"]
        pieces = [chunk["choices"][0]["logprobs"] for chunk in events(client, path, **asked)]
        for name in whole if path == PLAIN else ["content"]:
            assert [entry for piece in pieces if piece for entry in piece[name]] == whole[name]

    def test_details_account_for_every_token(self, client: TestClient, engine: ScriptedEngine) -> None:
        chunks = events(client, CHAT, speculation_details=True)
        assert "speculation" not in chunks.pop(0), "the role comes before any token"
        assert {chunk["speculation"]["batch"] for chunk in chunks if chunk["speculation"]["cycles"]} == {1}
        tokens = [token for chunk in chunks for token in chunk["speculation"]["tokens"]]
        assert [token["id"] for token in tokens[:-1]] == engine.tokenizer.encode(TEXT)
        statistics = engine.witness.ends[-1][2]
        assert sum(chunk["speculation"]["proposed"] for chunk in chunks) == sum(proposed for proposed, _ in statistics.steps)
        accepted = sum(chunk["speculation"]["accepted"] for chunk in chunks)
        assert accepted == sum(accepted for _, accepted in statistics.steps) == sum(token["drafted"] for token in tokens)
        for chunk in chunks:
            delta = chunk["choices"][0]["delta"]
            if delta:
                assert "".join(token["text"] for token in chunk["speculation"]["tokens"]) == delta["content"]

    def test_several_prompts_share_a_stream(self, client: TestClient, engine: ScriptedEngine) -> None:
        chunks = events(client, PLAIN, prompt=["a", "b", "c", "d", "e", "f"], stream_options={"include_usage": True})
        texts = dict.fromkeys(range(6), "")
        for chunk in chunks[:-1]:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == dict.fromkeys(range(6), TEXT)
        assert chunks[-1]["usage"]["completion_tokens"] == 6 * (len(engine.tokenizer.encode(TEXT)) + 1)


class TestErrors:
    @pytest.mark.parametrize("path", [CHAT, PLAIN])
    def test_before_the_first_byte_they_are_json_with_a_status(self, client: TestClient, path: str) -> None:
        long: dict[str, Any] = {"prompt": [5] * 600} if path == PLAIN else {"messages": [{"role": "user", "content": "x" * 9000}]}
        answer = client.post(path, json=body_of(path, **long))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert answer.headers["content-type"] == "application/json"

    def test_a_full_queue_is_a_429_with_a_time_to_wait(self, tiny_bundle: Path) -> None:
        with ScriptedEngine(tiny_bundle, "x" * 200, max_sequences=1, max_queued=0, seconds_per_row=0.02) as engine:
            client = client_of(engine)
            with asyncio.Runner() as runner:
                running = Exchange(engine, CHAT, body_of(CHAT))
                runner.run(running.start())
                answer = client.post(CHAT, json=body_of(CHAT))
                assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
                assert int(answer.headers["retry-after"]) >= 1
                runner.run(running.leave())

    @pytest.mark.parametrize("is_stream", [True, False])
    def test_a_draining_server_is_a_503(self, client: TestClient, engine: ScriptedEngine, is_stream: bool) -> None:
        engine.drain(timeout_seconds=0)
        answer = client.post(CHAT, json=body_of(CHAT, stream=is_stream))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "retry-after" in answer.headers

    def test_a_time_limit_on_the_way_is_an_event(self, tiny_bundle: Path) -> None:
        with ScriptedEngine(tiny_bundle, "x" * 400, seconds_per_row=0.02) as engine:
            client = client_of(engine, request_timeout_seconds=0.3)
            chunks = events(client, CHAT)
            assert chunks[-1]["error"]["code"] == "request_timeout"
            assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
            answer = client.post(CHAT, json=body_of(CHAT, stream=False))
            assert (answer.status_code, answer.headers["x-should-retry"]) == (408, "false")

    @pytest.mark.parametrize("is_stream", [True, False])
    def test_a_failing_engine_tells_nothing_of_its_insides(self, tiny_bundle: Path, is_stream: bool) -> None:
        with ScriptedEngine(tiny_bundle, TEXT) as engine:
            client = client_of(engine)
            engine.fail_after(3)
            if is_stream:
                error = events(client, CHAT)[-1]["error"]
            else:
                answer = client.post(CHAT, json=body_of(CHAT, stream=False))
                assert answer.status_code == 500
                error = answer.json()["error"]
            assert error["type"] == "server_error"
            assert "fire" not in error["message"]


def test_two_clients_may_choose_one_request_id(tiny_bundle: Path) -> None:
    with ScriptedEngine(tiny_bundle, [50] * 2000, max_model_len=4096, seconds_per_row=0.002) as engine, asyncio.Runner() as runner:
        first = Exchange(engine, CHAT, body_of(CHAT), request_id="mine")
        runner.run(first.start())
        answer = client_of(engine).post(CHAT, json=body_of(CHAT, stream=False, max_tokens=2), headers={"x-request-id": "mine"})
        assert (answer.status_code, answer.headers["x-request-id"], answer.json()["id"]) == (200, "mine", "chatcmpl-mine")
        assert engine.snapshot().running == 1, "the first goes on"
        runner.run(first.leave())


def test_silence_is_filled_with_comments(tiny_bundle: Path) -> None:
    with ScriptedEngine(tiny_bundle, "Hi", seconds_per_row=0.05) as engine:
        answer = client_of(engine, keep_alive_seconds=0.01).post(CHAT, json=body_of(CHAT))
    pieces = answer.text.split("\n\n")
    assert pieces[0] == ": keep-alive"
    assert all(piece == ": keep-alive" or piece.startswith("data: ") for piece in pieces[:-1])
