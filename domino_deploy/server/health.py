"""Whether the server lives, whether it takes requests, and which version it is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from domino_deploy import __version__
from domino_deploy.server.errors import ApiError, unavailable
from domino_deploy.server.state import state_of


async def health(request: Request) -> Response:
    """200 as long as the engine can work, also while it warms up; 503 once it failed, which only a new start mends."""
    if state_of(request).engine.failure is not None:
        message = "Expected an engine that works, found that it failed; the server's log says why. Restart the server."
        raise ApiError(503, message, code="engine_failed")
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 while requests are taken: not before the engine is warm, not while the server is ending."""
    state = state_of(request)
    if state.engine.failure is not None:
        return await health(request)
    if state.is_draining or not state.engine.is_ready:
        found = "ending" if state.is_draining else "warming up"
        raise unavailable(f"Expected a server that takes requests, found it {found}. Try again, or use another instance.")
    return JSONResponse({"status": "ready"})


async def version(request: Request) -> Response:
    """Of domino-deploy."""
    return JSONResponse({"version": __version__})


open_routes = [Route("/health", health), Route("/health/ready", ready)]
routes = [Route("/version", version)]
