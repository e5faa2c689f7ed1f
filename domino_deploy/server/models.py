"""`/v1/models`: what can be asked for by name.  All names stand for the one model that is served."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from domino_deploy.server.errors import ApiError
from domino_deploy.server.state import ServerState, state_of


async def list_models(request: Request) -> Response:
    """All names, as OpenAI lists its models."""
    state = state_of(request)
    return JSONResponse({"object": "list", "data": [_entry(state, name) for name in state.model_names]})


async def one_model(request: Request) -> Response:
    """One name; 404 for what is not served, and for none."""
    state = state_of(request)
    name = request.path_params["model"]
    if not name:
        raise HTTPException(404)  # /v1/models/: the list was meant
    check_model_name(state, name)
    return JSONResponse(_entry(state, name))


def check_model_name(state: ServerState, name: str) -> None:
    """Check that a client asks for what is served.

    Raises:
        ApiError: it does not; 404, as OpenAI answers it.
    """
    if name not in state.model_names:
        known = ", ".join(state.model_names)
        message = f"Expected one of the served models ({known}), found {name[:200]!r}. Take a name that /v1/models lists."
        raise ApiError(404, message, param="model", code="model_not_found")


def _entry(state: ServerState, name: str) -> dict[str, Any]:
    """OpenAI's fields, and vLLM's three."""
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "domino-deploy",
        "root": state.model_names[0],
        "parent": None,
        "max_model_len": state.engine.max_model_len,
    }


# Names may hold slashes, as hub ids do.
routes = [Route("/v1/models", list_models), Route("/v1/models/{model:path}", one_model)]
