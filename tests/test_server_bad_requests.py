"""Requests that the API refuses, each with the status, OpenAI's error body and the place that is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from domino_deploy.runtime.text import Tokenizer
from domino_deploy.server.schemas_chat import ChatBody
from domino_deploy.server.schemas_completions import CompletionBody
from tests.support.fake_engine import ScriptedEngine, client_of

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]},
    PLAIN: {"model": "tiny", "prompt": "Hello"},
}
MISSING: Any = object()
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def client(tiny_bundle: Path) -> Iterator[TestClient]:
    with ScriptedEngine(tiny_bundle, "unused") as engine:
        yield client_of(engine)
        assert engine.requests == [], "a bad request reached the engine"


def error_of(answer: Any, status: int) -> dict[str, Any]:
    """The error of an answer, once its shape is right."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(error["message"]) < 2000
    return error


def message(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Hello", **fields}]


# (path, the field, its value, the place that the error names)
BAD_FIELDS: list[tuple[str, str, Any, str]] = [
    # types and ranges that both endpoints share; tried on one of them each
    (CHAT, "model", MISSING, "model"),
    (PLAIN, "model", 3, "model"),
    (CHAT, "temperature", "0.5", "temperature"),
    (CHAT, "temperature", -0.1, "temperature"),
    (PLAIN, "temperature", 2.5, "temperature"),
    (CHAT, "temperature", True, "temperature"),
    (CHAT, "top_p", 0, "top_p"),
    (PLAIN, "top_p", 1.5, "top_p"),
    (CHAT, "top_k", -2, "top_k"),
    (CHAT, "top_k", 2.5, "top_k"),
    (CHAT, "min_p", 1.5, "min_p"),
    (CHAT, "seed", 1.5, "seed"),
    (CHAT, "seed", 10**30, "seed"),
    (CHAT, "seed", -(2**63) - 1, "seed"),
    (PLAIN, "max_tokens", -2, "max_tokens"),
    (PLAIN, "max_tokens", "16", "max_tokens"),
    (PLAIN, "max_tokens", 0, "max_tokens"),
    (PLAIN, "max_tokens", 2**40, "max_tokens"),
    (CHAT, "max_tokens", 0, "max_tokens"),
    (CHAT, "max_completion_tokens", 0, "max_completion_tokens"),
    (CHAT, "min_tokens", 10**6, "min_tokens"),
    (CHAT, "presence_penalty", 2.5, "presence_penalty"),
    (CHAT, "frequency_penalty", -3, "frequency_penalty"),
    (CHAT, "repetition_penalty", 0, "repetition_penalty"),
    (CHAT, "logit_bias", {"5": 101}, "logit_bias.5"),
    (CHAT, "logit_bias", {"five": 1}, "logit_bias.five"),
    (CHAT, "logit_bias", {"300": 1}, "logit_bias"),
    (CHAT, "logit_bias", {str(token): 1 for token in range(1025)}, "logit_bias"),
    (CHAT, "logit_bias", [1], "logit_bias"),
    (CHAT, "stop", ["a", ""], "stop[1]"),
    (CHAT, "stop", [str(number) for number in range(17)], "stop"),
    (CHAT, "stop", 7, "stop"),
    (CHAT, "stop", "x" * 1025, "stop"),
    (CHAT, "stop_token_ids", ["5"], "stop_token_ids[0]"),
    (CHAT, "stop_token_ids", [300], "stop_token_ids"),
    (CHAT, "stop_token_ids", [-1], "stop_token_ids[0]"),
    (CHAT, "stream", "true", "stream"),
    (CHAT, "stream_options", {"include_usage": True}, "stream_options"),
    (CHAT, "ignore_eos", 1, "ignore_eos"),
    (CHAT, "user", 5, "user"),
    (CHAT, "metadata", "x", "metadata"),
    (CHAT, "speculative", "no", "speculative"),
    # known, but not honoured
    (CHAT, "n", 2, "n"),
    (PLAIN, "best_of", 2, "best_of"),
    (CHAT, "n", True, "n"),
    (CHAT, "service_tier", "flex", "service_tier"),
    (CHAT, "store", True, "store"),
    (PLAIN, "suffix", "end", "suffix"),
    (CHAT, "chat_template", "{{ 1 }}", "chat_template"),
    (CHAT, "continue_final_message", True, "continue_final_message"),
    (CHAT, "reasoning_effort", "high", "reasoning_effort"),
    (CHAT, "modalities", ["text", "audio"], "modalities"),
    (CHAT, "functions", [{"name": "f"}], "functions"),
    (CHAT, "prompt_logprobs", 1, "prompt_logprobs"),
    (CHAT, "guided_grammar", 'root ::= "a"', "guided_grammar"),
    (PLAIN, "structured_outputs", {"grammar": 'root ::= "a"'}, "structured_outputs.grammar"),
    (CHAT, "structured_outputs", {"json": {}, "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
    (CHAT, "reasoning", {"effort": "high"}, "reasoning"),
    (CHAT, "thinking", {"type": "enabled"}, "thinking"),
    (PLAIN, "prompt_embeds", "AAAA", "prompt_embeds"),
    (CHAT, "num_speculative_tokens", 3, "num_speculative_tokens"),
    (PLAIN, "use_beam_search", True, "use_beam_search"),
    (PLAIN, "return_tokens_as_token_ids", True, "return_tokens_as_token_ids"),
    (CHAT, "echo", True, "echo"),
    # messages
    (CHAT, "messages", MISSING, "messages"),
    (CHAT, "messages", [], "messages"),
    (CHAT, "messages", "Hello", "messages"),
    (CHAT, "messages", ["Hello"], "messages[0]"),
    (CHAT, "messages", [{"content": "Hello"}], "messages[0].role"),
    (CHAT, "messages", message(role="function"), "messages[0].role"),
    (CHAT, "messages", message(content=None), "messages[0].content"),
    (CHAT, "messages", message(content=5), "messages[0].content"),
    (CHAT, "messages", message(content=[]), "messages[0].content"),
    (CHAT, "messages", message(content=[{"type": "image_url", "image_url": {"url": "data:"}}]), "messages[0].content[0].type"),
    (CHAT, "messages", message(content=[{"type": "text", "text": "a"}, {"type": "input_audio"}]), "messages[0].content[1].type"),
    (CHAT, "messages", message(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (CHAT, "messages", [*message(), {"role": "assistant", "content": None}], "messages[1].content"),
    (CHAT, "messages", message(role="tool"), "messages[0].tool_call_id"),
    (CHAT, "messages", message(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]), "messages[0].tool_calls"),
    (
        CHAT,
        "messages",
        message(role="assistant", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "[1]"}}]),
        "messages[0].tool_calls[0].function.arguments",
    ),
    (CHAT, "messages", message(role="assistant", function_call={"name": "f"}), "messages[0].function_call"),
    (CHAT, "messages", message() * 4097, "messages"),
    (CHAT, "chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
    (CHAT, "chat_template_kwargs", {"chat_template": "x"}, "chat_template_kwargs.chat_template"),
    (CHAT, "chat_template_kwargs", {str(number): 1 for number in range(65)}, "chat_template_kwargs"),
    # log-probabilities, forms, tools
    (CHAT, "top_logprobs", 2, "top_logprobs"),
    (CHAT, "logprobs", 2, "logprobs"),
    (PLAIN, "logprobs", 21, "logprobs"),
    (PLAIN, "logprobs", True, "logprobs"),
    (CHAT, "response_format", {"type": "xml"}, "response_format.type"),
    (CHAT, "response_format", {"type": "json_schema"}, "response_format.json_schema"),
    (CHAT, "response_format", {"type": "text", "json_schema": SCHEMA["json_schema"]}, "response_format.json_schema"),
    (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "s"}}, "response_format.json_schema.schema"),
    *(
        (
            CHAT,
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
            "response_format.json_schema.schema",
        )
        for schema in (True, False, "object", None)
    ),
    (CHAT, "response_format", {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["x" * 2**16]}}}, "response_format"),
    (PLAIN, "structured_outputs", {"jsn": {}}, "structured_outputs"),
    (CHAT, "structured_outputs", {"regex": "a", "choice": ["a"]}, "structured_outputs"),
    (CHAT, "structured_outputs", {"regex": ["a"]}, "structured_outputs.regex"),
    (CHAT, "structured_outputs", {"choice": []}, "structured_outputs.choice"),
    (CHAT, "structured_outputs", {"choice": ["a", ""]}, "structured_outputs.choice[1]"),
    (CHAT, "structured_outputs", {"choice": ["x" * 2**15] * 2}, "structured_outputs"),
    (PLAIN, "guided_choice", "a", "guided_choice"),
    (PLAIN, "guided_choice", ["a"] * 4097, "guided_choice"),
    (PLAIN, "guided_json", True, "guided_json"),
    (PLAIN, "guided_regex", "", "guided_regex"),
    (CHAT, "tools", [{"type": "retrieval"}], "tools[0].type"),
    (CHAT, "tools", [{"type": "function", "function": {"name": "no blanks"}}], "tools[0].function.name"),
    (CHAT, "tools", [TOOL, TOOL], "tools"),
    (CHAT, "tools", [TOOL] * 129, "tools"),
    (CHAT, "tool_choice", "auto", "tool_choice"),
    (CHAT, "tool_choice", "sometimes", "tool_choice"),
    # prompts
    (PLAIN, "prompt", MISSING, "prompt"),
    (PLAIN, "prompt", None, "prompt"),
    (PLAIN, "prompt", "", "prompt"),
    (PLAIN, "prompt", [], "prompt"),
    (PLAIN, "prompt", [[]], "prompt[0]"),
    (PLAIN, "prompt", ["a", 5], "prompt[1]"),
    (PLAIN, "prompt", [5, "a"], "prompt[1]"),
    (PLAIN, "prompt", [5, -1], "prompt[1]"),
    (PLAIN, "prompt", [5, 300], "prompt"),
    (PLAIN, "prompt", [5, 10**40], "prompt[1]"),
    (PLAIN, "prompt", ["a"] * 1025, "prompt"),
    (PLAIN, "prompt", {"text": "a"}, "prompt"),
]


