"""Requests at the edge of HTTP/1.1, by raw sockets: what is refused and how, and what has to be let through."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from tests.support.raw_client import BODY, GET, GET_WITH_BODY, POST, connected, error_of, one_answer, to_the_end

SHORT = 0.3
HOST = b"Host: localhost\r\n"
BAD_CHUNK = HOST + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n"


class TestRefusals:
    @pytest.mark.parametrize("target", [b"GET /v1/models", b"GET /nowhere", b"POST /tokenize", b"HEAD /v1/models"])
    def test_a_bad_chunk_behind_its_head_is_one_answer_and_one_line(
        self, tiny_bundle: Path, target: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        with connected(tiny_bundle) as client:
            client.sendall(target + b" HTTP/1.1\r\n" + BAD_CHUNK)
            answer = to_the_end(client)
        if target.startswith(b"HEAD"):
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert answer.endswith(b"\r\n\r\n")
        else:
            assert "illegal chunk header" in error_of(answer, 400)["message"]
        told = [record.message for record in caplog.records if record.levelno > logging.INFO or record.name.startswith("domino_deploy")]
        assert told == ["refused"]

    def test_a_bad_chunk_ends_a_request_that_waits_for_its_body(self, tiny_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        head, _, chunk = (b"POST /tokenize HTTP/1.1\r\n" + BAD_CHUNK).partition(b"\r\n\r\n")
        with connected(tiny_bundle) as client:
            client.sendall(head + b"\r\n\r\n")
            time.sleep(SHORT)
            client.sendall(chunk)
            error_of(to_the_end(client), 400)
        told = [record for record in caplog.records if record.name.startswith("domino_deploy")]
        assert sorted(record.message for record in told) == ["refused", "request"]
        assert not [record for record in caplog.records if record.levelno > logging.INFO]

    @pytest.mark.parametrize(
        ("head", "reason"),
        [
            (b"GET /version HTTP/1.1\r\n\r\n", "Missing mandatory Host"),
            (b"GET /version HTTP/1.1\r\n" + HOST + HOST + b"\r\n", "multiple Host"),
            (GET[:-2] + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", "conflicting Content-Length"),
            (GET[:-2] + b"no colon\r\n\r\n", "illegal header line"),
        ],
    )
    def test_the_reason_is_told_where_it_was_http(self, tiny_bundle: Path, head: bytes, reason: str) -> None:
        with connected(tiny_bundle) as client:
            client.sendall(head)
            message = error_of(to_the_end(client), 400)["message"]
        assert reason in message
        assert "TLS" not in message

    def test_a_long_reason_is_cut(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle) as client:
            client.sendall(GET[:-2] + b"n" * 5000 + b"\r\n\r\n")
            assert len(error_of(to_the_end(client), 400)["message"]) < 250


class TestTargetsThatNameTheHost:
    @pytest.mark.parametrize("target", [b"http://localhost/version", b"HTTP://localhost:80/version?a=b", b"http://localhost/%76ersion"])
    def test_they_are_the_path_alone(self, tiny_bundle: Path, target: bytes) -> None:
        with connected(tiny_bundle) as client:
            client.sendall(GET.replace(b"/version", target))
            answer = one_answer(client)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b'{"version":' in answer

    def test_without_a_path_they_are_the_root(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle) as client:
            client.sendall(GET[:-2].replace(b"/version", b"http://localhost") + b"Connection: close\r\n\r\n")
            answer = to_the_end(client)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"content-type: text/html" in answer

    def test_their_host_counts_in_place_of_the_headers(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle) as client:
            client.sendall(GET.replace(b"/version", b"http://elsewhere.example/version"))
            answer = one_answer(client)
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"elsewhere.example" in answer


class TestEmptyLines:
    @pytest.mark.parametrize("pieces", [[b"\r\n" + GET], [b"\r\n", GET], [b"\n\r\n\r", b"\n" + GET]])
    def test_before_a_request_they_are_nothing(self, tiny_bundle: Path, pieces: list[bytes]) -> None:
        with connected(tiny_bundle) as client:
            for piece in pieces:
                client.sendall(piece)
                time.sleep(0.05)
            assert one_answer(client).startswith(b"HTTP/1.1 200 ")

    @pytest.mark.parametrize("behind", [b"\r\n", b"\r\n" + GET])
    def test_so_they_are_behind_a_body(self, tiny_bundle: Path, behind: bytes) -> None:
        with connected(tiny_bundle) as client:
            client.sendall(POST + BODY + behind)
            answers = one_answer(client)
            client.sendall(b"" if GET in behind else GET)
            while answers.count(b"HTTP/1.1 ") < 2 or not answers.endswith(b"}"):
                answers += client.recv(4096)
        assert answers.count(b"HTTP/1.1 200 ") == 2

    def test_the_one_that_ends_a_head_stays(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle) as client:
            client.sendall(GET_WITH_BODY.replace(b"1000000", b"4"))
            assert one_answer(client).startswith(b"HTTP/1.1 200 ")
            client.sendall(b"body" + GET[:-4])
            time.sleep(SHORT)
            client.sendall(GET[-4:])
            assert one_answer(client).startswith(b"HTTP/1.1 200 ")

    def test_they_do_not_win_time(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle, head_seconds=SHORT) as client:
            client.sendall(b"\r\n")
            assert to_the_end(client) == b""


def test_the_beginning_of_a_head_behind_another_request_has_the_limit_of_heads(tiny_bundle: Path) -> None:
    with connected(tiny_bundle, head_seconds=SHORT) as client:
        client.sendall(GET + GET[:10])
        first, _, rest = to_the_end(client).partition(b"}")
    assert first.startswith(b"HTTP/1.1 200 ")
    error_of(rest, 408)


def test_who_asks_for_web_sockets_is_answered_without_a_word_to_the_log(tiny_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    with connected(tiny_bundle) as client:
        client.sendall(GET[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert one_answer(client).startswith(b"HTTP/1.1 200 ")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
