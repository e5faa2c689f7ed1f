"""Server-sent events as OpenAI's clients read them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from domino_deploy.server.bridge import while_connected

DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": keep-alive\n\n"


def event(value: Mapping[str, Any]) -> str:
    """One event.  ASCII alone: some clients take U+2028 and its like, which JSON lets stand, for the end of a line."""
    return f"data: {json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(',', ':'))}\n\n"


class EventStream(Response):
    """Sends events as they come; stops asking for more when the client goes away, also while there is nothing to send.

    Args:
        events: what to send.
        close: called in the end, whether events were ever asked for or not.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except (ClientDisconnect, OSError):  # OSError: what servers may raise on sending to a client that is gone
            return
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._events:
            await send({"type": "http.response.body", "body": piece.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
