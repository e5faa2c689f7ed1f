"""The ASGI application: routes, what stands around them, and what they share."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from domino_deploy.errors import DominoDeployError
from domino_deploy.server import chat, completions, health, metrics, models, openapi, page, tokens
from domino_deploy.server.endpoints import Endpoints
from domino_deploy.server.errors import ApiError, api_error, error_response
from domino_deploy.server.middleware import REQUEST_ID_HEADER, ApiKeys, BodyLimit, KnownHosts, RequestContext, SecurityHeaders
from domino_deploy.server.settings import ServerSettings
from domino_deploy.server.state import ServerState, record_of

if TYPE_CHECKING:
    from domino_deploy.runtime.engine import Engine
    from domino_deploy.server.metrics import Metrics


_LOG = logging.getLogger(__name__)


def create_app(engine: Engine, settings: ServerSettings, metrics_of_engine: Metrics | None = None) -> Starlette:
    """The application over an engine, which its caller starts and closes.

    Args:
        engine: what answers; it may still be warming up.
        settings: the operator's choices.
        metrics_of_engine: what the engine's observer counts into, for `/metrics`; None for no such route.
    """
    state = ServerState(engine=engine, settings=settings, metrics=metrics_of_engine)
    open_routes = [*health.open_routes, *(page.routes if settings.has_page else ())]
    guarded = [*chat.routes, *completions.routes, *models.routes, *tokens.routes, *health.routes, *openapi.routes]
    if state.has_metrics:
        guarded += metrics.routes
    around = [Middleware(RequestContext, logs_prompts=settings.logs_prompts), Middleware(SecurityHeaders)]
    if settings.known_hosts is not None:
        around.append(Middleware(KnownHosts, names=settings.known_hosts, is_open=_matcher(health.open_routes)))
    if settings.cors_origins:
        around.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID_HEADER, "retry-after"],
            )
        )
    if settings.api_keys:
        around.append(Middleware(ApiKeys, keys=settings.api_keys, is_open=_matcher(open_routes)))
    around.append(Middleware(BodyLimit, max_bytes=settings.max_body_bytes))
    app = Starlette(
        routes=[*open_routes, *guarded],
        middleware=around,
        exception_handlers={
            ApiError: _answer_error,
            DominoDeployError: _answer_error,
            TimeoutError: _answer_error,  # of an answer that takes longer than the server allows
            HTTPException: _answer_http_error,
        },
    )
    # A second address of the same thing would be one without a name in logs and in the key check.
    app.router.redirect_slashes = False
    app.state.server = state
    app.state.endpoints = Endpoints([*guarded, *health.open_routes])
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    """OpenAI's body, and a word for the log."""
    found, record = api_error(error), record_of(request)
    record.error = found.label
    if found.status == 500:  # the client is told nothing, so the log has to
        _LOG.error("Request %s failed", record.request_id, exc_info=error)
    return error_response(found)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods; what a path allows is also the answer to OPTIONS."""
    assert isinstance(error, HTTPException)
    allowed = dict(error.headers or {})
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=allowed)
    endpoints: Endpoints = request.app.state.endpoints
    if error.status_code == 404:
        found = endpoints.unknown_path(request)
    elif error.status_code == 405:
        found = endpoints.wrong_method(request, allowed)
    else:
        return await _answer_error(request, error)
    return await _answer_error(request, found)


def _matcher(routes: Sequence[BaseRoute]) -> Callable[[str], bool]:
    """Whether a path belongs to one of these routes."""
    patterns: list[re.Pattern[str]] = [route.path_regex for route in routes if isinstance(route, Route)]
    return lambda path: any(pattern.match(path) for pattern in patterns)
