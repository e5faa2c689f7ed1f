"""`/openapi.json`: the API as OpenAPI 3.1, made from the models that bodies are checked with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from domino_deploy import __version__
from domino_deploy.server.body import Body
from domino_deploy.server.schemas_answers import (
    ChatCompletion,
    Completion,
    Detokenized,
    ErrorBody,
    ModelEntry,
    ModelList,
    Status,
    Tokenized,
    TokenizerInfo,
    Version,
)
from domino_deploy.server.schemas_chat import ChatBody
from domino_deploy.server.schemas_chunks import ChatCompletionChunk, CompletionChunk
from domino_deploy.server.schemas_completions import CompletionBody
from domino_deploy.server.state import state_of
from domino_deploy.server.tokens import DetokenizeBody, TokenizeBody

_JSON, _EVENTS, _PROMETHEUS, _OPENMETRICS = "application/json", "text/event-stream", "text/plain", "application/openmetrics-text"
_MODE: Literal["validation"] = "validation"  # a field that may be absent has a default
_REFERENCE = "#/components/schemas/{model}"
_ERRORS: Mapping[int, str] = {
    400: "A value cannot be used; `param` names it.",
    401: "No API key, or a wrong one.",
    403: "The server was called by a name that is not its own.",
    404: "No such model.",
    408: "The request's time limit is over, and it is of no use to repeat it; or its body did not come in time.",
    413: "The body is too large.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "The server failed on this request; its log says why.",
    503: "The server is warming up, ending, or failed.",
}


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """One method of one path.

    answer: the model of a 200, or the schema of one without a model; chunk: of server-sent events, which a 200 may also be;
    media_types: of the 200; errors: statuses beside the ones that every path has; is_open: it needs no key.
    """

    path: str
    summary: str
    answer: type[BaseModel] | Mapping[str, Any]
    body: type[Body] | None = None
    chunk: type[BaseModel] | None = None
    media_types: Sequence[str] = (_JSON,)
    errors: Sequence[int] = ()
    parameters: Sequence[Mapping[str, Any]] = ()
    is_open: bool = False

    @property
    def method(self) -> str:
        return "get" if self.body is None else "post"

    @property
    def models(self) -> list[type[BaseModel]]:
        answer = [self.answer] if isinstance(self.answer, type) else []
        return [*answer, *(model for model in (self.body, self.chunk) if model is not None)]


_MODEL_NAME = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}, "description": "One of the served names."}
_GENERATION_ERRORS = (400, 404, 408, 413, 429, 503)
_BODY_ERRORS = (400, 404, 408, 413)
_OPERATIONS = (
    _Operation(
        path="/v1/chat/completions",
        summary="The next message of a conversation",
        body=ChatBody,
        answer=ChatCompletion,
        chunk=ChatCompletionChunk,
        errors=_GENERATION_ERRORS,
    ),
    _Operation(
        path="/v1/completions",
        summary="The text that follows a prompt",
        body=CompletionBody,
        answer=Completion,
        chunk=CompletionChunk,
        errors=_GENERATION_ERRORS,
    ),
    _Operation(path="/v1/models", summary="What is served", answer=ModelList),
    _Operation(
        path="/v1/models/{model}", summary="One name of what is served", answer=ModelEntry, errors=(404,), parameters=(_MODEL_NAME,)
    ),
    _Operation(path="/tokenize", summary="Tokens of a text or a conversation", body=TokenizeBody, answer=Tokenized, errors=_BODY_ERRORS),
    _Operation(path="/detokenize", summary="Text of tokens", body=DetokenizeBody, answer=Detokenized, errors=_BODY_ERRORS),
    _Operation(path="/tokenizer_info", summary="Special tokens and chat template", answer=TokenizerInfo),
    _Operation(path="/health", summary="Whether the server lives", answer=Status, errors=(503,), is_open=True),
    _Operation(path="/health/ready", summary="Whether it takes requests", answer=Status, errors=(503,), is_open=True),
    _Operation(path="/version", summary="Version of the server", answer=Version),
)
_METRICS = _Operation(path="/metrics", summary="Metrics for Prometheus", answer={"type": "string"}, media_types=(_PROMETHEUS, _OPENMETRICS))


def document(*, has_keys: bool, has_metrics: bool, has_known_hosts: bool) -> dict[str, Any]:
    """The OpenAPI document.

    Args:
        has_keys: whether an API key is asked for.
        has_metrics: whether `/metrics` is there.
        has_known_hosts: whether the server answers to some names only.
    """
    refusals = [status for status, is_there in ((401, has_keys), (403, has_known_hosts)) if is_there]
    operations = (*_OPERATIONS, _METRICS) if has_metrics else _OPERATIONS
    models: dict[type[BaseModel], None] = dict.fromkeys([ErrorBody, *(model for operation in operations for model in operation.models)])
    references, definitions = models_json_schema([(model, _MODE) for model in models], ref_template=_REFERENCE)
    paths = {}
    for operation in operations:
        paths[operation.path] = {operation.method: _described(operation, references, has_keys=has_keys, refusals=refusals)}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "domino-deploy",
            "version": __version__,
            "summary": "OpenAI's API over speculative decoding",
            "description": "Fields that are not listed are ignored if unknown, and answered with 400 if OpenAI or another server has them "
            "but they are without an effect here.",
        },
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }
    if has_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return found


def _described(operation: _Operation, references: Mapping[Any, Any], *, has_keys: bool, refusals: Sequence[int]) -> dict[str, Any]:
    answer = references[operation.answer, _MODE] if isinstance(operation.answer, type) else operation.answer
    content: dict[str, Any] = {media_type: {"schema": answer} for media_type in operation.media_types}
    if operation.chunk is not None:
        content[_EVENTS] = {"schema": _event_of(references[operation.chunk, _MODE], references[ErrorBody, _MODE])}
    responses = {"200": {"description": "The answer.", "content": content}}
    failures = [*operation.errors, 500, *(() if operation.is_open else refusals)]
    for status in sorted(failures):
        schema = references[ErrorBody, _MODE]
        responses[str(status)] = {"description": _ERRORS[status], "content": {_JSON: {"schema": schema}}}
    found: dict[str, Any] = {
        "operationId": "_".join([operation.method, *operation.path.replace("{", "").replace("}", "").strip("/").split("/")]),
        "summary": operation.summary,
        "responses": responses,
    }
    if operation.parameters:
        found["parameters"] = list(operation.parameters)
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": references[operation.body, _MODE]}}}
    if has_keys and not operation.is_open:
        found["security"] = [{"key": []}]
    return found


def _event_of(chunk: Mapping[str, Any], error: Mapping[str, Any]) -> dict[str, Any]:
    """One event: OpenAPI 3.1 has no word for a sequence of them, and readers take the schema of a stream as that of its events."""
    data = {
        "anyOf": [
            {"const": "[DONE]", "description": "The last event."},
            {"type": "string", "contentMediaType": _JSON, "contentSchema": {"anyOf": [chunk, error]}},
        ]
    }
    return {"type": "object", "description": "One server-sent event.", "properties": {"data": data}, "required": ["data"]}


async def openapi(request: Request) -> Response:
    """The document of the API as this server was set up."""
    state = state_of(request)
    settings = state.settings
    has_known_hosts = settings.known_hosts is not None
    return JSONResponse(document(has_keys=bool(settings.api_keys), has_metrics=state.has_metrics, has_known_hosts=has_known_hosts))


routes = [Route("/openapi.json", openapi)]
