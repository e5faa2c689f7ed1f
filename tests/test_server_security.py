"""Who may ask, how much, and from where: API keys, names of the server, body limits, CORS, and the headers that a browser obeys."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from domino_deploy.server.app import create_app
from domino_deploy.server.metrics import Metrics
from domino_deploy.server.settings import ServerSettings
from tests.support.idle_engine import IdleEngine

KEYS = ("first-key", "second-key")
GUARDED = ("/v1/models", "/v1/models/x", "/metrics", "/version", "/tokenizer_info", "/openapi.json", "/nowhere")
OPEN = ("/health", "/health/ready", "/", "/favicon.ico", "/static/icon.svg")


@pytest.fixture
def engine(tiny_bundle: Path) -> IdleEngine:
    return IdleEngine(tiny_bundle)


def app_of(engine: IdleEngine, **settings: Any) -> Starlette:
    return create_app(engine, ServerSettings(**settings), Metrics("m"))  # type: ignore[arg-type]


def client_of(engine: IdleEngine, **settings: Any) -> TestClient:
    return TestClient(app_of(engine, **{"allowed_hosts": ("testserver",), **settings}), raise_server_exceptions=False)


class TestKeys:
    @pytest.mark.parametrize("path", GUARDED)
    def test_a_guarded_path_wants_one(self, engine: IdleEngine, path: str) -> None:
        answer = client_of(engine, api_keys=KEYS).get(path)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert "x-request-id" in answer.headers

    @pytest.mark.parametrize("path", OPEN)
    def test_health_and_the_page_want_none(self, engine: IdleEngine, path: str) -> None:
        assert client_of(engine, api_keys=KEYS).get(path).status_code == 200

    @pytest.mark.parametrize("key", KEYS)
    def test_each_key_opens(self, engine: IdleEngine, key: str) -> None:
        client = client_of(engine, api_keys=KEYS)
        for scheme in ("Bearer", "bearer"):
            assert client.get("/v1/models", headers={"Authorization": f"{scheme} {key}"}).status_code == 200

    @pytest.mark.parametrize(
        "header", ["Bearer", "Bearer ", "Bearer first", "Bearer first-key2", "Basic first-key", "first-key", "Bearer \xe9"]
    )
    def test_nothing_else_does(self, engine: IdleEngine, header: str) -> None:
        answer = client_of(engine, api_keys=KEYS).get("/v1/models", headers={"Authorization": header.encode("latin-1")})
        assert answer.status_code == 401
        assert "first" not in answer.text

    def test_without_keys_any_is_accepted(self, engine: IdleEngine) -> None:
        assert client_of(engine).get("/v1/models", headers={"Authorization": "Bearer whatever"}).status_code == 200

    def test_every_key_is_compared_each_time_in_constant_time(self, engine: IdleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        compared, real = [], hmac.compare_digest
        monkeypatch.setattr(hmac, "compare_digest", lambda left, right: compared.append((len(left), len(right))) or real(left, right))
        client_of(engine, api_keys=KEYS).get("/v1/models", headers={"Authorization": "Bearer first-key"})
        assert compared == [(32, 32), (32, 32)]

    def test_a_path_that_looks_open_is_not(self, engine: IdleEngine) -> None:
        client = client_of(engine, api_keys=KEYS)
        assert [client.get(path).status_code for path in ("/healthy", "/health/", "/static/a/b")] == [401] * 3


class TestNamesOfTheServer:
    """A page whose own name leads to 127.0.0.1 (DNS rebinding) is of the server's origin for the browser: only the name tells."""

    @staticmethod
    def status(engine: IdleEngine, name: str, path: str = "/v1/models", **settings: Any) -> int:
        return client_of(engine, **{"allowed_hosts": (), **settings}).get(path, headers={"Host": name}).status_code

    @pytest.mark.parametrize("host", ["localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:9", "[::1]", "[::1]:8000", "localhost."])
    def test_names_of_loopback_are_its_own(self, engine: IdleEngine, host: str) -> None:
        assert self.status(engine, host) == 200

    @pytest.mark.parametrize(
        "host",
        ["rebound.example", "rebound.example:8000", "localhost.rebound.example", "127.0.0.1.rebound.example", "localhost:80:80", "::1", ""],
    )
    @pytest.mark.parametrize("path", ["/", "/v1/models", "/metrics", "/nowhere", "/static/page.js"])
    def test_others_are_refused(self, engine: IdleEngine, host: str, path: str) -> None:
        client = client_of(engine, allowed_hosts=())
        answer = client.get(path, headers={"Host": host})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (403, "invalid_request_error", "host_not_allowed")
        for words in ("localhost, 127.0.0.1, [::1]", repr(host) if host else "found none", "--allowed-host", "--api-key"):
            assert words in error["message"]
        assert "x-request-id" in answer.headers

    def test_bodies_and_preflights_of_others_are_refused_too(self, engine: IdleEngine) -> None:
        client = client_of(engine, allowed_hosts=(), cors_origins=("*",))
        headers = {"Host": "rebound.example", "Origin": "http://rebound.example"}
        assert client.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code == 403
        assert client.options("/tokenize", headers=headers | {"Access-Control-Request-Method": "POST"}).status_code == 403

    @pytest.mark.parametrize("path", ["/health", "/health/ready"])
    def test_health_is_told_to_any(self, engine: IdleEngine, path: str) -> None:
        assert self.status(engine, "rebound.example", path) == 200

    @pytest.mark.parametrize(("bound", "host"), [("127.0.0.5", "127.0.0.5:8000"), ("::1", "[::1]:8000"), ("[::1]", "[::1]")])
    def test_the_address_it_listens_on_is_its_own(self, engine: IdleEngine, bound: str, host: str) -> None:
        assert self.status(engine, host, host=bound) == 200
        assert self.status(engine, "rebound.example", host=bound) == 403

    @pytest.mark.parametrize(("allowed", "status"), [("Models.example", 200), ("models.example.", 200), ("[fd00::1]", 403), ("*", 200)])
    def test_further_names_can_be_allowed(self, engine: IdleEngine, allowed: str, status: int) -> None:
        assert self.status(engine, "models.EXAMPLE:443", allowed_hosts=(allowed,)) == status

    def test_with_a_key_or_open_to_the_network_any_name_will_do(self, engine: IdleEngine) -> None:
        assert self.status(engine, "models.example", api_keys=KEYS) == 401
        assert self.status(engine, "models.example", host="0.0.0.0") == 200


