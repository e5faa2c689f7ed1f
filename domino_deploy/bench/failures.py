"""Kinds of failed requests, a few words in snake case each, what they say to whoever measures, and what the server said itself."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from http import HTTPStatus

from domino_deploy.errors import one_line

_STATUS = "http_"


class LongAnswer(http.client.HTTPException):
    """More bytes than anyone reads."""


# Exceptions of a request -> its kind; the first that fits.
_KINDS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
    (TimeoutError, "timeout"),
    (ConnectionRefusedError, "connection_refused"),
    (socket.gaierror, "unknown_host"),
    (ssl.SSLError, "no_tls"),
    ((http.client.IncompleteRead, ConnectionResetError, BrokenPipeError), "broken_stream"),  # RemoteDisconnected is a reset, too
    (LongAnswer, "long_answer"),
    (http.client.HTTPException, "no_http"),
    (OSError, "no_connection"),
)
_WORDS = {
    "timeout": "no answer, or no more of one, within --timeout",
    "connection_refused": "connection refused: no server listens there",
    "unknown_host": "a host name without an address",
    "no_tls": "no TLS: an http server behind https, or a certificate that is not trusted",
    "broken_stream": "a connection that ended before the answer did",
    "no_http": "an answer that is not HTTP: an https server behind http, or another service",
    "no_connection": "no connection",
    "long_answer": "an answer without an end, or one far longer than any that was asked for",
    "no_event_stream": "an answer that is no stream: not an OpenAI-compatible server, or one that does not stream",
    "error_in_stream": "an error that the server reported within its stream",
    "bad_chunk": "a chunk of the stream that is not what OpenAI's clients read",
    "no_answer": "a stream that ended as a complete one does, without any answer in it",
}
_UNREACHABLE = {"connection_refused", "unknown_host", "no_tls", "no_http", "no_connection"}


def kind_of(error: Exception) -> str:
    """Of a request that an OSError or HTTPException ended."""
    return next(kind for types, kind in _KINDS if isinstance(error, types))


def kind_of_status(status: int) -> str:
    """Of a request that was answered with a status other than 200."""
    return f"{_STATUS}{status}"


def message_in(body: bytes) -> str | None:
    """What the body of a refusal says for a reader, as one short line: the message in JSON, or plain text; None without words."""
    text = body.decode("utf-8", "replace")
    try:
        said = message_of(json.loads(text))
    except (ValueError, RecursionError):
        said = None if text.lstrip().startswith("<") else one_line(text)  # a proxy's page says what its status says
    return said or None


def message_of(value: object) -> str | None:
    """The same of JSON values: OpenAI's object, and the other places where servers put their words; None without any."""
    while isinstance(value, dict):
        value = next((value[name] for name in ("error", "message", "detail") if value.get(name)), None)
    return None if value is None else one_line(value if isinstance(value, str) else json.dumps(value))


def words(kind: str) -> str:
    """What was found, for a reader."""
    if not kind.startswith(_STATUS):
        return _WORDS[kind]
    status = int(kind.removeprefix(_STATUS))
    known = {known.value: known.phrase for known in HTTPStatus}
    return f"status {status} {known.get(status, '')}".rstrip()


def advice(kind: str) -> str:
    """What to do about it."""
    if kind in _UNREACHABLE:
        return "Start the server, or correct --url."
    if kind in (kind_of_status(HTTPStatus.UNAUTHORIZED), kind_of_status(HTTPStatus.FORBIDDEN)):
        return "Correct --api-key, or the name in --url."
    if kind in (kind_of_status(HTTPStatus.NOT_FOUND), "long_answer"):
        return "Correct --url or --model."
    if kind == kind_of_status(HTTPStatus.TOO_MANY_REQUESTS):
        return "Ask for less --concurrency, or let the server queue more."
    return "Raise --timeout, or see the server's log." if kind == "timeout" else "See the server's log."
