"""Clients that send a request and do not read its answer, by raw sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.server import ServerState

from domino_deploy.server import connections
from domino_deploy.server.app import create_app
from domino_deploy.server.connections import Connection, ServerConfig
from domino_deploy.server.settings import ServerSettings
from tests.support.fake_engine import ScriptedEngine
from tests.support.loopback import served
from tests.support.raw_client import LONG, PATIENCE

SHORT = 0.3  # seconds that a client gets here
ANSWER_BYTES = 2 * 2**20
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST_GET = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def large_app() -> Starlette:
    return Starlette(routes=[Route("/", lambda _: Response(bytes(ANSWER_BYTES)))])


@contextmanager
def slow_reader(url: str) -> Iterator[socket.socket]:
    """A connection whose client's system takes little that the client does not read."""
    address = urlsplit(url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE)
        client.connect((address.hostname, address.port))
        yield client


def until_gone(url: str, sent: bytes) -> None:
    """Send, read nothing, and wait until the server has dropped the connection."""
    with slow_reader(url) as client:
        client.sendall(sent)
        deadline = time.monotonic() + PATIENCE
        # What the system had taken before is thrown away with the connection.
        while client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            assert time.monotonic() < deadline, "the server holds the connection"
            time.sleep(0.01)


@pytest.mark.parametrize("sent", [GET, LAST_GET, 50 * GET], ids=["kept", "closing", "pipelined"])
def test_a_client_that_reads_nothing_is_dropped(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = ServerConfig(large_app(), ServerSettings(send_seconds=SHORT))
    with served(large_app(), config=config) as url:
        until_gone(url, sent)
    told = [record for record in caplog.records if record.name.startswith("domino_deploy") or record.levelno > logging.INFO]
    (fields,) = (record.domino_fields for record in told)  # type: ignore[attr-defined]
    assert fields["client"] == "reads nothing"
    assert 0 < fields["unsent_bytes"] <= ANSWER_BYTES


def test_one_that_reads_slowly_gets_all() -> None:
    seconds, piece = 1.0, 2**16
    with served(large_app(), config=ServerConfig(large_app(), ServerSettings(send_seconds=seconds))) as url, slow_reader(url) as client:
        client.sendall(LAST_GET)
        started, received = time.monotonic(), b""
        while part := client.recv(piece):
            received += part
            time.sleep(3 * seconds * len(part) / ANSWER_BYTES)
    assert len(received.partition(b"\r\n\r\n")[2]) == ANSWER_BYTES
    assert time.monotonic() - started > 2 * seconds


class ManualLoop:
    """Of an event loop the timers, which run as soon as they are waited for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, Callable[..., None], tuple[object, ...]]] = []

    def call_later(self, seconds: float, call: Callable[..., None], *arguments: object) -> Mock:
        self._timers.append((self.now + seconds, call, arguments))
        return Mock()

    def run_next(self) -> None:
        timer = min(self._timers, key=lambda timer: timer[0])
        self._timers.remove(timer)
        self.now, call, arguments = timer
        call(*arguments)


@pytest.mark.parametrize(
    ("last_read", "dropped"), [(0.0, 60.0), (1.0, 75.0), (44.0, 105.0)], ids=["at once", "after the first byte", "later"]
)
def test_one_that_stops_reading_is_dropped_soon_after_its_time(last_read: float, dropped: float) -> None:
    loop, transport = ManualLoop(), Mock(asyncio.Transport)
    transport.get_extra_info.return_value = None  # no socket, as behind some transports
    transport.get_write_buffer_size.side_effect = lambda: 1000 - int(min(loop.now, last_read))
    settings = ServerSettings(head_seconds=LONG, send_seconds=60)
    config = ServerConfig(large_app(), settings)
    connection = Connection(config, ServerState(), {}, loop)  # type: ignore[arg-type]
    connection.connection_made(transport)
    connection.pause_writing()
    while not transport.abort.called:
        loop.run_next()
    assert loop.now == dropped


def test_the_request_of_a_stream_that_nobody_reads_is_cancelled(tiny_bundle: Path) -> None:
    settings = ServerSettings(send_seconds=SHORT, served_model_names=("tiny",))
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 3000, "stream": true, "temperature": 0, "logprobs": 20}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    with ScriptedEngine(tiny_bundle, [50] * 3000, max_model_len=4096, seconds_per_row=0.002) as engine:
        app = create_app(engine, settings)
        with served(app, config=ServerConfig(app, settings)) as url:
            until_gone(url, head + body)
            assert engine.witness.ended.wait(PATIENCE)
        ((_, reason, statistics),) = engine.witness.ends
        assert reason == "abort"
        assert 0 < statistics.generated_tokens < 3000


def test_a_server_that_ends_does_not_wait_for_it_and_logs_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "_CLOSE_SECONDS", 1)
    config = ServerConfig(large_app(), ServerSettings(send_seconds=LONG))
    config.host, config.port = "127.0.0.1", 0
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    with slow_reader(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}") as client:
        client.sendall(2 * GET)  # the second one's answer waits for the first one's bytes
        while server.server_state.total_requests == 0 or not server.server_state.tasks:
            time.sleep(0.01)
        server.should_exit = True
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
