"""Bodies as clients of other servers send them, unchanged: what asks for nothing here changes nothing, and is no reason to refuse them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from domino_deploy.runtime.requests import GenerationParams
from tests.support.fake_engine import ScriptedEngine, client_of

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]},
    PLAIN: {"model": "tiny", "prompt": "Hello"},
}
TEXT = "A drafter proposes"
SAMPLERS = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]

# SillyTavern's text completion for llama.cpp, with its default preset.
SILLY_TAVERN: dict[str, Any] = {
    "prompt": "Hello",
    "model": "tiny",
    "max_new_tokens": 250,
    "max_tokens": 250,
    "temperature": 0.7,
    "top_p": 0.5,
    "typical_p": 1,
    "typical": 1,
    "min_p": 0,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_k": 40,
    "skew": 0,
    "min_tokens": 0,
    "add_bos_token": True,
    "smoothing_factor": 0,
    "smoothing_curve": 1,
    "dry_allowed_length": 2,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "dry_penalty_last_n": 0,
    "max_tokens_second": 0,
    "samplers": SAMPLERS,
    "stopping_strings": ["\nUser:"],
    "stop": ["\nUser:"],
    "truncation_length": 2048,
    "ban_eos_token": False,
    "skip_special_tokens": True,
    "include_reasoning": True,
    "top_a": 0,
    "tfs": 1,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "custom_token_bans": "",
    "banned_strings": [],
    "api_type": "llamacpp",
    "api_server": "http://127.0.0.1:8000",
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "nsigma": 0,
    "top_n_sigma": 0,
    "min_keep": 0,
    "adaptive_target": -0.01,
    "adaptive_decay": 0.9,
    "n": 1,
    "rep_pen": 1.2,
    "rep_pen_range": -1,
    "repetition_penalty_range": -1,
    "guidance_scale": 1,
    "negative_prompt": "",
    "repeat_penalty": 1.2,
    "repeat_last_n": -1,
    "n_predict": 250,
    "num_predict": 250,
    "num_ctx": 2048,
    "mirostat": 0,
    "ignore_eos": False,
    "rep_pen_slope": 1,
    "logit_bias": [],
    "grammar": "",
    "cache_prompt": True,
}
# The page of llama-server, with its default settings.
LLAMA_PAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "model": "tiny",
    "stream": False,
    "cache_prompt": True,
    "reasoning_format": "none",
    "samplers": "edkypmxt",
    "temperature": 0.8,
    "dynatemp_range": 0,
    "dynatemp_exponent": 1,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1,
    "xtc_probability": 0,
    "xtc_threshold": 0.1,
    "repeat_last_n": 64,
    "repeat_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "max_tokens": -1,
    "timings_per_token": False,
}
# What each of them asks for, in this server's own fields.
ASKED: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    (
        "SillyTavern",
        PLAIN,
        SILLY_TAVERN,
        {
            **{"max_tokens": 250, "temperature": 0.7, "top_p": 0.5, "top_k": 40},
            **{"repetition_penalty": 1.2, "stop": "\nUser:"},
        },
    ),
    ("llama-server's page", CHAT, LLAMA_PAGE, {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}),
]

# (path, field, values that change nothing)
NOTHING: list[tuple[str, str, list[Any]]] = [
    (CHAT, "stop", ["", []]),
    (CHAT, "modalities", [[], ["text"]]),
    (CHAT, "reasoning_effort", ["none", ""]),
    (CHAT, "think", [False]),
    (CHAT, "enable_thinking", [False]),
    (CHAT, "max_tokens", [-1]),
    (CHAT, "prediction", [{}]),
    (CHAT, "mm_processor_kwargs", [{}]),
    (CHAT, "chat_template", [""]),
    (CHAT, "logit_bias", [[], {}]),
    (CHAT, "n_predict", [-1]),
    (CHAT, "num_predict", [-1]),
    (PLAIN, "stop", [""]),
    (PLAIN, "structured_outputs", [{}, {"json_object": False}, {"regex": None}]),
    (PLAIN, "vllm_xargs", [{}]),
    (PLAIN, "kv_transfer_params", [{}]),
    (PLAIN, "template", [""]),
    (PLAIN, "lora_path", [""]),
    (PLAIN, "cache_salt", [""]),
    (PLAIN, "adapter_id", [""]),
    (PLAIN, "request_id", [""]),
    (PLAIN, "prompt_logprobs", [False]),
    (PLAIN, "logprobs", [False]),
    (PLAIN, "truncate_prompt_tokens", [-1]),
    (PLAIN, "repeat_last_n", [64, 0, -1]),
    (PLAIN, "samplers", [SAMPLERS, [name for name in SAMPLERS if name != "top_n_sigma"], "edkypmxt", "edskypmxt"]),
]

# (path, field, value): empty, or another's name of a field of ours, and yet something else is asked for.
SOMETHING: list[tuple[str, dict[str, Any]]] = [
    (PLAIN, {"do_sample": False}),
    (PLAIN, {"skip_special_tokens": False}),
    (PLAIN, {"samplers": []}),
    (PLAIN, {"samplers": ""}),
    (PLAIN, {"samplers": [*SAMPLERS[1:], SAMPLERS[0]]}),
    (PLAIN, {"json_schema": {}}),
    (PLAIN, {"format": {}}),
    (CHAT, {"web_search_options": {}}),
    (CHAT, {"include_reasoning": False}),
    (PLAIN, {"guided_whitespace_pattern": ""}),
    (PLAIN, {"n": 0}),
    (PLAIN, {"n_predict": 5, "max_tokens": 6}),
    (PLAIN, {"n_predict": True, "max_tokens": 1}),
    (PLAIN, {"max_new_tokens": 5}),
    (PLAIN, {"repeat_penalty": 1.2, "repetition_penalty": 1.1}),
    (PLAIN, {"stop_sequences": ["a"], "stop": ["b"]}),
    (PLAIN, {"repeat_last_n": 64, "repetition_penalty": 1.1}),
    (PLAIN, {"repeat_last_n": 0, "presence_penalty": 0.5}),
    (PLAIN, {"repeat_last_n": 64, "frequency_penalty": 0.5}),
]


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(tiny_bundle, TEXT) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: ScriptedEngine) -> TestClient:
    return client_of(engine)


def params_of(engine: ScriptedEngine, client: TestClient, path: str, body: dict[str, Any]) -> GenerationParams:
    """What the engine was asked for."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return engine.requests[-1].params


