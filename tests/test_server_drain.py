"""The life of a server: it listens, warms up, drains on a signal, and ends when its engine dies."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from domino_deploy.errors import RequestError
from domino_deploy.runtime.engine import Engine
from domino_deploy.server.app import create_app
from domino_deploy.server.run import base_url, bound_socket, run
from domino_deploy.server.settings import ServerSettings
from tests.support.fake_engine import ScriptedEngine

TEXT = "one two three four five six"
BODY = {"model": "m", "prompt": "Count:", "max_tokens": 60, "temperature": 0}
WATCHDOG_SECONDS = 60.0


class Server:
    """A server in the test's own thread, and a client that acts in another one once it is announced."""

    def __init__(self, engine: ScriptedEngine, **settings: Any) -> None:
        self.engine = engine
        self.socket = bound_socket("127.0.0.1", 0)
        self.url = base_url(self.socket, "127.0.0.1")
        self.root = self.url.removesuffix("/v1")
        self._app = create_app(engine, ServerSettings(served_model_names=("m",), **settings))
        self.announced = 0

    def run(self, client: Callable[[Server], None], *, waits: bool = True) -> int:
        """Serve until it ends; the client starts with the announcement, or at once; what it raises is raised here."""
        raised: list[BaseException] = []
        is_running = threading.Event()  # its signal handlers are there; without them a signal would end pytest

        def act() -> None:
            try:
                client(self)
            except BaseException as error:
                raised.append(error)
                if is_running.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=act)

        def announce() -> None:
            self.announced += 1
            is_running.set()
            if waits:
                thread.start()

        watchdog = threading.Timer(WATCHDOG_SECONDS, os.kill, (os.getpid(), signal.SIGTERM))
        watchdog.start()
        if not waits:
            thread.start()
        try:
            code = run(self._app, self.socket, announce=announce)
        finally:
            is_running.clear()
            watchdog.cancel()
        if thread.ident is not None:
            thread.join()
        if raised:
            raise raised[0]
        return code


