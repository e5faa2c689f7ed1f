"""Connections: uvicorn's, with an end for clients that neither send nor read, and refusals as OpenAI's clients read them.

What reaches the application is its own matter; here is what never becomes a request, and what is left of one that was answered.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from domino_deploy.server.errors import ApiError, error_response
from domino_deploy.server.logs import log_fields
from domino_deploy.server.middleware import REQUEST_ID_HEADER, SECURITY_HEADERS, new_request_id
from domino_deploy.server.request_parser import RequestParser, in_origin_form
from domino_deploy.server.settings import ServerSettings

_LOG = logging.getLogger(__name__)

_CLOSE_SECONDS = 5  # for connections whose client neither reads nor leaves, once the server ends
_IDLE_CONNECTION_SECONDS = 60  # longer than the pools of common clients keep theirs, so that they, not we, close first
_END_OF_HEAD = re.compile(rb"\n\r?\n")  # as h11 has it
_END_BYTES = 3  # of the longer form
_EMPTY_LINES = b"\r\n"
_UNSENT_BYTES = 64 * 2**10  # that the system keeps of an answer, beside what is on the way; its own limit is megabytes
_LOOKS_AT_READER = 4  # within `send_seconds`
_RESET = struct.pack("ii", 1, 0)  # no time for what was not sent
_NO_REQUEST = "illegal request line"  # h11's word for TLS and the like
_REASON_CHARACTERS = 120


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
            timeout_graceful_shutdown=2 * _CLOSE_SECONDS,  # uvicorn cancels then, with a traceback for each; connections end before
        )
        self.settings = settings


class _Awaited(Enum):
    """The part of a request that has to arrive in time."""

    NONE = auto()  # the server is at work, or the client rests between two requests, which uvicorn's own timer ends
    HEAD = auto()
    REST_OF_BODY = auto()  # of a request that was answered without it


# Of uvicorn's insides this relies on: the arguments of the constructor; `app`, `conn`, `cycle`, `transport`, `loop`,
# `timeout_keep_alive_task`, what unsets it, and `_unsupported_upgrade_warning`; that `data_received` and `on_response_complete` call
# `handle_events`, and that a cycle that is `disconnected` says no more.  A test names what is gone.
class Connection(H11Protocol):
    """A connection whose client has to send the head of a request in time, and the rest of a body that nobody reads, and to read answers.

    Bodies that are read have their limit where they are read (`read_body`).

    The length of a head is limited when its first bytes are looked at: as they come, or once the request before is answered, if they
    came while it ran (until then uvicorn stops reading).  A head behind the rest of a body that nobody reads, in the same packet, has
    h11's limit instead: the same one, but for heads that are incomplete only.

    While a byte waits for the client to read, the application waits; if none could be sent for `send_seconds`, the client counts as gone.
    It is looked at several times in these, so that they end at most one such part later.
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
        self._application, self.app = self.app, self._answer
        self.conn: RequestParser = self._new_conn()
        self._head_bytes: int | None = None  # that came of a head; None before its first bytes are looked at
        self._last_bytes = b""  # of these: where the end of the head may have begun
        self._awaited = _Awaited.NONE
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that every unsent byte is told by `pause_writing`
        opened = transport.get_extra_info("socket")
        if opened is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):  # or a slow reader of megabytes seems to read nothing
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_for(_Awaited.NONE)
        self._stop_send_timer()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.IDLE:
            data = self._without_empty_lines(data)
            if not data:
                return
            if self._has_long_head(data):
                self._refuse_head()
                return
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        if self.conn.their_state is h11.IDLE and self._head_bytes is None:
            self._skip_empty_lines()
            if self._has_long_head(b""):
                self._refuse_head()
                return
        super().handle_events()
        if self.conn.has_long_head:
            self._refuse_head()
        elif self.conn.problem is not None:
            self._refuse_request(self.conn.problem)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: the request is answered as if it had not asked, and uvicorn would advise to install something."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.cycle.disconnected:  # or refused, for what came behind its head
            await self._application(in_origin_form(scope), receive, send)

    def _new_conn(self) -> RequestParser:
        return RequestParser(h11.SERVER, self._settings.max_header_bytes)

    def _without_empty_lines(self, data: bytes) -> bytes:
        """Some clients send one before a request or behind a body (RFC 9112, 2.2)."""
        is_first = data[:1] in (b"\r", b"\n") and not self._head_bytes and not self.conn.trailing_data[0]
        return data.lstrip(_EMPTY_LINES) if is_first else data

    def _skip_empty_lines(self) -> None:
        """The same for what came before the last request was answered."""
        rest = self.conn.trailing_data[0]
        kept = rest.lstrip(_EMPTY_LINES)
        if kept != rest:
            self.conn = self._new_conn()  # h11 gives nothing back
            if kept:
                self.conn.receive_data(kept)

    def _await_reader(self, looks_in_vain: int = 0) -> None:
        seconds = self._settings.send_seconds / _LOOKS_AT_READER
        self._send_timer = self.loop.call_later(seconds, self._look_at_reader, self._unsent_bytes(), looks_in_vain)

    def _look_at_reader(self, unsent_before: int, looks_in_vain: int) -> None:
        unsent = self._unsent_bytes()
        looks_in_vain = 0 if unsent < unsent_before else looks_in_vain + 1
        if looks_in_vain < _LOOKS_AT_READER:
            self._await_reader(looks_in_vain)
            return
        seconds = self._settings.send_seconds
        log_fields(_LOG, logging.INFO, "dropped", {"client": "reads nothing", "seconds": seconds, "unsent_bytes": unsent})
        opened = self.transport.get_extra_info("socket")
        if opened is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)  # or the system would keep what it has for such a client
        self.transport.abort()

    def _unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _refuse_request(self, reason: str) -> None:
        if reason.startswith(_NO_REQUEST):
            message = "Expected a request of HTTP/1.1, found something else. Call this server by http://, without TLS."
        else:
            message = f"Expected a request as HTTP/1.1 has it, found something else: {reason[:_REASON_CHARACTERS]}. Correct what sends it."
        self._refuse(ApiError(400, message, code="invalid_http"))

    def _has_long_head(self, data: bytes) -> bool:
        # h11 has the same limit, but for what is incomplete only: one packet may bring a longer head at once.
        if self._head_bytes is None:
            self._head_bytes, self._last_bytes = 0, b""
            data = self.conn.trailing_data[0] + data  # what came with the end of the request before
        known = self._last_bytes + data
        end = _END_OF_HEAD.search(known)
        length = self._head_bytes - len(self._last_bytes) + (len(known) if end is None else end.end())
        self._head_bytes, self._last_bytes = self._head_bytes + len(data), known[-_END_BYTES + 1 :]
        return length > self._settings.max_header_bytes

    def _refuse_head(self) -> None:
        limit = self._settings.max_header_bytes
        message = f"Expected the head of a request to have at most {limit} bytes, found more. Send fewer or shorter headers."
        self._refuse(ApiError(431, message, code="head_too_large"))

    def _watch(self) -> None:
        """See what is awaited now; the time for it begins when it was not awaited before."""
        if self.conn.their_state is not h11.IDLE:
            self._head_bytes = None
        if self.transport.is_closing():
            self._wait_for(_Awaited.NONE)
        elif self.conn.their_state is h11.IDLE and (self.timeout_keep_alive_task is None or self._head_bytes):
            self._unset_keepalive_if_required()
            self._wait_for(_Awaited.HEAD)
        elif self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            self._wait_for(_Awaited.REST_OF_BODY)
        else:
            self._wait_for(_Awaited.NONE)

    def _wait_for(self, awaited: _Awaited) -> None:
        if awaited is self._awaited:
            return
        self._awaited = awaited
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if awaited is _Awaited.HEAD:
            self._timer = self.loop.call_later(self._settings.head_seconds, self._end_of_head_time)
        elif awaited is _Awaited.REST_OF_BODY:
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
        request_id = new_request_id()
        log_fields(_LOG, logging.INFO, "refused", {"request_id": request_id, "status": error.status, "error": error.label})
        running = None if self.cycle is None or self.cycle.response_complete else self.cycle
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error_response(error)
            answer.headers.update({**SECURITY_HEADERS, REQUEST_ID_HEADER: request_id, "connection": "close"})
            phrase = HTTPStatus(error.status).phrase.encode()
            head = h11.Response(status_code=error.status, headers=answer.raw_headers, reason=phrase)
            is_head = running is not None and running.scope["method"] == "HEAD"
            for event in (head, h11.Data(data=b"" if is_head else bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if running is not None:  # what it was answered, or would be, reaches nobody
            running.disconnected = True
            running.message_event.set()
        self.transport.close()
