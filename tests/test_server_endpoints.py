"""Requests for a path or a method that is not there: they are told what is."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from domino_deploy.server.app import create_app
from domino_deploy.server.metrics import Metrics
from domino_deploy.server.settings import ServerSettings
from tests.support.fake_engine import client_of
from tests.support.idle_engine import IdleEngine


@pytest.fixture
def engine(tiny_bundle: Path) -> IdleEngine:
    return IdleEngine(tiny_bundle)


@pytest.fixture
def client(engine: IdleEngine) -> TestClient:
    return client_of(engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/moderations", "/nowhere", "/" + "x" * 5000])
def test_an_unknown_path_is_an_openai_error_that_tells_the_endpoints(client: TestClient, path: str) -> None:
    answer = client.post(path, json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "unknown_url")
    for endpoint in ("POST /v1/chat/completions", "GET /v1/models/{model}", "GET /health/ready"):
        assert endpoint in error["message"]
    assert f"found POST {path[:80]}. Call one of these." in error["message"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "POST /v1/chat/completions"),
        ("/chat/completions", "POST /v1/chat/completions"),
        ("/v1/v1/chat/completions", "POST /v1/chat/completions"),
        ("/v1/Chat/Completions/", "POST /v1/chat/completions"),
        ("/completions", "POST /v1/completions"),
        ("/v1/model", "GET /v1/models"),
        ("/v1/models/", "GET /v1/models"),
        ("/v1/tokenize", "POST /tokenize"),
        ("/healthz", "GET /health"),
    ],
)
def test_one_that_is_nearly_right_is_told_the_right_one(client: TestClient, path: str, meant: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith(f"found GET {path}. Call {meant}.")


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/v1/responses", "The Responses API is not there: call POST /v1/chat/completions, with the input as messages."),
        ("/v1/messages", "Anthropic's API is not there: call POST /v1/chat/completions."),
        ("/v1/embeddings/", "There are no embeddings: this server generates text alone."),
        ("/api/chat", "Ollama's API is not there: call POST /v1/chat/completions."),
        ("/api/generate", "Ollama's API is not there: call POST /v1/completions."),
    ],
)
def test_an_api_that_is_not_there_is_called_by_its_name(client: TestClient, path: str, advice: str) -> None:
    answer = client.post(path, json={})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].endswith(f"found POST {path}. {advice}")


@pytest.mark.parametrize("has_metrics", [True, False])
def test_an_endpoint_that_is_left_out_is_not_told(engine: IdleEngine, has_metrics: bool) -> None:
    settings = ServerSettings(allowed_hosts=("testserver",), has_metrics=has_metrics)
    client = TestClient(create_app(engine, settings, Metrics("m")))  # type: ignore[arg-type]
    assert ("GET /metrics" in client.get("/nowhere").json()["error"]["message"]) is has_metrics


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_wrong_method_is_an_openai_error_that_names_the_right_one(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    error = answer.json()["error"]
    assert error["code"] == "method_not_supported"
    assert error["message"].startswith(f"Expected POST for {path}, found GET. ")
    assert "GET /v1/models" in error["message"]


@pytest.mark.parametrize(("path", "status"), [("/v1/models", 405), ("/nowhere", 404)])
def test_a_long_method_is_not_said_back_in_full(client: TestClient, path: str, status: int) -> None:
    answer = client.request("M" * 60_000, path)
    assert answer.status_code == status
    assert f"found {'M' * 80}" in answer.json()["error"]["message"]
    assert "M" * 81 not in answer.text
