"""The shell of the server: paths, methods, health, models, tokens, ids and log lines; no request reaches an engine."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from domino_deploy import __version__
from domino_deploy.errors import OutOfRangeError
from domino_deploy.runtime.requests import RequestStatistics
from domino_deploy.server.app import create_app
from domino_deploy.server.logs import JsonFormatter, LogFormat, RequestRecord, TextFormatter, log_request
from domino_deploy.server.settings import ServerSettings
from tests.support.idle_engine import IdleEngine

POST_PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


@pytest.fixture
def engine(tiny_bundle: Path) -> IdleEngine:
    return IdleEngine(tiny_bundle)


def client_of(engine: IdleEngine, **settings: Any) -> TestClient:
    app = create_app(engine, ServerSettings(allowed_hosts=("testserver",), **settings))  # type: ignore[arg-type]
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture
def client(engine: IdleEngine) -> TestClient:
    return client_of(engine)


class TestHealth:
    def test_a_server_that_warms_up_lives_but_is_not_ready(self, engine: IdleEngine, client: TestClient) -> None:
        engine.is_ready = False
        assert client.get("/health").status_code == 200
        answer = client.get("/health/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert "warming up" in answer.json()["error"]["message"]
        engine.is_ready = True
        assert client.get("/health/ready").json() == {"status": "ready"}

    def test_a_server_that_drains_lives_but_is_not_ready(self, client: TestClient) -> None:
        client.app.state.server.generations.drain()  # type: ignore[attr-defined]
        assert client.get("/health").status_code == 200
        assert "ending" in client.get("/health/ready").json()["error"]["message"]

    @pytest.mark.parametrize("path", ["/health", "/health/ready"])
    def test_a_failed_engine_shows(self, engine: IdleEngine, client: TestClient, path: str) -> None:
        engine.failure = RuntimeError("secret detail")
        answer = client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
        assert "secret" not in answer.text


class TestModels:
    def test_every_served_name_is_listed_with_the_models_length(self, engine: IdleEngine) -> None:
        client = client_of(engine, served_model_names=("one", "org/two"))
        listed = client.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [(entry["id"], entry["object"], entry["max_model_len"]) for entry in listed["data"]] == [
            ("one", "model", 96),
            ("org/two", "model", 96),
        ]
        assert client.get("/v1/models/org/two").json() == listed["data"][1]
        assert client.get("/v1/models/org%2Ftwo").json() == listed["data"][1]

    def test_the_bundle_folder_names_the_model_by_default(self, client: TestClient, engine: IdleEngine) -> None:
        assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == [engine.bundle.path.name]

    def test_another_name_is_not_found(self, client: TestClient) -> None:
        answer = client.get("/v1/models/gpt-4")
        assert answer.status_code == 404
        assert answer.json()["error"] | {"message": ""} == {
            "message": "",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }


class TestTokens:
    def test_text_becomes_the_tokenizers_tokens_and_text_again(self, client: TestClient, engine: IdleEngine) -> None:
        text = "Grüße, 世界 🎉!"
        found = client.post("/tokenize", json={"prompt": text}).json()
        assert found == {"count": len(found["tokens"]), "max_model_len": 96, "tokens": engine.tokenizer.encode(text), "token_strs": None}
        assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": engine.tokenizer.decode(found["tokens"])}

    def test_messages_become_what_the_chat_template_makes_of_them(self, client: TestClient, engine: IdleEngine) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        found = client.post("/tokenize", json={"messages": messages, "return_token_strs": True}).json()
        assert found["tokens"] == engine.tokenizer.encode(engine.tokenizer.render_chat(messages), add_special_tokens=False)
        assert found["token_strs"] == [engine.tokenizer.spelling(token) for token in found["tokens"]]

    def test_special_tokens_survive_the_way_to_text_and_back(self, client: TestClient, engine: IdleEngine) -> None:
        special = next(token for token in engine.bundle.manifest.special_tokens.values() if token)
        tokens = client.post("/tokenize", json={"prompt": special, "add_special_tokens": False}).json()["tokens"]
        assert len(tokens) == 1
        assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": special}

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
            ("/tokenize", {"prompt": 3}, "prompt"),
            ("/tokenize", {"prompt": "\udc80"}, "prompt"),
            ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
            ("/tokenize", {"prompt": "a", "chat_template": "{{ 7 }}"}, "chat_template"),
            ("/detokenize", {"tokens": [1, 10**6]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
            ("/detokenize", {"tokens": "1"}, "tokens"),
        ],
    )
    def test_a_body_that_cannot_be_used_is_refused_by_name(self, client: TestClient, path: str, body: Any, param: str) -> None:
        answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)

    def test_another_model_has_no_tokens_here(self, client: TestClient) -> None:
        answer = client.post("/tokenize", json={"model": "gpt-4", "prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")

    def test_the_tokenizers_own_words_can_be_asked_for(self, client: TestClient, engine: IdleEngine) -> None:
        found = client.get("/tokenizer_info").json()
        assert found["chat_template"] == engine.tokenizer.chat_template
        assert found["eos_token"] == engine.bundle.manifest.special_tokens["eos_token"]
        assert found["model_max_length"] == 96


class TestPathsAndMethods:
    def test_a_trailing_slash_is_another_path(self, client: TestClient) -> None:
        assert client.get("/v1/models/", follow_redirects=False).status_code == 404

    @pytest.mark.parametrize("path", [*POST_PATHS, "/v1/models", "/health"])
    def test_options_tells_the_methods(self, client: TestClient, path: str) -> None:
        answer = client.options(path)
        assert answer.status_code == 204
        assert ("POST" if path in POST_PATHS else "GET") in answer.headers["allow"]

    @pytest.mark.parametrize("path", ["/health", "/v1/models", "/version", "/openapi.json"])
    def test_head_is_get_without_the_body(self, client: TestClient, path: str) -> None:
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-length"] == client.get(path).headers["content-length"]

    def test_the_version_is_the_packages(self, client: TestClient) -> None:
        assert client.get("/version").json() == {"version": __version__}

    def test_metrics_and_page_can_be_left_out(self, engine: IdleEngine) -> None:
        client = client_of(engine, has_page=False, has_metrics=False)
        assert [client.get(path).status_code for path in ("/", "/metrics")] == [404, 404]

    def test_an_unforeseen_error_tells_nothing_but_its_id(self, engine: IdleEngine, caplog: pytest.LogCaptureFixture) -> None:
        client = client_of(engine)
        del engine.tokenizer
        answer = client.get("/tokenizer_info", headers={"x-request-id": "abc"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, "abc")
        assert "tokenizer" not in answer.json()["error"]["message"]
        assert "Request abc failed" in caplog.text


class TestRequestIds:
    def test_a_sane_id_is_echoed(self, client: TestClient) -> None:
        assert client.get("/health", headers={"x-request-id": "run-7:a.b"}).headers["x-request-id"] == "run-7:a.b"

    @pytest.mark.parametrize("given", ["", "a b", "x" * 129, "../etc", "a;b", '"'])
    def test_any_other_is_replaced(self, client: TestClient, given: str) -> None:
        found = client.get("/health", headers={"x-request-id": given}).headers["x-request-id"]
        assert found != given
        assert len(found) == 32

    def test_errors_have_one_too(self, client: TestClient) -> None:
        assert client.get("/nowhere", headers={"x-request-id": "e1"}).headers["x-request-id"] == "e1"


class TestSettings:
    def test_all_bad_values_are_named_at_once(self) -> None:
        with pytest.raises(OutOfRangeError, match="Expected values in range, found 11 out of it") as caught:
            ServerSettings(
                port=70000,
                max_body_bytes=0,
                request_timeout_seconds=0.0,
                head_seconds=0.0,
                body_seconds=-1.0,
                drain_seconds=-1.0,
                api_keys=("a b",),
                served_model_names=(" ",),
                cors_origins=("example.com",),
                allowed_hosts=("a.example:8000",),
                chat_template_kwargs={"messages": 1, "enable_thinking": False},
            )
        numbers = ("port", "max_body_bytes", "request_timeout_seconds", "head_seconds", "body_seconds", "drain_seconds")
        for name in (*numbers, "api_keys", "served_model_names", "cors_origins", "allowed_hosts", "chat_template_kwargs"):
            assert f"  - {name} must " in str(caught.value)
        assert "a b" not in str(caught.value)  # keys are secrets
        assert "found messages" in str(caught.value)
        assert "enable_thinking" not in str(caught.value)

    def test_keys_are_in_no_representation(self) -> None:
        assert "hunter2" not in repr(ServerSettings(api_keys=("hunter2",)))

    @pytest.mark.parametrize(
        ("host", "is_open"), [("127.0.0.1", False), ("localhost", False), ("::1", False), ("[::1]", False), ("0.0.0.0", True)]
    )
    def test_a_host_beyond_loopback_is_told(self, host: str, is_open: bool) -> None:
        assert ServerSettings(host=host).is_open_to_the_network is is_open


@pytest.fixture(params=[LogFormat.TEXT, LogFormat.JSON])
def log(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    logger, stream = logging.getLogger("domino_deploy.server.requests"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if request.param is LogFormat.JSON else TextFormatter())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(before)


RECORD: dict[str, Any] = {
    "request_id": "r1",
    "method": "POST",
    "path": "/v1/completions",
    "status": 200,
    "seconds": 1.5,
    "model": "m",
    "answers": [
        ("stop", RequestStatistics(prompt_tokens=5, cached_tokens=2, generated_tokens=7, steps=((6, 3), (6, 1)))),
        ("length", RequestStatistics(prompt_tokens=4, generated_tokens=1, first_token_seconds=0.25)),
    ],
    "prompt": "a private question",
    "answer": "a private answer",
}


class TestLogs:
    def test_a_request_is_one_line_with_counts_tau_and_times(self, log: io.StringIO) -> None:
        log_request(RequestRecord(**RECORD), with_texts=False)
        (line,) = log.getvalue().splitlines()
        expected = {"request_id": "r1", "status": 200, "prompt_tokens": 9, "cached_tokens": 2, "generated_tokens": 8, "tau": 3.0}
        if line.startswith("{"):
            assert json.loads(line).items() >= (expected | {"finish_reason": "stop,length", "first_token_seconds": 0.25}).items()
        else:
            for name, value in expected.items():
                assert f" {name}={value}" in line
        assert "private" not in line

    def test_texts_are_there_when_asked_for(self, log: io.StringIO) -> None:
        log_request(RequestRecord(**RECORD), with_texts=True)
        assert "a private question" in log.getvalue()
        assert "a private answer" in log.getvalue()

    def test_no_client_can_forge_a_line(self, log: io.StringIO) -> None:
        log_request(RequestRecord(request_id="r1", status=404, path="/\n2026 INFO forged\x1b[31m\u2028"), with_texts=False)
        assert len(log.getvalue().splitlines()) == 1
        assert "\x1b" not in log.getvalue()

    def test_a_client_that_left_is_told(self, log: io.StringIO) -> None:
        log_request(RequestRecord(request_id="r1", is_disconnected=True), with_texts=False)
        assert "disconnected" in log.getvalue()
        assert "error" not in log.getvalue().lower()

    def test_what_machines_ask_all_the_time_is_not_logged(self, log: io.StringIO, client: TestClient) -> None:
        for path in ("/health", "/health/ready"):
            client.get(path)
        assert log.getvalue() == ""
        client.get("/version")
        assert "/version" in log.getvalue()

    def test_unless_it_fails(self, log: io.StringIO) -> None:
        log_request(RequestRecord(request_id="r1", path="/metrics", status=500), with_texts=False)
        assert "/metrics" in log.getvalue()

    def test_a_failure_keeps_its_traceback(self, log: io.StringIO) -> None:
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("domino_deploy.server.requests").exception("it failed")
        assert "it failed" in log.getvalue()
        assert "ValueError: broken" in log.getvalue()