@pytest.mark.parametrize(("path", "field", "value", "param"), BAD_FIELDS)
def test_a_bad_field_is_a_400_that_names_it(client: TestClient, path: str, field: str, value: Any, param: str) -> None:
    body = {name: given for name, given in {**BODIES[path], field: value}.items() if given is not MISSING}
    error = error_of(client.post(path, json=body), 400)
    assert error["param"] == param
    assert param in error["message"]


TOGETHER: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    (CHAT, {"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    (CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (CHAT, {"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    (CHAT, {"tools": [TOOL], "tool_choice": "required", "guided_choice": ["a"]}, "guided_choice"),
    (CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    (CHAT, {"response_format": SCHEMA, "guided_json": {}}, "guided_json"),
    (CHAT, {"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    (CHAT, {"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex"),
    (CHAT, {"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
    (CHAT, {"ignore_eos": True, "guided_regex": "a"}, "ignore_eos"),
    (CHAT, {"ignore_eos": True, "tools": [TOOL], "tool_choice": "required"}, "ignore_eos"),
]


@pytest.mark.parametrize(("path", "fields", "param"), TOGETHER)
def test_fields_that_do_not_go_together_are_a_400(client: TestClient, path: str, fields: dict[str, Any], param: str) -> None:
    assert error_of(client.post(path, json={**BODIES[path], **fields}), 400)["param"] == param


def test_all_problems_are_told_at_once(client: TestClient) -> None:
    error = error_of(client.post(CHAT, json={**BODIES[CHAT], "temperature": 3, "top_k": "a", "stop": [""]}), 400)
    assert all(name in error["message"] for name in ("temperature", "top_k", "stop[0]"))


def nested(levels: int) -> str:
    return '{"model":"tiny","prompt":"a","metadata":' + '{"a":' * levels + "1" + "}" * levels + "}"


BAD_TEXTS: list[tuple[str, bytes, str | None]] = [
    ("nothing", b"", None),
    ("no JSON", b"hello", None),
    ("half of it", b'{"model": "tiny"', None),
    ("text behind it", b'{"model": "tiny", "prompt": "a"} x', None),
    ("a list", b"[]", None),
    ("null", b"null", None),
    ("a number", b"1", None),
    ("NaN", b'{"model": "tiny", "prompt": "a", "temperature": NaN}', None),
    ("Infinity", b'{"model": "tiny", "prompt": "a", "temperature": Infinity}', None),
    ("a float beyond doubles", b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "temperature"),
    ("an integer of 5000 digits", b'{"model": "tiny", "prompt": "a", "seed": ' + b"1" * 5000 + b"}", None),
    ("an integer of 500 digits", b'{"model": "tiny", "prompt": "a", "seed": ' + b"1" * 500 + b"}", "seed"),
    ("a key twice", b'{"model": "tiny", "prompt": "a", "model": "other"}', None),
    ("not UTF-8", b'{"model": "tiny", "prompt": "\xff"}', None),
    ("UTF-16", '{"model": "tiny"}'.encode("utf-16"), None),
    ("a lone surrogate", b'{"model": "tiny", "prompt": "a \\ud800 b"}', "prompt"),
    ("a lone surrogate in a list", b'{"model": "tiny", "prompt": ["a", "\\udc00"]}', "prompt[1]"),
    ("a lone surrogate in a name", b'{"model": "tiny", "prompt": "a", "metadata": {"\\ud800": 1}}', "metadata.\\ud800"),
    ("70 levels", nested(70).encode(), "metadata"),
    ("a hundred thousand levels", nested(10**5).encode(), None),
    ("a million lists", b'{"model": "tiny", "prompt": "a", "metadata": {"a": [' + b"[]," * 10**6 + b"1]}}", None),
]


@pytest.mark.parametrize(("text", "param"), [case[1:] for case in BAD_TEXTS], ids=[case[0] for case in BAD_TEXTS])
def test_what_is_not_strict_json_is_a_400(client: TestClient, text: bytes, param: str | None) -> None:
    error = error_of(client.post(PLAIN, content=text, headers={"content-type": "application/json"}), 400)
    assert error["param"] == param


LONG = "n" * 2 * 10**6
# Of a client's own making, and as long as it likes: wherever it stands, the answer and the log stay short.
LONG_NAMES: list[tuple[str, dict[str, Any]]] = [
    ("too deep", {LONG: json.loads("[" * 70 + "]" * 70)}),
    ("unknown", {LONG: 1, "temperature": "x"}),
    ("a lone surrogate's place", {"metadata": {LONG: "\ud800"}}),
    ("a lone surrogate, deep", {"metadata": json.loads('{"a long name of a level": ' * 60 + '"\\ud800"' + "}" * 60)}),
    ("a bias", {"logit_bias": {LONG: 1}}),
    ("a bias out of range", {"logit_bias": {LONG: 1000}}),
    ("a not honoured value", {"grammar": LONG}),
    ("a not honoured object", {"options": {LONG: LONG}}),
    ("a model", {"model": LONG}),
    ("a role", {"messages": [{"role": LONG, "content": "Hello"}]}),
    ("arguments", {"messages": message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": LONG}}])}),
    ("an expression", {"structured_outputs": {"regex": LONG}}),
    ("a tool's name", {"tools": [{"type": "function", "function": {"name": LONG}}]}),
    ("the tool to call", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": LONG}}}),
    ("tools twice", {"tools": [{"type": "function", "function": {"name": f"{number % 60}{'n' * 60}"}} for number in range(120)]}),
]


@pytest.mark.parametrize("fields", [case[1] for case in LONG_NAMES], ids=[case[0] for case in LONG_NAMES])
def test_no_text_of_a_client_comes_back_at_length(client: TestClient, fields: dict[str, Any]) -> None:
    content = json.dumps({**BODIES[CHAT], **fields}).encode()
    answer = client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 2000
    assert len(error_of(answer, answer.status_code)["param"] or "") <= 300


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"seed": ' + b"1" * 5000 + b"}", "found: an integer of thousands of digits."),
        (b'{"prompt": "\xff"}', "found: a byte that is not UTF-8, number 12."),
        (b"\xef\xbb\xbf{}", "found: a byte order mark in front of it."),
        (b'{"seed": NaN}', "found: the number NaN, which JSON does not have."),
        (b'{"a": 1, "a": 2}', "found: duplicate key(s) 'a'."),
    ],
)
def test_what_is_wrong_with_the_text_is_said_in_words_for_clients(client: TestClient, text: bytes, words: str) -> None:
    error = error_of(client.post(PLAIN, content=text, headers={"content-type": "application/json"}), 400)
    assert words in error["message"]


@pytest.mark.parametrize("header", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", None])
def test_another_content_type_is_a_400(client: TestClient, header: str | None) -> None:
    headers = {} if header is None else {"content-type": header}
    error = error_of(client.post(CHAT, content=json.dumps(BODIES[CHAT]).encode(), headers=headers), 400)
    assert "Content-Type" in error["message"]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_an_unknown_model_is_a_404(client: TestClient, path: str) -> None:
    error = error_of(client.post(path, json={**BODIES[path], "model": "gpt-4"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PLAIN, {"prompt": [5] * 512}, "prompt"),
        (PLAIN, {"prompt": ["short", "x" * 5000]}, "prompt"),
        (CHAT, {"messages": message(content="x" * 5000)}, "messages"),
    ],
)
def test_a_prompt_that_is_too_long_is_a_400_with_both_lengths(client: TestClient, path: str, fields: dict[str, Any], param: str) -> None:
    error = error_of(client.post(path, json={**BODIES[path], **fields}), 400)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "512" in error["message"]
    assert any(number.strip(".,").isdecimal() and int(number.strip(".,")) > 511 for number in error["message"].split("found")[1].split())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PLAIN, {**BODIES[PLAIN], "prompt": ["short", "x" * (2**20 + 1)]}, "prompt"),
        (CHAT, {**BODIES[CHAT], "messages": message(content="x" * (2**20 + 1))}, "messages"),
        ("/tokenize", {"prompt": "x" * (2**20 + 1)}, "prompt"),
    ],
)
def test_a_text_far_beyond_any_prompt_is_not_tokenised(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    tokenised: list[int] = []
    encode = Tokenizer.encode

    def noting(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenised.append(len(text))
        return encode(tokenizer, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noting)
    error = error_of(client.post(path, json=body), 400)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert str(2**20) in error["message"]
    assert max(tokenised, default=0) < 2**20


def test_more_tokens_than_any_text_has_are_not_detokenised(client: TestClient) -> None:
    assert error_of(client.post("/detokenize", json={"tokens": [5] * (2**20 + 1)}), 400)["param"] == "tokens"


@pytest.mark.parametrize("field", ["content", "tool_calls"])
def test_a_list_full_of_errors_is_one_problem(client: TestClient, field: str) -> None:
    # Millions of them fit into a body, and each would be a kilobyte.
    body = {**BODIES[CHAT], "messages": message(role="assistant", **{field: [1] * 100})}
    error = error_of(client.post(CHAT, json=body), 400)
    assert error["param"] == f"messages[0].{field}[0]"
    assert f"{field}[1]" not in error["message"]


def test_an_object_with_too_many_items_is_one_error_whatever_is_in_it() -> None:
    # A million of them fit into a body, and each would be a kilobyte or two.
    body = {**BODIES[PLAIN], "logit_bias": dict.fromkeys(map(str, range(10**6)), "x")}
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate(body)
    assert len(caught.value.errors()) <= 2  # one for each form that biases may have


@pytest.mark.parametrize("field", ["messages", "tools"])
def test_a_list_with_too_many_items_has_few_errors(field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate({**BODIES[CHAT], field: [1] * 10**6})
    assert len(caught.value.errors()) < 5000


def test_half_a_character_in_the_arguments_of_a_call_names_the_messages(client: TestClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    error = error_of(client.post(CHAT, json={**BODIES[CHAT], "messages": message(role="assistant", tool_calls=[call])}), 400)
    assert error["param"] == "messages"


def test_messages_that_the_template_refuses_are_a_400(tiny_bundle: Path) -> None:
    with ScriptedEngine(tiny_bundle) as engine:
        engine.tokenizer._template_source = "{{ raise_exception('Roles must alternate') }}"
        error = error_of(client_of(engine).post(CHAT, json=BODIES[CHAT]), 400)
    assert error["param"] == "messages"
    assert "Roles must alternate" in error["message"]
