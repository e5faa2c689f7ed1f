"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}` with a status that fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from domino_deploy.errors import CapacityError, DrainingError, QueueFullError, RequestError

INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
SERVER_ERROR = "server_error"

# What a client of a draining or starting server should wait; a start takes seconds, another instance is there at once.
_UNAVAILABLE_RETRY_SECONDS = 2


class ApiError(Exception):
    """An answer other than 200.

    Args:
        status: the HTTP status.
        message: for the client's eyes: what was expected, what was found, what to do.
        type: OpenAI's class of the error; by the status if None.
        param: the field of the body that it is about, such as `messages.0.content`.
        code: OpenAI's short name of this very error, if it has one.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _type_of(status)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def label(self) -> str:
        """What the log says of it: names alone, since the message may quote what the client sent."""
        return " ".join(name for name in (self.code or self.type, self.param) if name)


def error_body(error: ApiError) -> dict[str, Any]:
    """The JSON object that a client reads, also inside a stream."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> JSONResponse:
    """The error as a response of its own."""
    return JSONResponse(error_body(error), status_code=error.status, headers=error.headers)


def unavailable(message: str) -> ApiError:
    """The answer of a server that takes no requests at the moment."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(_UNAVAILABLE_RETRY_SECONDS)})


def api_error(error: BaseException) -> ApiError:
    """Any exception as an answer; one that nobody foresaw becomes a 500 that tells nothing of our insides."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CapacityError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error))
    if isinstance(error, QueueFullError):
        seconds = max(1, math.ceil(error.retry_after_seconds))
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(seconds)})
    if isinstance(error, DrainingError):
        return unavailable(str(error))
    if isinstance(error, TimeoutError):
        # The same request would take as long again: OpenAI's clients must not repeat it, as they do after a 408.
        return ApiError(408, str(error), code="request_timeout", headers={"x-should-retry": "false"})
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail, headers=error.headers)
    return ApiError(500, "The server failed on this request. Its log says why, under the id in the header x-request-id.")


def _type_of(status: int) -> str:
    if status == 429:
        return RATE_LIMIT
    return INVALID_REQUEST if status < 500 else SERVER_ERROR
