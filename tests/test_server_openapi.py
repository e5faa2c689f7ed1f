"""`/openapi.json`: it says what is there, and schemathesis finds no answer that it does not describe."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from jsonschema_rs import Draft202012Validator
from schemathesis.generation import GenerationMode
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from domino_deploy.runtime.engine import Engine
from domino_deploy.runtime.engine_settings import EngineSettings
from domino_deploy.server.app import create_app
from domino_deploy.server.metrics import Metrics
from domino_deploy.server.schemas_chunks import ChatCompletionChunk
from domino_deploy.server.settings import ServerSettings, StatisticsLevel
from tests.support.fake_engine import ScriptedEngine, client_of

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "25"))  # per operation, right and wrong each; listed in README
CHECKED = (
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
)
GENERATION = hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
SETTINGS = ServerSettings(served_model_names=("tiny",), allowed_hosts=("testserver",), max_body_bytes=100_000, request_timeout_seconds=60.0)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
TEXT = {"model": "tiny", "prompt": "Hi", "max_tokens": 6}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}
VALUES: tuple[Any, ...] = (None, False, True, 0, 1, -1, 2**31, 0.5, 1e300, "", "a", "0.5", [], ["a"], [1], [None], {}, {"a": 1}, {"a": "b"})


@pytest.fixture(scope="module")
def app(tiny_bundle: Path) -> Iterator[Starlette]:
    metrics = Metrics("tiny")
    with Engine.open(tiny_bundle, max_model_len=96, threads=1, settings=EngineSettings(max_sequences=4), observer=metrics) as engine:
        metrics.watch(engine, provider="cpu", drafter="bundle")
        yield create_app(engine, SETTINGS, metrics)


@pytest.fixture(scope="module")
def client(app: Starlette) -> TestClient:
    return TestClient(app)


@pytest.fixture(scope="module")
def document(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def events_of(text: str) -> list[str]:
    """The data of the events of a stream."""
    return [event.removeprefix("data: ") for event in text.split("\n\n") if event]


def conforms(document: dict[str, Any], path: str, method: str, status: int, body: Any) -> None:
    """Check an answer against what the document says of it."""
    content = document["paths"][path][method]["responses"][str(status)]["content"]["application/json"]
    validator = Draft202012Validator({**content["schema"], "components": document["components"]})
    errors = [f"{error.instance_path}: {error.message}" for error in validator.iter_errors(body)]
    assert not errors, errors


def test_every_route_is_described_and_no_other(app: Starlette, document: dict[str, Any]) -> None:
    routes = [route for route in app.routes if isinstance(route, Route)]
    there = {(route.path.replace(":path", ""), method.lower()) for route in routes for method in route.methods or ()}
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    # HEAD comes with every GET; the page is no API; the document does not describe itself.
    apart = {("/", "get"), ("/favicon.ico", "get"), ("/static/{name}", "get"), ("/openapi.json", "get")}
    assert described == {(path, method) for path, method in there if method != "head"} - apart


def test_metrics_and_keys_are_described_where_they_are(app: Starlette) -> None:
    plain = TestClient(create_app(app.state.server.engine, ServerSettings(api_keys=("k",), has_metrics=False)))
    found = plain.get("/openapi.json", headers={"authorization": "Bearer k"}).json()
    assert "/metrics" not in found["paths"]
    assert found["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "401" in found["paths"]["/v1/models"]["get"]["responses"]
    assert "security" not in found["paths"]["/health"]["get"]
    conforms(found, "/v1/models", "get", 401, plain.get("/v1/models").json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "speculation_details": True}),
        ("/v1/completions", TEXT),
        ("/v1/completions", TEXT | {"echo": True, "logprobs": 2, "prompt": ["a", "b"]}),
        ("/v1/completions", TEXT | {"echo": True, "max_tokens": 0}),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5, 6]}),
    ],
)
def test_answers_have_the_fields_that_are_described(client: TestClient, document: dict[str, Any], path: str, body: Any) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    conforms(document, path, "post", 200, answer.json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", CHAT | {"speculation_details": True}),
        ("/v1/completions", TEXT),
        ("/v1/completions", TEXT | {"prompt": ["a", "b"], "echo": True, "logprobs": 2, "stream_options": {"include_usage": True}}),
        ("/v1/completions", TEXT | {"speculation_details": True}),
    ],
)
def test_chunks_of_streams_have_the_fields_that_are_described(app: Starlette, document: dict[str, Any], path: str, body: Any) -> None:
    client = TestClient(create_app(app.state.server.engine, replace(SETTINGS, statistics_level=StatisticsLevel.DETAILED)))
    answer = client.post(path, json=body | {"stream": True, "temperature": 0})
    assert answer.status_code == 200, answer.text
    data = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]["properties"]["data"]
    last, event = data["anyOf"]
    chunk, failure = event["contentSchema"]["anyOf"]
    validator = Draft202012Validator({**chunk, "components": document["components"]})
    *chunks, done = events_of(answer.text)
    assert done == last["const"]
    assert [error.message for text in chunks for error in validator.iter_errors(json.loads(text))] == []
    assert len(chunks) > 1
    assert failure["$ref"].endswith("/ErrorBody")


def test_so_have_chunks_that_call_tools(tiny_bundle: Path) -> None:
    body = CHAT | {"stream": True, "temperature": 0, "max_tokens": 200, "tools": [{"type": "function", "function": {"name": "f"}}]}
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    with ScriptedEngine(tiny_bundle, call, max_model_len=1024) as engine:
        *chunks, _ = events_of(client_of(engine).post("/v1/chat/completions", json=body).text)
    choices = [choice for text in chunks for choice in ChatCompletionChunk.model_validate_json(text).choices]
    assert "".join(part.function.arguments for choice in choices for part in choice.delta.tool_calls) == '{"a": 1}'
    assert choices[-1].finish_reason == "tool_calls"


def test_both_forms_of_the_metrics_are_described(client: TestClient, document: dict[str, Any]) -> None:
    answers = [client.get("/metrics", headers={"accept": accept}) for accept in ("text/plain", "application/openmetrics-text")]
    given = {answer.headers["content-type"].partition(";")[0] for answer in answers}
    assert given == document["paths"]["/metrics"]["get"]["responses"]["200"]["content"].keys()


def test_schemas_have_names_of_their_own(document: dict[str, Any]) -> None:
    # Of two models of one name pydantic makes names with their modules.
    assert [name for name in document["components"]["schemas"] if not name.isalpha()] == []


def test_names_that_are_not_the_servers_are_described_where_they_are_refused(app: Starlette, document: dict[str, Any]) -> None:
    stranger = TestClient(app, base_url="http://rebound.example")
    conforms(document, "/v1/models", "get", 403, stranger.get("/v1/models").json())
    assert "403" not in document["paths"]["/health"]["get"]["responses"]
    anyone = TestClient(create_app(app.state.server.engine, ServerSettings(allowed_hosts=("*",))))
    assert "403" not in anyone.get("/openapi.json").json()["paths"]["/v1/models"]["get"]["responses"]


@pytest.mark.parametrize("path", ["/v1/models", "/tokenizer_info", "/health", "/health/ready", "/version"])
def test_so_have_answers_without_a_body(client: TestClient, document: dict[str, Any], path: str) -> None:
    conforms(document, path, "get", 200, client.get(path).json())


def test_statistics_are_described_too(app: Starlette, document: dict[str, Any]) -> None:
    client = TestClient(create_app(app.state.server.engine, replace(SETTINGS, statistics_level=StatisticsLevel.DETAILED)))
    answer = client.post("/v1/chat/completions", json=CHAT).json()
    assert answer["metrics"]["speculative_decoding"]["num_spec_tokens"] > 0
    conforms(document, "/v1/chat/completions", "post", 200, answer)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("status", "change"),
    [(400, {"temperature": -1}), (404, {"model": "gpt-4"}), (413, {"user": "x" * 100_001})],
)
def test_documented_failures_happen(client: TestClient, document: dict[str, Any], path: str, status: int, change: dict[str, Any]) -> None:
    answer = client.post(path, json=(CHAT if "chat" in path else TEXT) | change)
    assert answer.status_code == status
    conforms(document, path, "post", status, answer.json())


@pytest.fixture(scope="module")
def schema(app: Starlette, document: dict[str, Any]) -> Any:
    found = schemathesis.openapi.from_dict(document)
    found.app = app
    return found


def operations_of(schema: Any) -> list[Any]:
    return [found.ok() for found in schema.get_all_operations()]


def test_schemathesis_finds_no_answer_that_is_not_described(schema: Any, document: dict[str, Any]) -> None:
    operations = operations_of(schema)
    assert len(operations) == sum(len(methods) for methods in document["paths"].values())
    statuses: set[int] = set()

    for operation in operations:

        @hypothesis.given(case=operation.as_strategy())
        @GENERATION
        def sent(case: schemathesis.Case) -> None:
            _bound(case.body)
            answer = case.call()
            statuses.add(answer.status_code)
            case.validate_response(answer, checks=list(CHECKED))

        sent()
    assert {200, 400, 404} <= statuses


def test_bodies_that_are_not_as_described_are_refused_with_an_error_that_is(schema: Any) -> None:
    """Bytes that are no JSON, and JSON that breaks the document's schema, which lets fields be unknown or null."""
    operations = [operation for operation in operations_of(schema) if operation.body]
    assert len(operations) == 4
    kinds: set[type] = set()

    for operation in operations:

        @hypothesis.given(case=operation.as_strategy(GenerationMode.NEGATIVE))
        @GENERATION
        def sent(case: schemathesis.Case) -> None:
            kinds.add(type(case.body))
            answer = case.call()
            # What is too large is wrong as well: 413 comes first.
            assert answer.status_code in (400, 413), answer.text
            error = answer.json()["error"]
            assert (error["type"], error.keys()) == ("invalid_request_error", {"message", "type", "param", "code"})
            assert error["message"]
            case.validate_response(answer, checks=list(CHECKED))

        sent()
    assert {bytes, dict} <= kinds