class TestBodyLimit:
    def test_a_stated_length_over_the_limit_is_refused(self, engine: IdleEngine) -> None:
        answer = client_of(engine, max_body_bytes=2000).post("/tokenize", json={"prompt": "a" * 2000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert "2000" in answer.json()["error"]["message"]

    @pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/v1/chat/completions"])
    def test_so_is_a_chunked_body_that_grows_over_it(self, engine: IdleEngine, path: str) -> None:
        sent = []

        def chunks() -> Iterator[bytes]:
            for _ in range(100):
                sent.append(1)
                yield b"a" * 100

        answer = client_of(engine, max_body_bytes=2000).post(path, content=chunks(), headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

    def test_a_body_of_just_the_limit_passes(self, engine: IdleEngine) -> None:
        content = b'{"prompt": "a"' + b" " * (2000 - 15) + b"}"
        assert len(content) == 2000
        headers = {"content-type": "application/json"}
        assert client_of(engine, max_body_bytes=2000).post("/tokenize", content=content, headers=headers).status_code == 200


class TestBrowsers:
    def test_no_origin_is_allowed_unless_asked_for(self, engine: IdleEngine) -> None:
        answer = client_of(engine).get("/v1/models", headers={"Origin": "https://a.example"})
        assert not [name for name in answer.headers if name.startswith("access-control")]

    def test_a_preflight_needs_no_key(self, engine: IdleEngine) -> None:
        client = client_of(engine, api_keys=KEYS, cors_origins=("https://a.example",))
        asking = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        answer = client.options("/v1/chat/completions", headers=asking)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://a.example")
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        assert client.options("/v1/models", headers=asking | {"Origin": "https://b.example"}).status_code == 400

    def test_errors_can_be_read_from_an_allowed_origin(self, engine: IdleEngine) -> None:
        client = client_of(engine, api_keys=KEYS, cors_origins=("https://a.example",))
        answer = client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "https://a.example")
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()

    @pytest.mark.parametrize("path", ["/", "/v1/models", "/nowhere"])
    def test_answers_tell_browsers_to_load_and_embed_nothing_foreign(self, engine: IdleEngine, path: str) -> None:
        headers = client_of(engine).get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == "'self'"

    def test_the_icon_that_a_browser_asks_for_is_one_that_the_policy_lets_it_show(self, engine: IdleEngine) -> None:
        answer = client_of(engine, api_keys=KEYS).get("/favicon.ico")
        assert answer.headers["content-type"] == "image/svg+xml"
        assert answer.text.lstrip().startswith("<svg")
        assert "img-src 'self'" in answer.headers["content-security-policy"]

    @pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
    def test_a_foreign_page_cannot_start_work_with_a_simple_request(self, engine: IdleEngine, content_type: str | None) -> None:
        headers = {} if content_type is None else {"content-type": content_type}
        assert client_of(engine).post("/tokenize", content=b'{"prompt": "a"}', headers=headers).status_code == 400
