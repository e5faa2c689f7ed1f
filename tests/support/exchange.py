"""A client without HTTP between it and the application: it sees every message, and leaves when it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Message

from domino_deploy.runtime.engine import Engine
from domino_deploy.server.app import create_app
from domino_deploy.server.settings import ServerSettings


class Exchange:
    """One request over bare ASGI: what the server sent so far, and a client that can go away."""

    def __init__(self, engine: Engine, path: str, body: Mapping[str, Any], request_id: str = "left", **settings: Any) -> None:
        self._app = create_app(engine, ServerSettings(served_model_names=("tiny",), **settings))
        self._path = path
        self._headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
        self._body = json.dumps(body).encode()
        self._has_left = asyncio.Event()
        self._is_read = False
        self.sent: list[Message] = []

    async def start(self) -> None:
        """Return once the answer goes on: with an event of a stream, or when the engine has the request."""
        self._task = asyncio.ensure_future(self._run())
        while not any(b"content" in message.get("body", b"") for message in self.sent):
            await asyncio.sleep(0.01)

    async def leave(self) -> None:
        self._has_left.set()
        await self._task

    async def _run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "headers": self._headers,
        }
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
