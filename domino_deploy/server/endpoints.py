"""What to say to a request for a path or a method that is not there: what is, and what was likely meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from domino_deploy.server.errors import ApiError

# Of the path: `/chat/completions` is near, `/v1/moderations` is near nothing.
_LEAST_LIKENESS = 0.8
_SHOWN_CHARACTERS = 80
_CHAT, _COMPLETIONS = "POST /v1/chat/completions", "POST /v1/completions"
# Of OpenAI, Anthropic and Ollama: APIs that are not here, and what serves in place of them.
_OTHERS: Mapping[str, str] = {
    "/v1/responses": f"The Responses API is not there: call {_CHAT}, with the input as messages.",
    "/v1/messages": f"Anthropic's API is not there: call {_CHAT}.",
    "/v1/embeddings": "There are no embeddings: this server generates text alone.",
    "/api/chat": f"Ollama's API is not there: call {_CHAT}.",
    "/api/generate": f"Ollama's API is not there: call {_COMPLETIONS}.",
}


class Endpoints:
    """The endpoints of the API, for errors.

    Args:
        routes: to be told of.
    """

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._methods = {route.path.replace(":path", ""): _method(route) for route in routes if isinstance(route, Route)}

    def unknown_path(self, request: Request) -> ApiError:
        """404, with the endpoint that was likely meant."""
        path, method = request.url.path[:_SHOWN_CHARACTERS], request.method[:_SHOWN_CHARACTERS]
        asked = path.lower().rstrip("/")
        advice = _OTHERS.get(asked) or self._near(asked) or "Call one of these."
        message = f"Expected an endpoint of this server ({self._listed()}), found {method} {path}. {advice}"
        return ApiError(404, message, code="unknown_url")

    def wrong_method(self, request: Request, headers: Mapping[str, str]) -> ApiError:
        """405, with the right method, which `headers` tell, too."""
        path, allowed = request.url.path[:_SHOWN_CHARACTERS], headers["Allow"]
        message = f"Expected {allowed} for {path}, found {request.method[:_SHOWN_CHARACTERS]}. Call one of these: {self._listed()}."
        return ApiError(405, message, code="method_not_supported", headers=headers)

    def _near(self, path: str) -> str | None:
        near = get_close_matches(path, self._methods, n=1, cutoff=_LEAST_LIKENESS)
        return f"Call {self._methods[near[0]]} {near[0]}." if near else None

    def _listed(self) -> str:
        return ", ".join(f"{method} {path}" for path, method in self._methods.items())


def _method(route: Route) -> str:
    assert route.methods  # of functions: GET, if nothing else was said
    return next(iter(route.methods - {"HEAD"}))
