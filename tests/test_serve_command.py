"""`domino-deploy serve`: a real process that starts, answers, drains and ends; and flags that are refused before anything loads."""

from __future__ import annotations

import builtins
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serve_command import invoke

START_SECONDS = 120.0
BODY = {"model": "tiny", "prompt": "Hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
# The command with an engine so slow that 80 tokens take 40 s.
SLOW_COMMAND = """
import time
from domino_deploy.cli import main
from domino_deploy.runtime.scheduler import Scheduler

step = Scheduler.step

def slow_step(scheduler):
    time.sleep(0.5)
    return step(scheduler)

Scheduler.step = slow_step
main()
"""


class Process:
    """A serving process; `log` and `out` are where its streams go."""

    def __init__(self, folder: Path, bundle: Path, *flags: str, python: Sequence[str] = ("-m", "domino_deploy.cli")) -> None:
        self.out, self.log = folder / "out", folder / "log"
        command = [sys.executable, *python, "serve", str(bundle), "--port", "0", "--served-model-name", "tiny", *flags]
        with self.out.open("w") as out, self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=out, stderr=log)
        self.url = self._await(self._announced)

    def _announced(self) -> str | None:
        lines = [line for line in self.out.read_text().splitlines() if line.startswith("Serving ")]
        return lines[0].rpartition(" ")[2] if lines else None

    def _await(self, what: Callable[[], str | None]) -> str:
        deadline = time.monotonic() + START_SECONDS
        while (found := what()) is None:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        return found


@pytest.fixture
def start(tiny_bundle: Path, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*flags: str, **options: Any) -> Process:
        started.append(Process(tmp_path, tiny_bundle, "--threads", "1", "--max-model-len", "96", *flags, **options))
        return started[-1]

    yield start
    for process in started:
        if process.process.poll() is None:
            process.process.kill()
            process.process.wait()


def test_it_serves_drains_a_stream_on_sigterm_and_exits_with_0(start: Callable[..., Process]) -> None:
    flags = ("--api-key", "k1", "--max-num-seqs", "2", "--fixed-width")
    server = start("--log-format", "json", "--log-level", "debug", *flags)
    key = {"Authorization": "Bearer k1"}
    plan = server.out.read_text()
    for words in ("float32", "2 sequences of up to 96 tokens", "1 API key(s)", "memory", f"Serving tiny at {server.url}"):
        assert words in plan
    assert httpx.get(f"{server.url}/models").status_code == 401
    assert httpx.get(f"{server.url}/models", headers=key).json()["data"][0]["max_model_len"] == 96
    whole = httpx.post(f"{server.url}/completions", json=BODY, headers=key | {"x-request-id": "whole"}, timeout=60).json()
    text, lines = "", []
    headers = key | {"x-request-id": "streamed"}
    with httpx.stream("POST", f"{server.url}/completions", json=BODY | {"stream": True}, headers=headers, timeout=60) as answer:
        for line in answer.iter_lines():
            if not lines:
                server.process.send_signal(signal.SIGTERM)
            lines.append(line)
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert server.process.wait(60) == 0
    assert text == whole["choices"][0]["text"]
    logged = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert "uvicorn.error" in {line["logger"] for line in logged}  # its lines take the same form
    of_requests = {line["request_id"]: line for line in logged if line["message"] == "request"}
    for name in ("whole", "streamed"):
        expected = {"model": "tiny", "status": 200, "finish_reason": "length", "prompt_tokens": whole["usage"]["prompt_tokens"]}
        assert of_requests[name].items() >= (expected | {"generated_tokens": 40}).items()
        assert of_requests[name]["tau"] >= 1
    assert "Hello" not in server.log.read_text()
    assert text[:10] not in server.log.read_text()


def test_a_second_signal_ends_it_at_once(start: Callable[..., Process]) -> None:
    server = start("--drain-seconds", "600", python=("-c", SLOW_COMMAND))
    body = BODY | {"stream": True, "max_tokens": 80, "speculative": False}
    with httpx.stream("POST", f"{server.url}/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{server.url.removesuffix('/v1')}/health/ready").status_code != 503:
            time.sleep(0.01)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 20  # its answer had twice as much to go