@pytest.mark.parametrize(("path", "body", "fields"), [case[1:] for case in ASKED], ids=[case[0] for case in ASKED])
def test_a_whole_body_of_another_client_asks_for_what_this_server_has(
    engine: ScriptedEngine, client: TestClient, path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert params_of(engine, client, path, body) == params_of(engine, client, path, {**BODIES[path], **fields})


@pytest.mark.parametrize(("path", "field", "values"), NOTHING, ids=[f"{path[-11:]} {field}" for path, field, _ in NOTHING])
def test_a_value_that_asks_for_nothing_is_as_good_as_left_out(
    engine: ScriptedEngine, client: TestClient, path: str, field: str, values: list[Any]
) -> None:
    # Of completions without a limit, that is what is said: sixteen tokens if nothing is.
    plain = params_of(engine, client, path, BODIES[path])
    for value in values:
        assert params_of(engine, client, path, {**BODIES[path], field: value}) == plain


@pytest.mark.parametrize(("path", "fields"), SOMETHING, ids=[json.dumps(fields)[:60] for _, fields in SOMETHING])
def test_an_empty_value_that_changes_the_answer_elsewhere_is_refused(client: TestClient, path: str, fields: dict[str, Any]) -> None:
    answer = client.post(path, json={**BODIES[path], **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, next(iter(fields)), "unsupported_parameter")


@pytest.mark.parametrize("name", ["max_tokens", "n_predict", "num_predict"])
def test_completions_without_a_limit_take_what_the_models_length_allows(engine: ScriptedEngine, client: TestClient, name: str) -> None:
    assert params_of(engine, client, PLAIN, {**BODIES[PLAIN], name: -1}).max_new_tokens == engine.max_model_len
    limited = {**BODIES[PLAIN], "n_predict": -1, "max_tokens": 7}
    assert params_of(engine, client, PLAIN, limited).max_new_tokens == 7


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_a_schema_of_any_object_is_llama_servers_way_to_ask_for_its_json(engine: ScriptedEngine, client: TestClient, path: str) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    for given, kind in ((schema, "json_schema"), ({}, "json_object"), (None, "json_object")):
        form = {"type": "json_object", "schema": given}
        constraint = params_of(engine, client, path, {**BODIES[path], "response_format": form}).constraint
        assert constraint is not None
        assert constraint.kind == kind
        assert constraint.source == (json.dumps(schema, separators=(",", ":")) if given else "")


def test_a_schema_beside_another_type_of_form_is_refused(client: TestClient) -> None:
    answer = client.post(PLAIN, json={**BODIES[PLAIN], "response_format": {"type": "text", "schema": {}}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format.schema")


def test_a_call_without_a_type_is_one_of_a_function(engine: ScriptedEngine, client: TestClient) -> None:
    prompts = []
    for more in ({}, {"type": None}, {"type": "function"}):
        call = {"id": "1", "function": {"name": "f", "arguments": "{}"}, **more}
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        params_of(engine, client, CHAT, {"model": "tiny", "messages": messages})
        prompts.append(engine.prompts[-1])
    assert prompts == prompts[:1] * 3


# guidellm's two requests.
GUIDELLM: list[tuple[str, dict[str, Any]]] = [
    (PLAIN, {"prompt": "Hello", "max_tokens": 40, "stop": None, "ignore_eos": True}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], "max_completion_tokens": 40}),
]


@pytest.mark.parametrize(("path", "fields"), GUIDELLM, ids=["completions", "chat"])
def test_guidellm_reads_the_usage_so_far_in_every_chunk(
    engine: ScriptedEngine, client: TestClient, path: str, fields: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = client.post(path, json={"model": "tiny", "stream": True, "stream_options": options, **fields})
    assert answer.status_code == 200, answer.text
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert counts == sorted(counts)
    assert counts[0] < counts[1] < counts[-1] == last["usage"]["completion_tokens"] == engine.witness.ends[-1][2].generated_tokens
    assert counts[0] == 0 or path == PLAIN, "the role comes before any token"
    for chunk in [*chunks, last]:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == len(engine.prompts[-1])
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert last["choices"] == []


def test_the_usage_so_far_is_that_of_the_chunks_own_choice(engine: ScriptedEngine, client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "prompt": ["Hello", "Hello, hello"], "max_tokens": 40, "stream": True, "stream_options": options}
    lines = client.post(PLAIN, json=body).text.split("\n\n")
    *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    ends = {chunk["choices"][0]["index"]: chunk["usage"]["total_tokens"] for chunk in chunks}
    assert len(ends) == 2
    assert sum(ends.values()) == last["usage"]["total_tokens"]


def test_usage_so_far_comes_with_the_usage_alone(client: TestClient) -> None:
    answer = client.post(CHAT, json={**BODIES[CHAT], "stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert answer.status_code == 200
    assert "usage" not in answer.text


# What sglang.bench_serving asks by its backends sglang-oai and vllm, and sglang-oai-chat and vllm-chat: for no usage.
SGLANG: list[tuple[str, str, dict[str, Any]]] = [
    ("completions", PLAIN, {"prompt": "Hello", "temperature": 0.0, "best_of": 1, "max_tokens": 40, "stream": True, "ignore_eos": True}),
    (
        "chat",
        CHAT,
        {
            "messages": [{"role": "user", "content": "Hello"}],
            **{"temperature": 0.0, "max_completion_tokens": 40, "stream": True, "ignore_eos": True},
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), [case[1:] for case in SGLANG], ids=[case[0] for case in SGLANG])
def test_sglangs_benchmark_reads_a_choice_from_every_line_and_counts_the_tokens_it_asked_for(
    engine: ScriptedEngine, client: TestClient, path: str, body: dict[str, Any]
) -> None:
    name = client.get("/v1/models").json()["data"][0]["id"]
    answer = client.post(path, json={"model": name, **body})
    assert answer.status_code == 200, answer.text
    # It takes each line that is not empty for JSON or the end: a comment, or a chunk without choices, is a failure to it.
    *lines, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.strip()]
    assert last == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    texts = [choice["text"] if path == PLAIN else choice["delta"].get("content", "") for choice in choices]
    assert "".join(text or "" for text in texts) == TEXT
    assert sum(bool(text) for text in texts) > 1, "its ITL is the time between two of them"
    assert engine.witness.ends[-1][2].generated_tokens == 40


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_it_reads_whole_answers_too(engine: ScriptedEngine, client: TestClient, path: str) -> None:
    body = next(fields for _, asked, fields in SGLANG if asked == path) | {"stream": False}
    answer = client.post(path, json={"model": "tiny", **body}).json()
    choice = answer["choices"][0]
    assert (choice["text"] if path == PLAIN else choice["message"]["content"]) == TEXT
    assert answer["usage"]["completion_tokens"] == 40


def test_dflashs_benchmark_reads_the_tokens_of_answers_that_it_asks_for_as_of_vllm(engine: ScriptedEngine, client: TestClient) -> None:
    body = {
        **BODIES[CHAT],
        "max_tokens": 40,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 1,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    statistics = engine.witness.ends[-1][2]
    assert answer.json()["usage"]["completion_tokens"] == statistics.generated_tokens > 0
    params = engine.requests[-1].params
    assert (params.max_new_tokens, params.sampling.temperature, params.sampling.top_p, params.sampling.top_k) == (40, 0.0, 1.0, 1)
