"""A client of the server that sends bytes as they are, and reads them."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from domino_deploy.server.app import create_app
from domino_deploy.server.connections import ServerConfig
from domino_deploy.server.middleware import SECURITY_HEADERS
from domino_deploy.server.settings import ServerSettings
from tests.support.idle_engine import IdleEngine
from tests.support.loopback import served

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


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head.lower()
    assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}\r\n", head + b"\r\n"), head
    assert all(f"{name}: {value}".encode() in head for name, value in SECURITY_HEADERS.items()), head
    error: dict[str, Any] = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].startswith("Expected ")
    assert ", found " in error["message"]
    return error