class TestRefusals:
    @pytest.fixture(autouse=True)
    def serves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A flag that is let through fails its test, instead of serving for ever."""
        from domino_deploy.runtime.engine import Engine

        monkeypatch.setattr(Engine, "open", classmethod(lambda cls, *bundle, **choices: pytest.fail("it was let through")))

    def test_a_missing_package_names_the_extra(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = builtins.__import__

        def without(name: str, *arguments: Any) -> Any:
            if name.partition(".")[0] in ("starlette", "uvicorn"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return real(name, *arguments)

        for name in [name for name in sys.modules if name.startswith("domino_deploy.server.") or name.partition(".")[0] == "starlette"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(builtins, "__import__", without)
        done = invoke(tmp_path)
        assert done.exit_code == 3
        assert "pip install 'domino-deploy[serve]'" in done.output

    def test_a_port_in_use_is_one_line(self, tiny_bundle: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            done = invoke(tiny_bundle, "--port", taken.getsockname()[1])
        assert done.exit_code == 2
        assert "in use" in done.output

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--port", "99999"], "'--port': 99999 is not in the range"),
            (["--max-num-seqs", "100000000"], "'--max-num-seqs': 100000000 is not in the range 1<=x<=1024"),
            (["--api-key", "a b"], "API keys must be visible ASCII"),
            (["--cors-origin", "example.com"], "CORS origin"),
            (["--allowed-host", "http://a.example"], "allowed host"),
            (["--chat-template-kwargs", "[]"], "--chat-template-kwargs"),
            (["--chat-template-kwargs", '{"messages": 1}'], "found messages, which the server sets itself"),
            (["--chat-template-kwargs", '{"tools": [], "chat_template": ""}'], "found chat_template, which the server sets itself"),
            (["--speculative-config", "{"], "--speculative-config as a JSON object"),
            (["--speculative-config", '{"method": "eagle"}'], "expected domino"),
            (["--speculative-config", '{"method": "domino", "model": "x", "num_speculative_tokens": -1}'], "model: not a field"),
            (["--speculative-config", "{}", "--no-speculation"], "--no-speculation"),
            (["--drafter", "none", "--no-speculation"], "at most one of"),
        ],
    )
    def test_flags_that_cannot_be_used_are_named(self, tiny_bundle: Path, flags: list[str], words: str) -> None:
        done = invoke(tiny_bundle, *flags)
        assert done.exit_code == 2, done.output
        assert words in done.output

    def test_more_than_this_target_or_machine_has_is_told_by_its_option(self, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from domino_deploy.runtime import engine, opening

        def checked(bundle: Path, **choices: Any) -> Any:
            opening.checked_bundle(bundle, choices["backend"], choices["provider"], choices["drafter"], choices["max_model_len"], 1)
            pytest.fail("it was let through")

        monkeypatch.setattr(engine.Engine, "open", staticmethod(checked))
        done = invoke(tiny_bundle, "--port", 0, "--max-model-len", 100000)
        assert done.exit_code == 2
        assert "--max-model-len must lie in [1, " in done.stderr
        assert "found 100000" in done.stderr

    def test_a_key_file_must_hold_keys(self, tiny_bundle: Path, tmp_path: Path) -> None:
        (tmp_path / "keys").write_text("\n \n")
        assert "found none" in invoke(tiny_bundle, "--api-key-file", tmp_path / "keys").output
        assert "unreadable" in invoke(tiny_bundle, "--api-key-file", tmp_path / "missing").output

    def test_no_bundle_is_exit_code_4(self, tmp_path: Path) -> None:
        assert invoke(tmp_path).exit_code == 4


def test_help_shows_the_options_in_groups() -> None:
    lines = invoke("--help").output.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith((" ", "Usage"))]
    assert titles == ["Address and access:", "Engine:", "Speculation:", "Requests:", "Metrics and logs:", "Other options:"]
    others = lines[lines.index("Other options:") + 1 :]
    assert [line.split()[0] for line in others if line.startswith("  -")] == ["-h,"]
