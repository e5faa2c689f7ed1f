"""One request of `domino_deploy.bench.client` at a time: what is read and timed, and what servers and addresses do wrong."""

from __future__ import annotations

import json
import threading
import time
from collections import deque

import pytest
from starlette.responses import JSONResponse, Response

from domino_deploy.bench import chunks, load
from domino_deploy.bench.client import Answer, AnswerLeft, Client
from domino_deploy.bench.event_stream import EventReader
from domino_deploy.errors import MeasurementError, RequestError
from tests.support.endless_server import endless
from tests.support.scripted_server import USAGE, Script, ScriptedServer, answer, chunk

# What cannot be looked up, or not be sent.
UNUSABLE = ("http://a..b", f"http://{'a' * 70}", "http://h/ä", "http://a b", "http://h/a b", "http://[x", "http://h:0")


def one(*stream: str | bytes | float, timeout_seconds: float = 60.0) -> Answer:
    with ScriptedServer(list(stream)).url() as url:
        return Client(url, timeout_seconds=timeout_seconds).stream(load.CHAT_PATH, {})


class TestEvents:
    CASES = (
        ("data: a\n\ndata: b\n\n", ["a", "b"]),
        ("data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
        ("data: a\r\rdata: b\r\r", ["a"]),  # the last carriage return may be half of a line end
        ("data: a\ndata: b\ndata\ndata:c\n\n", ["a\nb\n\nc"]),
        (": comment\n\n: another\ndata: a\n: within\n\n", ["a"]),
        ("event: x\nid: 7\nretry: 1\n\ndata:  two spaces\n\n", [" two spaces"]),
        ("\ufeffdata: schön 🦆\n\n", ["schön 🦆"]),
        ("data: cut off\n", []),
    )

    @pytest.mark.parametrize(("text", "expected"), CASES)
    @pytest.mark.parametrize("size", [1, 2, 3, 1000])
    def test_events_are_the_same_wherever_the_pieces_end(self, text: str, expected: list[str], size: int) -> None:
        reader, content = EventReader(), text.encode()
        pieces = [content[start : start + size] for start in range(0, len(content), size)]
        assert [event for piece in pieces for event in reader.feed(piece)] == expected

    def test_data_that_is_no_utf8_is_an_error(self) -> None:
        with pytest.raises(UnicodeDecodeError):
            list(EventReader().feed(b"data: \xff\n\n"))

    @pytest.mark.parametrize("piece", [b"data: " + b"x" * 2**16, b"data: x\n" * 2**13], ids=["one line", "lines"])
    def test_an_event_without_an_end_is_an_error(self, piece: bytes) -> None:
        reader = EventReader()
        fed = (list(reader.feed(piece)) for _ in range(100))
        with pytest.raises(ValueError, match="an event of more than"):
            deque(fed)

    def test_events_are_bounded_one_by_one(self) -> None:
        reader, event = EventReader(), b"data: " + b"x" * 2**20 + b"\n\n"
        assert sum(len(list(reader.feed(event))) for _ in range(10)) == 10


class TestOneRequest:
    def test_text_usage_and_times_are_read(self) -> None:
        found = one(": ping\n\n", chunk(""), 0.2, chunk("Hel"), 0.1, chunk("lo"), 0.1, chunk(None, usage=USAGE), "data: [DONE]\n\n")
        assert (found.error, found.text) == (None, "Hello")
        assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (7, 3, 5)
        # Bounds from below alone are certain: a busy machine only adds.
        assert found.first_text_ms is not None
        assert found.first_text_ms >= 200
        assert len(found.chunk_gaps_ms) == 1
        assert found.token_ms == pytest.approx(found.chunk_gaps_ms[0] / 4)
        assert found.total_ms >= max(400, found.first_text_ms + found.chunk_gaps_ms[0])

    def test_thoughts_arguments_of_calls_and_completions_are_text(self) -> None:
        call = {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{}"}}]}}]}
        thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
        completion = {"choices": [{"text": "!", "finish_reason": None}]}
        found = one(*(f"data: {json.dumps(piece)}\n\n" for piece in (thought, call, completion)), "data: [DONE]\n\n")
        assert found.text == "hm{}!"

    def test_a_server_without_usage_leaves_token_figures_unmeasured(self) -> None:
        found = one(chunk("a"), chunk("b"), "data: [DONE]\n\n")
        assert (found.error, found.completion_tokens, found.token_ms) == (None, None, None)
        assert found.first_text_ms is not None

    @pytest.mark.parametrize(
        ("stream", "error", "text"),
        [
            ([chunk("half")], "broken_stream", "half"),
            ([chunk("half"), 'data: {"error": {"message": "x"}}\n\n'], "error_in_stream", "half"),
            ([chunk("half"), "data: {no json\n\n"], "bad_chunk", "half"),
            (["data: [1]\n\n"], "bad_chunk", ""),
            ([b"data: \xff\n\n"], "bad_chunk", ""),
            ([chunk("half"), "data: " + "[" * 100_000 + "\n\n"], "bad_chunk", "half"),
            ([chunk("half"), chunk(None, usage=[1])], "bad_chunk", "half"),
            ([chunk("half"), chunk(None, usage={"prompt_tokens_details": [1]})], "bad_chunk", "half"),
            (["data: [DONE]\n\n"], "no_answer", ""),
            ([chunk(None, usage=USAGE), "data: [DONE]\n\n"], "no_answer", ""),
        ],
    )
    def test_a_stream_that_fails_says_how(self, stream: list[str | bytes | float], error: str, text: str) -> None:
        found = one(*stream)
        assert (found.error, found.text) == (error, text)

    @pytest.mark.parametrize("count", ["x", -5, 2.5, True, 10**400], ids=lambda count: f"{count!r:.8}")
    @pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens", "cached_tokens"])
    def test_numbers_of_tokens_that_are_none_are_a_bad_chunk(self, name: str, count: object) -> None:
        usage = {"prompt_tokens_details": {name: count}} if name == "cached_tokens" else {name: count}
        assert one(chunk("a"), chunk(None, usage=usage), "data: [DONE]\n\n").error == "bad_chunk"

    def test_an_answer_that_is_empty_is_an_answer(self) -> None:
        assert one(chunk(""), "data: [DONE]\n\n").error is None

    @pytest.mark.parametrize(
        "script",
        [JSONResponse({"error": {"message": "full"}}, status_code=429), [chunk("half"), 'data: {"error": {"message": "full"}}\n\n']],
        ids=["refused", "in the stream"],
    )
    def test_what_the_server_says_to_a_failure_is_kept(self, script: Script) -> None:
        with ScriptedServer(script).url() as url:
            assert Client(url).stream(load.CHAT_PATH, {}).message == "full"

    def test_silence_is_a_timeout(self) -> None:
        assert one(chunk("a"), 1.5, chunk("b"), timeout_seconds=0.3).error == "timeout"

    @pytest.mark.parametrize(
        ("response", "error"),
        [
            (JSONResponse({"error": {}}, status_code=429, headers={"Retry-After": "1"}), "http_429"),
            (JSONResponse({}, status_code=500), "http_500"),
            (JSONResponse({"choices": []}), "no_event_stream"),
        ],
    )
    def test_a_refused_request_says_its_status(self, response: Response, error: str) -> None:
        with ScriptedServer(response).url() as url:
            assert Client(url).stream(load.CHAT_PATH, {}).error == error

    def test_no_server_is_a_refused_connection(self) -> None:
        with ScriptedServer(answer("a")).url() as url:
            gone = url
        client = Client(gone, timeout_seconds=5)
        assert client.stream(load.CHAT_PATH, {}).error == "connection_refused"
        assert client.metrics() is None

    @pytest.mark.parametrize("endpoint", ["/chat/completions", "/completions", "/models", "/responses/"])
    def test_an_endpoint_is_refused_where_the_base_url_is_wanted(self, endpoint: str) -> None:
        with pytest.raises(RequestError, match=r"Expected the base URL .* Give --url http://x:1/v1\.$"):
            Client("http://x:1/v1" + endpoint)

    @pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:port", "http://x/?a=b", *UNUSABLE])
    def test_an_address_that_is_none_is_refused(self, url: str) -> None:
        with pytest.raises(RequestError, match="Expected the address of a server"):
            Client(url)

    @pytest.mark.parametrize(
        "url", ["http://user:secret@x:1", "user:secret@x", "ftp://secret@x", "http://user:1/secret@x", "http://:secret@a..b/v1/models"]
    )
    def test_a_password_in_an_address_is_refused_and_not_shown(self, url: str) -> None:
        with pytest.raises(RequestError, match="Expected an address without a name and a password, found an @") as refused:
            Client(url)
        assert "secret" not in str(refused.value)

    def test_a_name_with_other_letters_is_an_address(self) -> None:
        Client("http://bücher.example/v1")


class TestEndlessServers:
    """Raw sockets: what no framework for servers does."""

    HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n"

    @pytest.mark.parametrize("first", [HEAD, b"HTTP/1.1 200 OK\r\nX-Slow: "], ids=["body", "head"])
    def test_bytes_one_by_one_are_a_timeout_all_the_same(self, first: bytes) -> None:
        with endless(first, b" ", pause_seconds=0.05) as url:
            client = Client(url, timeout_seconds=0.5)
            with pytest.raises(MeasurementError, match="found no answer, or no more of one, within --timeout"):
                client.first_model()
            assert client.metrics() is None

    def test_an_answer_without_an_end_is_not_read_to_it(self) -> None:
        with endless(self.HEAD, b"[ " * 2**15) as url:
            client = Client(url, timeout_seconds=60)
            with pytest.raises(MeasurementError, match=r"found an answer without an end, .* Correct --url or --model\.$"):
                client.first_model()
            assert client.metrics() is None

    @pytest.mark.parametrize("again", [chunk("a").encode(), b": comment\n\n"], ids=["text", "comments"])
    def test_a_stream_without_an_end_is_not_read_to_it(self, again: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunks, "MOST_BYTES", 2**16)
        with endless(self.HEAD.replace(b"text/plain", b"text/event-stream") + chunk("first").encode(), 100 * again) as url:
            found = Client(url, timeout_seconds=60).stream(load.CHAT_PATH, {})
        assert found.error == "long_answer"
        assert found.text.startswith("first")

    def test_an_answer_that_is_not_wanted_any_more_is_left_with_its_next_piece(self) -> None:
        leave = threading.Event()
        with ScriptedServer([chunk("a"), *[0.05, chunk("b")] * 400]).url() as url:
            threading.Timer(0.2, leave.set).start()
            started = time.monotonic()
            with pytest.raises(AnswerLeft):
                Client(url).stream(load.CHAT_PATH, {}, leave=leave)
            assert time.monotonic() - started < 10
        with ScriptedServer(["".join(map(str, answer("a")))]).url() as url:
            assert Client(url).stream(load.CHAT_PATH, {}, leave=leave).text == "a", "an answer that is complete is returned all the same"

    def test_a_refusal_without_an_end_is_its_status(self) -> None:
        with endless(b"HTTP/1.1 500 Oh\r\n\r\n", b" ", pause_seconds=0.05) as url:
            assert Client(url, timeout_seconds=0.5).stream(load.CHAT_PATH, {}).error == "http_500"

    def test_a_list_that_breaks_off_is_a_connection_that_ended(self) -> None:
        with endless(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n[", b"") as url, pytest.raises(MeasurementError, match="ended before"):
            Client(url, timeout_seconds=60).first_model()
