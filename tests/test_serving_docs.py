"""docs/serving.md: its snippets run against a real server, and what it lists is what there is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from domino_deploy.cli import main
from domino_deploy.cli.other_servers import LLAMA_SERVER, VLLM
from domino_deploy.runtime.controller import Reason
from domino_deploy.server.schemas_chat import ChatBody
from domino_deploy.server.schemas_completions import CompletionBody

PAGE = (Path(__file__).parents[1] / "docs" / "serving.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED = set(re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGE)))


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title}"
    return found[1]


def snippets(language: str) -> list[str]:
    return [body for found, body in FENCE.findall(section("Clients")) if found == language]


def at(server: Any, snippet: str) -> str:
    assert URL in snippet
    return snippet.replace(URL, server.url)


def output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("snippet", snippets("python"), ids=["openai", "langchain"])
def test_python_snippets_print_an_answer(tiny_server: Any, snippet: str) -> None:
    assert output([sys.executable, "-c", at(tiny_server, snippet)]).strip()


def test_curl_gets_an_answer_and_a_stream(tiny_server: Any) -> None:
    whole, stream = (output(["bash", "-euo", "pipefail", "-c", at(tiny_server, snippet)]) for snippet in snippets("bash"))
    text = json.loads(whole)["choices"][0]["message"]["content"]
    *events, done = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert done == "data: [DONE]".removeprefix("data: ")
    deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text
    assert json.loads(events[-1])["usage"]["completion_tokens"] == json.loads(whole)["usage"]["completion_tokens"]


def test_lm_evals_requests_are_answered(tiny_server: Any) -> None:
    """lm-eval is not installed here: what it asks, at the addresses of the snippet; scripts/clients runs the real one."""
    (snippet,) = snippets("console")
    arguments = dict(pair.split("=", 1) for pair in re.search(r"--model_args (\S+)", at(tiny_server, snippet))[1].split(","))
    base = arguments["base_url"].removesuffix("/v1/completions")
    with httpx.Client(headers={"Authorization": "Bearer KEY"}) as client:
        assert isinstance(client.get(f"{base}/tokenizer_info").json()["eos_token"], str)
        asked = {"prompt": "The capital of France is", "add_special_tokens": False}
        tokens = client.post(f"{base}/tokenize", json=asked).json()["tokens"]
        body: dict[str, Any] = {"model": arguments["model"], "prompt": [tokens, tokens[:2]], "echo": True, "max_tokens": 1}
        answer = client.post(arguments["base_url"], json={**body, "logprobs": 1, "temperature": 0, "seed": 1234}).json()
    first, second = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert len(first["logprobs"]["token_logprobs"]) == len(tokens) + 1
    # The same beginning: the same log-probabilities, to the last digits.
    pairs = zip(first["logprobs"]["token_logprobs"][1:2], second["logprobs"]["token_logprobs"][1:2], strict=True)
    assert all(one == pytest.approx(other, abs=1e-5) for one, other in pairs)


def test_open_webuis_settings_lead_to_models_and_streams(tiny_server: Any) -> None:
    settings = dict(line.split("=", 1) for line in at(tiny_server, snippets("ini")[0]).split())
    headers = {"Authorization": f"Bearer {settings['OPENAI_API_KEY']}"}
    base = settings["OPENAI_API_BASE_URL"]
    name = httpx.get(f"{base}/models", headers=headers).json()["data"][0]["id"]
    # It forces usage, and adds fields of its own.
    body = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 4, "chat_id": "1"}
    answer = httpx.post(f"{base}/chat/completions", headers=headers, json={**body, "stream_options": {"include_usage": True}})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


def serve_options() -> set[str]:
    command = main.get_command(click.Context(main), "serve")
    assert command is not None
    return {name for parameter in command.params for name in parameter.opts if name.startswith("--")} - {"--help"}


def test_every_option_is_listed_and_no_other() -> None:
    assert set(re.findall(r"`(--[a-z-]+)`", section("Options"))) == serve_options()


MIGRATION = re.findall(r"^\| ([^|]*`-[^|]*) \| ([^|]*) \|$", section("Coming from vLLM or llama-server"), re.MULTILINE)


@pytest.mark.parametrize(("theirs", "ours"), MIGRATION, ids=[theirs for theirs, _ in MIGRATION])
def test_a_flag_of_another_server_leads_to_an_option_or_to_a_reason_why_there_is_none(theirs: str, ours: str) -> None:
    named = set(re.findall(r"`(--[a-z-]+)`", ours))
    assert named <= serve_options()
    assert named or ours.startswith(("none: ", "BUNDLE"))
    # A flag that is here by the same name is not said to be missing.
    same = set(re.findall(r"`(--[a-z-]+)`", theirs)) & serve_options()
    assert same <= named


def test_the_tables_are_those_that_the_command_tells() -> None:
    told = [(", ".join(f"`{option}`" for option in options), here) for table in (VLLM, LLAMA_SERVER) for options, here in table.items()]
    assert told == MIGRATION


@pytest.mark.parametrize(("body", "title"), [(ChatBody, "chat only"), (CompletionBody, "completions only")], ids=["chat", "completions"])
def test_every_field_is_listed(body: Any, title: str) -> None:
    fields = section("Fields")
    assert title in fields
    listed = set(re.findall(r"`([a-z_]+)`", fields))
    assert set(body.model_fields) - listed == set()
    assert set(body.not_honoured) - listed == set()


def test_fields_said_to_be_refused_are() -> None:
    refused = re.search(r"Refused unless they ask for nothing: (.*?)\n\n", section("Fields"), re.DOTALL)
    assert refused
    known: Mapping[str, object] = {**ChatBody.not_honoured, **CompletionBody.not_honoured}
    assert set(re.findall(r"`([a-z_]+)`", refused[1])) == set(known) - set(CompletionBody.model_fields)


def test_every_metric_is_listed_and_no_other(tiny_server: Any) -> None:
    served = set()
    for family in text_string_to_metric_families(tiny_server.get("/metrics")):
        if not family.name.endswith("_created"):  # the client library's own, beside counters and histograms
            served.add(f"{family.name}_total" if family.type == "counter" else family.name)
    assert {name for name in NAMED if re.fullmatch(r"(vllm:|domino_)[a-z0-9_]+", name)} == served


def test_every_endpoint_is_listed(tiny_server: Any) -> None:
    paths = json.loads(tiny_server.get("/openapi.json"))["paths"]
    listed = section("Endpoints")
    assert [path for path in paths if path.split("{")[0].rstrip("/") not in listed] == []


def test_reasons_for_plain_decoding_are_listed() -> None:
    asks_for_drafts = {Reason.FIXED, Reason.PAYS, Reason.SPECULATION_PROBE}
    assert {str(reason) for reason in set(Reason) - asks_for_drafts} - NAMED == set()
