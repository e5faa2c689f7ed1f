"""Connections by raw sockets: clients that do not end their requests, and what is no request at all."""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
import time
from pathlib import Path
from unittest.mock import Mock, PropertyMock

import h11
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from domino_deploy.server.app import create_app
from domino_deploy.server.connections import Connection, ServerConfig
from domino_deploy.server.settings import ServerSettings
from tests.support.idle_engine import IdleEngine
from tests.support.raw_client import BODY, GET, GET_WITH_BODY, PATIENCE, POST, connected, error_of, one_answer, to_the_end

SHORT = 0.3  # seconds that a client gets here


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


def written_by(bundle: Path, sent: bytes, size: int) -> bytes:
    """What a connection with a limit of 1500 bytes for heads writes at once, without an application, to `sent` in pieces of `size`."""

    async def fed() -> bytes:
        settings = ServerSettings(max_header_bytes=1500)
        transport = Mock(asyncio.Transport)
        transport.is_closing.return_value = False
        transport.get_extra_info.return_value = None
        connection = Connection(ServerConfig(create_app(IdleEngine(bundle), settings), settings), ServerState(), {})  # type: ignore[arg-type]
        connection.connection_made(transport)
        for start in range(0, len(sent), size):
            connection.data_received(sent[start : start + size])
            if transport.close.called:
                break
        written = b"".join(call.args[0] for call in transport.write.call_args_list)
        connection.connection_lost(None)
        await asyncio.gather(*connection.tasks)
        return written

    return asyncio.run(fed())


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
            client.sendall(head + b"a" * (1500 - len(head) - 4) + b"\r\n\r\n")
            assert one_answer(client).startswith(b"HTTP/1.1 200 ")

    @pytest.mark.parametrize("size", [1, 2, 3, 7, 5000])
    @pytest.mark.parametrize("end", [b"\r\n\r\n", b"\n\n"])
    def test_the_limit_is_the_same_to_the_byte_in_pieces_of_any_size(self, tiny_bundle: Path, size: int, end: bytes) -> None:
        head = end[: len(end) // 2].join([b"GET /version HTTP/1.1", b"Host: localhost", b"X-Long: "])
        for length, is_refused in ((1500, False), (1501, True)):
            sent = head + b"a" * (length - len(head) - len(end)) + end
            assert (b"431" in written_by(tiny_bundle, sent, size)) == is_refused, length

    def test_the_bytes_of_a_head_are_not_copied_again_for_each_that_follows(
        self, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = PropertyMock(return_value=(b"", False))
        monkeypatch.setattr(h11.Connection, "trailing_data", looks)
        assert b"431" in written_by(tiny_bundle, b"GET /version HTTP/1.1\r\nX-Long: " + b"a" * 1500, 1)
        assert looks.call_count == 1

    def test_a_long_head_that_comes_before_the_answer_to_another_request_is_refused_after_it(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle, max_header_bytes=1500) as client:
            client.sendall(GET + GET[:-2] + b"X-Long: " + b"a" * 2000 + b"\r\n\r\n" + GET)
            first, _, rest = to_the_end(client).partition(b"}")
        assert first.startswith(b"HTTP/1.1 200 ")
        error_of(rest, 431)

    def test_a_long_head_behind_the_rest_of_a_body_that_nobody_reads_is_refused(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle, max_header_bytes=1500) as client:
            client.sendall(GET_WITH_BODY.replace(b"1000000", b"4"))
            assert one_answer(client).startswith(b"HTTP/1.1 200 ")
            client.sendall(b"body" + GET[:-2] + b"X-Long: " + b"a" * 2000)
            error = error_of(to_the_end(client), 431)
        assert error["code"] == "head_too_large"
        assert "1500 bytes" in error["message"]

    def test_a_long_line_of_a_chunked_body_is_no_long_head(self, tiny_bundle: Path) -> None:
        with connected(tiny_bundle, max_header_bytes=1500) as client:
            client.sendall(POST.replace(b"Content-Length: 15", b"Transfer-Encoding: chunked") + b"1;" + b"a" * 2000)
            assert error_of(to_the_end(client), 400)["code"] == "invalid_http"

    def test_heads_before_the_answer_to_another_request_are_measured_one_by_one(self, tiny_bundle: Path) -> None:
        long = GET[:-2] + b"X-Long: " + b"a" * 500 + b"\r\n\r\n"
        with connected(tiny_bundle, max_header_bytes=1024) as client:
            client.sendall(3 * long + long[:-4])
            answers = b""
            while answers.count(b"}") < 3:
                answers += client.recv(4096)
            assert answers.count(b"HTTP/1.1 200 ") == 3
            client.sendall(long[-4:])
            assert one_answer(client).startswith(b"HTTP/1.1 200 ")

    def test_the_log_has_a_refusal_under_the_id_of_its_answer(self, tiny_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "domino_deploy"), connected(tiny_bundle) as client:
            client.sendall(b"hello\r\n\r\n")
            answer = to_the_end(client)
        (fields,) = (record.domino_fields for record in caplog.records if record.message == "refused")  # type: ignore[attr-defined]
        assert (fields["status"], fields["error"]) == (400, "invalid_http")
        assert f"x-request-id: {fields['request_id']}\r\n".encode() in answer

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


def test_uvicorn_still_has_the_insides_that_connections_rely_on() -> None:
    advice = f"uvicorn {uvicorn.__version__}: see Connection in server/connections.py, and the bound on uvicorn in pyproject.toml"
    assert list(inspect.signature(H11Protocol.__init__).parameters) == ["self", "config", "server_state", "app_state", "_loop"], advice
    for method in ("data_received", "on_response_complete"):
        assert "self.handle_events()" in inspect.getsource(getattr(H11Protocol, method)), f"{method} of {advice}"
    assert "self.timeout_keep_alive_task = " in inspect.getsource(H11Protocol.on_response_complete), f"on_response_complete of {advice}"
    assert {"app", "conn", "cycle", "transport", "loop"} <= set(H11Protocol.__init__.__code__.co_names), f"attributes of {advice}"
    for method in ("_unset_keepalive_if_required", "_unsupported_upgrade_warning", "pause_writing", "resume_writing", "shutdown"):
        assert callable(getattr(H11Protocol, method, None)), f"{method} of {advice}"
    assert "if self.disconnected:\n            return" in inspect.getsource(RequestResponseCycle.send), f"send of {advice}"
