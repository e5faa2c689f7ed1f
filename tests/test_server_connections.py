"""Connections by raw sockets: clients that do not end their requests, and what is no request at all."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from domino_deploy.server.app import create_app
from domino_deploy.server.connections import ServerConfig
from domino_deploy.server.settings import ServerSettings
from tests.support.idle_engine import IdleEngine
from tests.support.loopback import served

SHORT = 0.3  # seconds that a client gets here
LONG = 600.0  # far more than a test takes
PATIENCE = 60.0
POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n"
BODY = b'{"prompt": "a"}'
GET_WITH_BODY = b"GET /version HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def connected(bundle: Path, **settings: Any) -> Iterator[socket.socket]:
    """A connection to a server that is set up as `serve` does it."""
    chosen = ServerSettings(**{"head_seconds": LONG, "body_seconds": LONG, **settings})
    app = create_app(IdleEngine(bundle), chosen)  # type: ignore[arg-type]
    with served(app, config=ServerConfig(app, chosen)) as url:
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as client:
            yield client


def to_the_end(client: socket.socket) -> bytes:
    """All that comes until the server closes."""
    return b"".join(iter(lambda: client.recv(4096), b""))


def one_answer(client: socket.socket) -> bytes:
    """An answer of which the connection goes on."""
    found = b""
    while not found.endswith(b"}"):
        found += client.recv(4096)
    return found


def dribbled(client: socket.socket, piece: bytes) -> bytes:
    """What the server says to a client that sends `piece` again and again, until the server closes."""
    client.settimeout(SHORT / 10)
    found, deadline = b"", time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            client.sendall(piece)
            received = client.recv(4096)
        except TimeoutError:
            continue
        except ConnectionError:
            return found
        if not received:
            return found
        found += received
    raise AssertionError("the server does not close")


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].startswith("Expected ")
    assert ", found " in error["message"]
    return error


class TestHeads:
    def test_a_head_that_comes_byte_by_byte_has_a_limit(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle, head_seconds=SHORT) as client:
            client.sendall(b"GET /version HTTP/1.1\r\nX-Slow: ")
            error = error_of(dribbled(client, b"a"), 408)
        assert error["code"] == "request_timeout"
        assert f"{SHORT:g} s" in error["message"]

    def test_so_has_one_that_stops(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle, head_seconds=SHORT) as client:
            client.sendall(b"GET /version HT")
            error_of(to_the_end(client), 408)

    def test_a_connection_without_a_byte_is_closed_without_a_word(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle, head_seconds=SHORT) as client:
            assert to_the_end(client) == b""

    def test_the_next_head_on_a_connection_has_the_same_limit(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle, head_seconds=SHORT) as client:
            client.sendall(GET)
            assert one_answer(client).startswith(b"HTTP/1.1 200 ")
            error_of(dribbled(client, b"a"), 408)

    def test_between_requests_a_client_may_rest_for_longer(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle, head_seconds=SHORT) as client:
            for _ in range(2):
                client.sendall(GET)
                assert one_answer(client).startswith(b"HTTP/1.1 200 ")
                time.sleep(2 * SHORT)

    def test_the_limit_ends_with_the_head(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle, head_seconds=SHORT) as client:
            client.sendall(POST)
            time.sleep(2 * SHORT)
            client.sendall(BODY)
            assert one_answer(client).startswith(b"HTTP/1.1 200 ")

    @pytest.mark.parametrize("pieces", [1, 50])
    def test_a_long_head_is_refused_however_it_comes(self, tiny_bundle: Path, pieces: int) -> None:
        head = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 2000 + b"\r\n\r\n"
        size = -(-len(head) // pieces)
        with connected(tiny_bundle, max_header_bytes=1500) as client:
            for start in range(0, len(head), size):
                try:
                    client.sendall(head[start : start + size])
                except ConnectionError:
                    break
                time.sleep(0.001)
            error = error_of(client.recv(4096), 431)
        assert "1500 bytes" in error["message"]

    def test_one_of_just_the_limit_passes(self, tiny_bundle: Path) -> None:
        head = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX-Long: "
        with connected(tiny_bundle, max_header_bytes=1500) as client:
            client.sendall(head + b"a" * (1500 - len(head) - 2) + b"\r\n\r\n")
            assert one_answer(client).startswith(b"HTTP/1.1 200 ")

    @pytest.mark.parametrize("what", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"hello\r\n\r\n"], ids=["TLS", "words"])
    def test_what_is_no_request_is_refused(self, tiny_bundle: Path, what: bytes) -> None:
        with connected(tiny_bundle) as client:
            client.sendall(what)
            assert "http://" in error_of(to_the_end(client), 400)["message"]


class TestBodies:
    def test_a_body_that_comes_byte_by_byte_has_a_limit(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle, body_seconds=SHORT) as client:
            client.sendall(POST.replace(b"15", b"100000"))
            error = error_of(dribbled(client, b" "), 408)
        assert error["code"] == "request_timeout"
        assert f"{SHORT:g} s" in error["message"]

    @pytest.mark.parametrize("head", [GET_WITH_BODY, POST.replace(b"/tokenize", b"/nowhere").replace(b"15", b"100000")], ids=["get", "404"])
    def test_so_has_one_that_nobody_reads(self, tiny_bundle: Path, head: bytes) -> None:
        with connected(tiny_bundle, body_seconds=SHORT) as client:
            client.sendall(head)
            answer = one_answer(client)
            assert answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 404 "))
            assert dribbled(client, b" ") == b""

    def test_one_that_nobody_reads_may_still_come_in_time(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle) as client:
            client.sendall(GET_WITH_BODY.replace(b"1000000", b"4"))
            assert one_answer(client).startswith(b"HTTP/1.1 200 ")
            client.sendall(b"body" + GET)
            assert one_answer(client).startswith(b"HTTP/1.1 200 ")

    def test_a_broken_rest_of_a_body_that_nobody_reads_closes(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle) as client:
            client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            assert one_answer(client).startswith(b"HTTP/1.1 200 ")
            client.sendall(b"no length\r\n")
            assert to_the_end(client) == b""
