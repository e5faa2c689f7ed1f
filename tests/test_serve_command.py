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


def test_it_serves_drains_a_stream_on_sigterm_and_exits_with_0(start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOMINO_DEPLOY_SERVE_PROT", "1")
    flags = ("--api-key", "k1", "--max-num-seqs", "2", "--fixed-width", "--num-speculative-tokens", "40")
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
    warned = [line["message"] for line in logged if line["level"] == "warning"]
    assert "DOMINO_DEPLOY_SERVE_PROT" in warned[0]
    assert "40 is the same as" in warned[1]
    assert logged[-1]["message"].startswith("Ended: ")
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


UNUSABLE = [
    ("--cors-origin", "example.com"),
    ("--allowed-host", "a.example:8000"),
    ("--api-key", "schl\u00fcssel"),
    ("--chat-template-kwargs", '{"tools":1}'),
]


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
            (["--api-key", "a b"], "found 1 of 1 that are not"),
            (["--allowed-host", "http://a.example"], "found 'http://a.example'"),
            (["--chat-template-kwargs", "[]"], "--chat-template-kwargs"),
            (["--chat-template-kwargs", '{"messages": 1}'], "found messages, which the server sets itself"),
            (["--chat-template-kwargs", '{"tools": [], "chat_template": ""}'], "found tools, chat_template, which the server sets itself"),
            (["--speculative-config", "{"], "--speculative-config as a JSON object"),
            (["--speculative-config", '{"method": "eagle"}'], "expected domino"),
            (
                ["--speculative-config", '{"method": "domino", "model": "x", "num_speculative_tokens": -1}'],
                "model: the drafter is in BUNDLE",
            ),
            (["--speculative-config", '{"method": "ngram", "prompt_lookup_max": 4}'], "prompt_lookup_max: expected 3, which is fixed here"),
            (["--speculative-config", '{"prompt_lookup_min": 1}'], "prompt_lookup_min: expected for the method ngram alone"),
            (["--speculative-config", "{}", "--no-speculation"], "--no-speculation"),
            (["--drafter", "none", "--no-speculation"], "at most one of"),
        ],
    )
    def test_flags_that_cannot_be_used_are_named(self, tiny_bundle: Path, flags: list[str], words: str) -> None:
        done = invoke(tiny_bundle, *flags)
        assert done.exit_code == 2, done.output
        assert words in done.output

    def test_a_provider_of_another_backend_is_refused_before_the_plan(self, tiny_bundle: Path) -> None:
        done = invoke(tiny_bundle, "--port", 0, "--backend", "eager", "--provider", "cuda")
        assert (done.exit_code, done.stdout) == (2, "")
        assert "found cuda for eager" in done.stderr

    @pytest.mark.parametrize("length", ["100000", "100k"])
    def test_more_than_this_target_has_is_told_by_its_option_before_the_plan(self, tiny_bundle: Path, length: str) -> None:
        done = invoke(tiny_bundle, "--port", 0, "--max-model-len", length)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "--max-model-len must lie in [1, " in done.stderr
        assert "found 100000" in done.stderr

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--max-num-batched-tokens", "2048"], "found --max-num-batched-tokens. It is vLLM's; here it is --prefill-rows, for"),
            (["--max_num_batched_tokens=2048"], "here it is --prefill-rows"),
            (["--ssl-keyfile", "x"], "there is none here: put a proxy with TLS in front."),
            (["-hf", "a/b"], "found -hf. It is llama-server's; here it is BUNDLE"),
            (["-fa"], "found -fa. It is llama-server's; there is none here: --backend"),
            (["--swap-space", "4"], "found --swap-space. It is vLLM's; there is none here"),
            (["-np", "4"], "found -np. It is llama-server's; here it is --max-num-seqs."),
            (["-tp", "2"], "found -tp. It is vLLM's; there is none here: one process serves on one device."),
            (["-c", "4096"], "found -c. It is llama-server's; here it is --max-model-len"),
            (["-m", "x", "-md", "y"], "found -m. It is llama-server's; here it is BUNDLE"),
        ],
    )
    def test_options_of_other_servers_are_told_what_stands_in_their_place(self, tiny_bundle: Path, flags: list[str], words: str) -> None:
        done = invoke(tiny_bundle, *flags)
        assert done.exit_code == 2
        assert words in done.stderr
        assert "Did you mean" not in done.stderr

    def test_an_option_of_nobody_is_still_guessed_at(self, tiny_bundle: Path) -> None:
        assert "--max-queue" in invoke(tiny_bundle, "--max-quue", "1").stderr

    @pytest.mark.parametrize("value", ["", " ", "\n\t"])
    @pytest.mark.parametrize("variable", ["DOMINO_DEPLOY_SERVE_API_KEY", "DOMINO_DEPLOY_SERVE_API_KEY_FILE"])
    @pytest.mark.parametrize("flags", [[], ["--host", "0.0.0.0"]])
    def test_a_variable_for_keys_without_any_does_not_open_the_server(
        self, tiny_bundle: Path, variable: str, value: str, flags: list[str]
    ) -> None:
        done = invoke(tiny_bundle, *flags, **{variable: value})
        assert done.exit_code == 2
        assert f"Expected API keys by the environment variable {variable}, found it empty." in done.stderr

    def test_a_key_with_a_space_in_a_variable_is_one_bad_key(self, tiny_bundle: Path) -> None:
        done = invoke(tiny_bundle, DOMINO_DEPLOY_SERVE_API_KEY="my key")
        assert done.exit_code == 2
        assert "found 1 of 1 that are not" in done.stderr

    def test_a_key_file_must_hold_keys(self, tiny_bundle: Path, tmp_path: Path) -> None:
        (tmp_path / "keys").write_text("\n \n")
        assert "found none" in invoke(tiny_bundle, "--api-key-file", tmp_path / "keys").output
        assert "unreadable" in invoke(tiny_bundle, "--api-key-file", tmp_path / "missing").output
        (tmp_path / "keys").write_text("good\nnot good\n")
        done = invoke(tiny_bundle, "--api-key-file", tmp_path / "keys")
        assert done.exit_code == 2
        assert "found 1 of 2 that are not. Correct --api-key-file." in done.output
        assert "not good" not in done.output

    @pytest.mark.parametrize(("option", "value"), [*UNUSABLE, ("--served-model-name", " ")])
    def test_a_text_that_cannot_be_used_is_told_by_its_option(self, tiny_bundle: Path, option: str, value: str) -> None:
        done = invoke(tiny_bundle, option, value)
        assert done.exit_code == 2
        assert f"  - {option} must " in done.stderr

    @pytest.mark.parametrize(("option", "value"), UNUSABLE)
    def test_and_by_its_variable_where_it_comes_from_there(self, tiny_bundle: Path, option: str, value: str) -> None:
        variable = f"DOMINO_DEPLOY_SERVE_{option.strip('-').upper().replace('-', '_')}"
        done = invoke(tiny_bundle, **{variable: value})
        assert done.exit_code == 2
        assert f"  - {option} must " in done.stderr
        assert f"{option} was read from the environment variable {variable}." in done.stderr

    def test_no_bundle_is_exit_code_4(self, tmp_path: Path) -> None:
        assert invoke(tmp_path).exit_code == 4


def test_help_shows_the_options_in_groups() -> None:
    lines = invoke("--help").output.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith((" ", "Usage"))]
    assert titles == ["Address and access:", "Engine:", "Speculation:", "Requests:", "Metrics and logs:", "Other options:"]
    others = lines[lines.index("Other options:") + 1 :]
    assert [line.split()[0] for line in others if line.startswith("  -")] == ["-h,"]
