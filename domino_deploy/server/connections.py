"""Connections: uvicorn's, with an end for clients that do not end their requests, and refusals as OpenAI's clients read them.

What reaches the application is its own matter; here is what never becomes a request, and what is left of one that was answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from domino_deploy.server.errors import ApiError, error_body
from domino_deploy.server.settings import ServerSettings

_LOG = logging.getLogger(__name__)

_CLOSE_SECONDS = 5  # for connections whose client neither reads nor leaves
_IDLE_CONNECTION_SECONDS = 60  # longer than the pools of common clients keep theirs, so that they, not we, close first
_END_OF_HEAD = re.compile(rb"\n\r?\n")  # as h11 has it


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration of this server.

    Args:
        app: made by `create_app`.
        settings: of the same server; `Connection` reads those that uvicorn has no name for.
    """

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        super().__init__(
            app,
            http=Connection,
            h11_max_incomplete_event_size=settings.max_header_bytes,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_CONNECTION_SECONDS,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
        )
        self.settings = settings


class _Waiting(Enum):
    """What a connection waits for."""

    NOTHING = auto()  # of the client's, or only for its next request, for which uvicorn has a limit of its own
    HEAD = auto()
    REST = auto()  # of the body of a request that was answered without it


class Connection(H11Protocol):
    """A connection whose client has to send the head of a request in time, and the rest of a body that nobody reads.

    Bodies that are read have their limit where they are read (`read_body`).
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, ServerConfig)
        self._settings = config.settings
        self._waiting = _Waiting.NOTHING
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_for(_Waiting.NOTHING)

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE and self._has_long_head(data):
            limit = self._settings.max_header_bytes
            message = f"Expected the head of a request to have at most {limit} bytes, found more. Send fewer or shorter headers."
            self._refuse(ApiError(431, message, code="head_too_large"))
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request; `msg` is uvicorn's word for all of it."""
        message = "Expected a request of HTTP/1.1, found something else. Call this server by http://, without TLS."
        self._refuse(ApiError(400, message, code="invalid_http"))

    def _has_long_head(self, data: bytes) -> bool:
        # h11 has the same limit, but for what is incomplete only: one packet may bring a longer head at once.
        head = self.conn.trailing_data[0] + data
        end = _END_OF_HEAD.search(head)
        return (len(head) if end is None else end.start()) > self._settings.max_header_bytes

    def _watch(self) -> None:
        """See what the connection waits for now; the time for it begins when it begins to."""
        if self.transport.is_closing():
            self._wait_for(_Waiting.NOTHING)
        elif self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._wait_for(_Waiting.HEAD)
        elif self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            self._wait_for(_Waiting.REST)
        else:
            self._wait_for(_Waiting.NOTHING)

    def _wait_for(self, waiting: _Waiting) -> None:
        if waiting is self._waiting:
            return
        self._waiting = waiting
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if waiting is _Waiting.HEAD:
            self._timer = self.loop.call_later(self._settings.head_seconds, self._end_of_head_time)
        elif waiting is _Waiting.REST:
            self._timer = self.loop.call_later(self._settings.body_seconds, self.transport.close)

    def _end_of_head_time(self) -> None:
        if not self.conn.trailing_data[0]:
            self.transport.close()  # browsers open connections that they then do not need
            return
        seconds = self._settings.head_seconds
        self._refuse(
            ApiError(
                408,
                f"Expected the whole head of a request within {seconds:g} s, found a part of it. Send the request again.",
                code="request_timeout",
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """Answer, if there is an answer to come, and close."""
        _LOG.info("Refused a connection with %d: %s", error.status, error.message)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error_body(error)).encode()
            headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
            response = h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase.encode())
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
