"""HTTP/1.1 requests where uvicorn and its parser fall short: reasons of refusals, and targets that name the host."""

from __future__ import annotations

import re
from http import HTTPStatus
from urllib.parse import unquote

import h11
from starlette.types import Scope

_ABSOLUTE_FORM = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)


class RequestParser(h11.Connection):
    """h11's, but what is wrong with a request is noted: uvicorn would tell the log of it, and nobody the reason.

    Attributes:
        problem: h11's words; None as long as there is none.
        has_long_head: whether it is a head that is longer than the limit, and not yet complete.
    """

    problem: str | None = None
    has_long_head = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """h11's; what it would raise becomes `problem`, and nothing comes any more."""
        is_head = self.their_state is h11.IDLE
        try:
            return super().next_event()
        except h11.RemoteProtocolError as error:
            self.problem = str(error)
            self.has_long_head = is_head and error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            return h11.NEED_DATA


def in_origin_form(scope: Scope) -> Scope:
    """The scope of a request for `http://host/path`, which counts as one for `/path` at that host (RFC 9112, 3.2.2)."""
    target = _ABSOLUTE_FORM.fullmatch(scope["raw_path"])
    if target is None:
        return scope
    host, path = target[1], target[2] or b"/"
    headers = [(b"host", host), *((name, value) for name, value in scope["headers"] if name != b"host")]
    return {**scope, "raw_path": path, "path": unquote(path.decode("ascii")), "headers": headers}