def told_to_end(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WATCHDOG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def events(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_running_stream_finish_and_refuses_new_requests(
    tiny_bundle: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    def client(server: Server) -> None:
        text = ""
        with httpx.stream("POST", f"{server.url}/completions", json=BODY | {"stream": True}, timeout=30) as answer:
            for index, event in enumerate(events(answer.iter_lines())):
                if index == 0:
                    told_to_end(number)
                    until(lambda: httpx.get(f"{server.root}/health/ready").status_code == 503)
                    refused = httpx.post(f"{server.url}/completions", json=BODY)
                    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
                    assert "retry-after" in refused.headers
                    assert httpx.get(f"{server.root}/health").status_code == 200
                text += event["choices"][0]["text"]
        assert text == TEXT

    with caplog.at_level(logging.INFO, "domino_deploy.server"):
        assert Server(ScriptedEngine(tiny_bundle, TEXT, seconds_per_row=0.02)).run(client) == 0
    assert caplog.messages[-1] == "Ended: 1 requests ended, 0 aborted"


def test_what_does_not_finish_in_time_is_aborted_and_told_so(tiny_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    found: dict[str, Any] = {}

    def client(server: Server) -> None:
        def whole() -> None:
            found["whole"] = httpx.post(f"{server.url}/completions", json=BODY | {"ignore_eos": True, "max_tokens": 400}, timeout=30)

        other = threading.Thread(target=whole)
        other.start()
        body = BODY | {"stream": True, "ignore_eos": True, "max_tokens": 400}
        with httpx.stream("POST", f"{server.url}/completions", json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(events(lines))
            until(lambda: server.engine.snapshot().running == 2)
            told_to_end()
            found["lines"] = [line for line in lines if line]
        other.join()

    with caplog.at_level(logging.INFO, "domino_deploy.server"):
        assert Server(ScriptedEngine(tiny_bundle, TEXT, seconds_per_row=0.02), drain_seconds=0.3).run(client) == 0
    assert caplog.messages[-1] == "Ended: 0 requests ended, 2 aborted"
    *_, last, done = found["lines"]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert (found["whole"].status_code, found["whole"].json()["error"]["code"]) == (503, "unavailable")


def ended_at_the_first_prompt(server: Server, body: dict[str, Any], *, is_stream: bool) -> list[Any]:
    """What comes of three prompts for one slot while the server is told to end."""
    ending = threading.Thread(target=lambda: (until(lambda: server.engine.snapshot().running == 1), told_to_end()))
    ending.start()
    body = BODY | {"prompt": ["a", "b", "c"], "stream": is_stream} | body
    with httpx.stream("POST", f"{server.url}/completions", json=body, timeout=30) as answer:
        found = list(events(answer.iter_lines())) if is_stream else [json.loads(answer.read())]
    ending.join()
    return found


@pytest.mark.parametrize("is_stream", [True, False])
def test_later_prompts_of_a_running_request_run_too(tiny_bundle: Path, is_stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    texts, errors = ["", "", ""], []

    def client(server: Server) -> None:
        for part in ended_at_the_first_prompt(server, {}, is_stream=is_stream):
            errors.extend([part["error"]] if "error" in part else [])
            for choice in part.get("choices", ()):
                texts[choice["index"]] += choice["text"]

    with caplog.at_level(logging.INFO, "domino_deploy.server"):
        assert Server(ScriptedEngine(tiny_bundle, TEXT, max_sequences=1, seconds_per_row=0.03)).run(client) == 0
    assert (texts, errors) == ([TEXT] * 3, [])
    assert caplog.messages[-1] == "Ended: 1 requests ended, 0 aborted"


@pytest.mark.parametrize("is_stream", [True, False])
def test_later_prompts_are_aborted_with_their_request(tiny_bundle: Path, is_stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    found: list[Any] = []

    def client(server: Server) -> None:
        found.extend(ended_at_the_first_prompt(server, {"ignore_eos": True, "max_tokens": 400}, is_stream=is_stream))

    engine = ScriptedEngine(tiny_bundle, TEXT, max_sequences=1, seconds_per_row=0.02)
    with caplog.at_level(logging.INFO, "domino_deploy.server"):
        assert Server(engine, drain_seconds=0.3).run(client) == 0
    assert caplog.messages[-1] == "Ended: 0 requests ended, 1 aborted"
    assert found[-1]["error"]["code"] == "unavailable"


def test_an_idle_server_ends_at_once(tiny_bundle: Path) -> None:
    started: list[float] = []

    def client(server: Server) -> None:
        with httpx.Client() as pool:  # a pool keeps its connection open
            pool.get(f"{server.root}/health")
            started.append(time.monotonic())
            told_to_end()
            until(lambda: server.socket.fileno() == -1)

    assert Server(ScriptedEngine(tiny_bundle, TEXT), drain_seconds=600.0).run(client) == 0
    assert time.monotonic() - started[0] < 20


def test_it_listens_while_it_warms_up_and_is_announced_after(tiny_bundle: Path) -> None:
    engine, gate, seen = ScriptedEngine(tiny_bundle, TEXT), threading.Event(), []
    warm_up = engine._warm_up
    engine.start = lambda: Engine.start(engine)  # type: ignore[method-assign]  # the double's own waits for the warm-up
    engine._warm_up = lambda: (gate.wait(WATCHDOG_SECONDS), warm_up())[1]  # type: ignore[method-assign]

    def client(server: Server) -> None:
        until(lambda: _answers(server.root))
        seen.append((httpx.get(f"{server.root}/health").status_code, httpx.get(f"{server.root}/health/ready").status_code))
        seen.append(server.announced)
        gate.set()
        until(lambda: server.announced > 0)
        seen.append(httpx.get(f"{server.root}/health/ready").status_code)
        told_to_end()

    server = Server(engine)
    assert server.run(client, waits=False) == 0
    assert seen == [(200, 503), 0, 200]
    assert server.announced == 1


def test_an_engine_that_dies_answers_503_and_ends_the_server_with_1(tiny_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(tiny_bundle, TEXT, seconds_per_row=0.01)
    found: dict[str, Any] = {}

    def client(server: Server) -> None:
        def fail() -> None:
            raise OSError("the device is gone")

        engine._scheduler.step = fail  # type: ignore[method-assign]
        found["answer"] = httpx.post(f"{server.url}/completions", json=BODY, timeout=30)
        found["health"] = httpx.get(f"{server.root}/health")

    assert Server(engine).run(client) == 1
    assert found["answer"].status_code in (500, 503)
    assert (found["health"].status_code, found["health"].json()["error"]["code"]) == (503, "engine_failed")
    assert "device" not in found["answer"].text + found["health"].text
    assert "the device is gone" in caplog.text


class TestAddress:
    def test_a_port_in_use_is_told(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(RequestError, match=f"free port.*{port} of 127.0.0.1 in use"):
                bound_socket("127.0.0.1", port)

    @pytest.mark.parametrize(
        ("host", "words"),
        [("203.0.113.7", "address of this machine"), ("a" * 300, "no address"), ("", "no address")],
    )
    def test_so_is_a_host_that_cannot_be_listened_on(self, host: str, words: str) -> None:
        with pytest.raises(RequestError, match=words):
            bound_socket(host, 0)

    def test_so_is_a_port_that_takes_more_rights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(self: socket.socket, address: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(socket.socket, "bind", refused)
        with pytest.raises(RequestError, match="above 1023"):
            bound_socket("127.0.0.1", 80)

    @pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("localhost", "localhost")])
    def test_the_base_url_is_one_that_clients_can_use(self, host: str, shown: str) -> None:
        with bound_socket(host, 0) as found:
            assert base_url(found, host) == f"http://{shown}:{found.getsockname()[1]}/v1"

    @pytest.mark.parametrize(("host", "shown"), [("::1", "[::1]"), ("[::1]", "[::1]"), ("::", "[::1]")])
    def test_so_it_is_with_ipv6(self, host: str, shown: str) -> None:
        with bound_socket("127.0.0.1", 0) as found:  # machines without IPv6 exist
            assert base_url(found, host) == f"http://{shown}:{found.getsockname()[1]}/v1"


def _answers(root: str) -> bool:
    try:
        return httpx.get(f"{root}/health").status_code == 200
    except httpx.TransportError:
        return False