@pytest.mark.parametrize(("path", "body"), list(BODIES.items()))
def test_nor_does_it_in_streams(schema: Any, path: str, body: Any) -> None:
    # By chance alone it writes no body that is answered with a stream.
    case = schema[path]["POST"].Case(body=body | {"stream": True}, media_type="application/json")
    answer = case.call()
    assert answer.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(answer, checks=list(CHECKED))


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        *(
            (path, body, part)
            for path, body in BODIES.items()
            for part in (None, "response_format", "structured_outputs", "stream_options")
        ),
        ("/tokenize", {"prompt": "a"}, None),
        ("/detokenize", {"tokens": [5]}, None),
    ],
)
def test_no_field_takes_a_value_that_the_document_refuses(
    client: TestClient, document: dict[str, Any], path: str, body: dict[str, Any], part: str | None
) -> None:
    """By turns and not by chance: every field, by itself, with values of every kind."""
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = Draft202012Validator({**reference, "components": document["components"]})
    schema = _resolved(document, reference)
    fields = schema["properties"] if part is None else _resolved(document, schema["properties"][part]["anyOf"][0])["properties"]
    taken = []
    for field, value in itertools.product(fields, VALUES):
        changed = {**body, **({field: value} if part is None else {part: {field: value}})}
        if not validator.is_valid(changed) and client.post(path, json=changed).status_code != 400:
            taken.append((field, value))
    assert taken == []


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """What a reference stands for."""
    found: dict[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _bound(body: Any) -> None:
    """Name the model half of the time, so that not every example ends with 404."""
    if isinstance(body, dict) and isinstance(body.get("model"), str) and len(body["model"]) % 2 == 0:
        body["model"] = "tiny"
