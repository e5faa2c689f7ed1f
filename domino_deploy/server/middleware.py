"""What happens around every request: id and log line, names of the server, API keys, size limit, security headers.

Plain ASGI, because Starlette's `BaseHTTPMiddleware` hides disconnects and buffers streams.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from domino_deploy.server.errors import ApiError, api_error, error_response
from domino_deploy.server.logs import RequestRecord, log_request

_LOG = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
# What others' tools make of an id without a second thought: file names, URLs, log queries.
_REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")

# The name in a Host header, with or without a port; IPv6 addresses stand in brackets.
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")
_SHOWN_CHARACTERS = 80

SECURITY_HEADERS = {
    # Scripts and styles are files of ours, requests go to this server, and nothing else is loaded or may embed the page.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class RequestContext:
    """Gives a request its id and its record, echoes the id, answers what nobody foresaw with 500, and writes the log line."""

    def __init__(self, app: ASGIApp, *, logs_prompts: bool = False) -> None:
        self._app = app
        self._logs_prompts = logs_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(request_id=_request_id(Headers(scope=scope)), method=scope["method"], path=scope["path"])
        scope.setdefault("state", {})["record"] = record
        is_complete = False

        async def sending(message: Message) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = record.request_id
            is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        async def receiving() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not is_complete:
                record.is_disconnected = True
            return message

        try:
            await self._app(scope, receiving, sending)
        except ClientDisconnect:
            record.is_disconnected = True
        except Exception as error:
            _LOG.exception("Request %s failed", record.request_id)
            if record.status is not None:  # part of the answer is out: the broken connection has to say it
                raise
            await error_response(api_error(error))(scope, receiving, sending)
        finally:
            record.seconds = time.monotonic() - record.arrived
            log_request(record, with_texts=self._logs_prompts)


class SecurityHeaders:
    """Adds the headers that keep a browser from doing more with an answer than it should; a route's own ones stay."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, sending if scope["type"] == "http" else send)


class KnownHosts:
    """Lets a request through that calls the server by a name of its own, or goes to an open path (`ServerSettings.known_hosts`).

    Args:
        app: what is guarded.
        names: in lower case, IPv6 in brackets.
        is_open: whether a path may be asked for by any name.
    """

    def __init__(self, app: ASGIApp, *, names: Sequence[str], is_open: Callable[[str], bool]) -> None:
        self._app = app
        self._names = names
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if scope["type"] != "http" or self._is_open(scope["path"]) or self._is_known(given):
            await self._app(scope, receive, send)
            return
        found = ascii(given[:_SHOWN_CHARACTERS]) if given else "none"
        error = ApiError(
            403,
            f"Expected a name of this server in the header Host ({', '.join(self._names)}), found {found}. "
            "Call it by one of these, or start it with --allowed-host NAME or --api-key KEY.",
            code="host_not_allowed",
        )
        await error_response(error)(scope, receive, send)

    def _is_known(self, host: str) -> bool:
        parts = _HOST.fullmatch(host)
        return parts is not None and parts[1].lower().removesuffix(".") in self._names


class ApiKeys:
    """Lets a request through that bears one of the keys, or goes to an open path.

    Keys are compared as digests, every one of them each time: neither length nor order nor a common beginning shows in the time.

    Args:
        app: what is guarded.
        keys: at least one.
        is_open: whether a path needs no key.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], is_open: Callable[[str], bool]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() == "bearer" and any(matches):
            await self._app(scope, receive, send)
            return
        found = "a wrong one" if given else "none"
        error = ApiError(
            401,
            f"Expected an API key as 'Authorization: Bearer KEY', found {found}. Ask who runs this server for one.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(error)(scope, receive, send)


class BodyLimit:
    """Refuses bodies over a size: by their stated length at once, chunked ones as soon as they have grown over it."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = Headers(scope=scope).get("content-length", "")
        if stated.isdecimal() and int(stated) > self._max_bytes:
            await error_response(self._error(f"{int(stated)} bytes"))(scope, receive, send)
            return
        seen = 0

        async def receiving() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_bytes:
                raise self._error("more")  # the routes' exception handler answers it
            return message

        await self._app(scope, receiving, send)

    def _error(self, found: str) -> ApiError:
        # The rest of the body is not read: the connection cannot be used again.
        return ApiError(
            413,
            f"Expected a body of at most {self._max_bytes} bytes, found {found}. Send less, or start the server with --max-body-bytes.",
            code="body_too_large",
            headers={"Connection": "close"},
        )


def new_request_id() -> str:
    """For a request that brings none, or none that can be taken over."""
    return uuid.uuid4().hex


def _request_id(headers: Headers) -> str:
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else new_request_id()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
