"""The words for what is wrong with a body: of every error that the schemas can raise, and of fields that other servers honour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from domino_deploy.server.body import Body
from domino_deploy.server.not_honoured import CHAT_INSTEAD, CHAT_NOT_HONOURED, COMPLETION_INSTEAD, COMPLETION_NOT_HONOURED
from domino_deploy.server.problems import EXPECTED, described
from domino_deploy.server.schemas_chat import ChatBody
from domino_deploy.server.schemas_completions import CompletionBody
from domino_deploy.server.tokens import DetokenizeBody, TokenizeBody
from tests.support.fake_engine import ScriptedEngine, client_of

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]},
    PLAIN: {"model": "tiny", "prompt": "Hello"},
    "/tokenize": {},
    "/detokenize": {},
}
ADVICE = ". Correct the body and send the request again."
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}

# pydantic's own names: what a node of a schema can raise, by its type, and by its bounds.
ERRORS_OF_TYPES: dict[str, set[str]] = {
    "any": set(),
    "bool": {"bool_type"},
    "default": set(),
    "dict": {"dict_type"},
    "float": {"float_type"},
    "int": {"int_type"},
    "list": {"list_type"},
    "literal": {"literal_error"},
    "model": {"model_type"},
    "model-field": set(),
    "model-fields": set(),
    "none": {"none_required"},
    "nullable": set(),
    "str": {"string_type"},
    "union": set(),
}
ERRORS_OF_BOUNDS = {
    ("str", "min_length"): "string_too_short",
    ("str", "max_length"): "string_too_long",
    ("str", "pattern"): "string_pattern_mismatch",
    ("list", "min_length"): "too_short",
    ("list", "max_length"): "too_long",
    ("dict", "min_length"): "too_short",
    ("dict", "max_length"): "too_long",
    **{
        (number, bound): error
        for number in ("int", "float")
        for bound, error in (("gt", "greater_than"), ("ge", "greater_than_equal"), ("lt", "less_than"), ("le", "less_than_equal"))
    },
}
# What else a node may hold: no error comes of it.
NO_BOUNDS = {
    *("type", "schema", "metadata", "ref", "serialization", "strict"),
    *("cls", "config", "root_model", "custom_init"),
    *("fields", "model_name", "computed_fields", "validation_alias", "serialization_alias", "default"),
    *("items_schema", "keys_schema", "values_schema", "choices", "expected", "fail_fast"),
}


def errors_of(node: Any) -> Iterator[str]:
    """Every error type that a schema of pydantic's core can raise; a node of an unknown kind fails the test."""
    if isinstance(node, list | tuple):
        for inner in node:
            yield from errors_of(inner)
    if not isinstance(node, dict):
        return
    kind = node.get("type")
    if isinstance(kind, str):
        yield from ERRORS_OF_TYPES[kind]
        yield from (ERRORS_OF_BOUNDS[kind, name] for name in node.keys() - NO_BOUNDS)
        if kind == "model-field" and node["schema"]["type"] != "default":
            yield "missing"
    for name, inner in node.items():
        if name != "metadata":
            yield from errors_of(inner)


def problem_of(client: TestClient, path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.fixture(scope="module")
def client(tiny_bundle: Path) -> Iterator[TestClient]:
    with ScriptedEngine(tiny_bundle, "unused") as engine:
        yield client_of(engine)


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello", **fields}]}


# Of each error type: where to provoke it, and what is said of it.
WORDS: dict[str, list[tuple[str, dict[str, Any], str, str]]] = {
    "missing": [("/detokenize", {}, "tokens", "expected it, found no such field")],
    "string_type": [(CHAT, {"user": 5}, "user", "expected text, found 5")],
    "string_too_short": [(CHAT, {"stop": [""]}, "stop[0]", 'expected text of 1 or more characters, found ""')],
    "string_too_long": [
        (
            CHAT,
            {"stop": ["x" * 1025]},
            "stop[0]",
            f'expected text of at most 1024 characters, found "{"x" * 56}... (1025 characters)',
        )
    ],
    "string_pattern_mismatch": [
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            'expected text that matches ^[a-zA-Z0-9_-]+$, found "a b"',
        )
    ],
    "int_type": [(CHAT, {"top_k": 2.5}, "top_k", "expected an integer, found 2.5")],
    "float_type": [(CHAT, {"temperature": "0.5"}, "temperature", 'expected a number, found "0.5"')],
    "bool_type": [(CHAT, {"stream": "true"}, "stream", 'expected true or false, found "true"')],
    "none_required": [(CHAT, message(audio={"id": "a"}), "messages[0].audio", 'expected null, found {"id": "a"}')],
    "literal_error": [
        (
            CHAT,
            {"response_format": {"type": "xml"}},
            "response_format.type",
            'expected "text", "json_object" or "json_schema", found "xml"',
        ),
        (
            CHAT,
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "expected false, found true",
        ),
    ],
    "greater_than": [(CHAT, {"top_p": 0}, "top_p", "expected more than 0, found 0")],
    "greater_than_equal": [(CHAT, {"temperature": -0.1}, "temperature", "expected at least 0, found -0.1")],
    "less_than_equal": [
        (CHAT, {"temperature": 2.5}, "temperature", "expected at most 2, found 2.5"),
        (CHAT, {"seed": 10**30}, "seed", f"expected at most {2**64 - 1}, found an integer of 31 digits"),
    ],
    "list_type": [("/detokenize", {"tokens": 5}, "tokens", "expected a list, found 5")],
    "too_short": [
        (CHAT, {"messages": []}, "messages", "expected a list of 1 or more items, found []"),
        (PLAIN, {"prompt": [[]]}, "prompt[0]", "expected text or an integer or a list of 1 or more items, found []"),
    ],
    "too_long": [
        (CHAT, {"tools": [TOOL] * 129}, "tools", "expected at most 128 items, found a list of 129 items"),
        (
            CHAT,
            {"chat_template_kwargs": {str(number): 1 for number in range(65)}},
            "chat_template_kwargs",
            "expected at most 64 items, found an object of 65 items",
        ),
    ],
    "dict_type": [(CHAT, {"metadata": "x"}, "metadata", 'expected an object, found "x"')],
    "model_type": [
        (CHAT, {"messages": ["Hello"]}, "messages[0]", 'expected an object, found "Hello"'),
        (CHAT, {"tools": [TOOL], "tool_choice": 5}, "tool_choice", 'expected "none", "auto" or "required" or an object, found 5'),
    ],
}


def test_every_error_that_the_schemas_can_raise_has_words() -> None:
    bodies: list[type[Body]] = [ChatBody, CompletionBody, TokenizeBody, DetokenizeBody]
    reachable = {error for body in bodies for error in errors_of(body.__pydantic_core_schema__)}
    assert reachable == EXPECTED.keys() == WORDS.keys()


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"), [case for cases in WORDS.values() for case in cases], ids=lambda value: str(value)[:30]
)
def test_they_are_what_was_expected_found_and_to_be_done(
    client: TestClient, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    error = problem_of(client, path, fields)
    assert (error["param"], error["message"]) == (param, f"{param}: {words}{ADVICE}")


def test_an_error_of_another_pydantic_has_words_too() -> None:
    problems = described([{"type": "new_error", "loc": ("top_k",), "msg": "Input should be nice", "input": 5}], {"top_k": 5})
    assert problems == [("top_k", "expected what /openapi.json describes, found 5")]


# Of other servers, each in the field that changes the answer; None where the answer of ours cannot be had.
FOREIGN: list[tuple[str, Any, str | None]] = [
    ("grammar", 'root ::= "a"', "response_format"),
    ("json_schema", {"type": "object"}, "response_format"),
    ("regex", "a+", "response_format"),
    ("ebnf", 'root ::= "a"', "response_format"),
    ("format", "json", "response_format"),
    ("n_predict", 5, "max_tokens"),
    ("num_predict", 5, "max_tokens"),
    ("max_new_tokens", 5, "max_tokens"),
    ("min_new_tokens", 5, "min_tokens"),
    ("repeat_penalty", 1.1, "repetition_penalty"),
    ("stop_regex", "a+", "stop"),
    ("stop_sequences", ["a"], "stop"),
    ("do_sample", False, "temperature"),
    ("n_probs", 5, "logprobs"),
    ("options", {"num_predict": 5}, "max_tokens"),
    ("mirostat", 2, None),
    ("typical_p", 0.5, None),
    ("tfs_z", 0.5, None),
    ("dry_multiplier", 0.8, None),
    ("xtc_probability", 0.5, None),
    ("dynatemp_range", 0.5, None),
    ("top_n_sigma", 1.5, None),
    ("top_a", 0.2, None),
    ("samplers", ["top_k"], None),
    ("no_repeat_ngram_size", 3, None),
    ("num_beams", 4, None),
]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize(("field", "value", "instead"), FOREIGN, ids=[case[0] for case in FOREIGN])
def test_a_field_of_another_server_that_changes_the_answer_is_refused(
    client: TestClient, path: str, field: str, value: Any, instead: str | None
) -> None:
    error = problem_of(client, path, {field: value})
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert error["message"].startswith(f"{field}: this server does not support it; expected it left out")
    assert error["message"].endswith(ADVICE)
    found = error["message"].partition(", with ")[2].partition(" in its place")[0]
    assert (instead in found) if instead is not None else (found == "")


@pytest.mark.parametrize(
    ("path", "names", "instead"), [(CHAT, CHAT_NOT_HONOURED, CHAT_INSTEAD), (PLAIN, COMPLETION_NOT_HONOURED, COMPLETION_INSTEAD)]
)
def test_what_is_to_be_sent_instead_is_honoured(path: str, names: Mapping[str, Any], instead: Mapping[str, str]) -> None:
    assert instead.keys() <= names.keys()
    fields = (ChatBody if path == CHAT else CompletionBody).model_fields
    assert {words.split()[0].rstrip(",") for words in instead.values()} <= fields.keys()


@pytest.mark.parametrize(("path", "names"), [(CHAT, CHAT_NOT_HONOURED), (PLAIN, COMPLETION_NOT_HONOURED)])
def test_values_that_ask_for_nothing_are_ignored(tiny_bundle: Path, path: str, names: Mapping[str, tuple[Any, ...]]) -> None:
    with ScriptedEngine(tiny_bundle, "Yes") as engine:
        client = client_of(engine)
        for index in range(max(len(values) for values in names.values()) + 1):
            neutral = {name: ([*values, None])[min(index, len(values))] for name, values in names.items()}
            answer = client.post(path, json={**BODIES[path], **neutral})
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("field", ["cache_prompt", "id_slot", "timings_per_token", "keep_alive", "mirostat_tau", "dry_base"])
def test_fields_that_change_no_answer_are_ignored(tiny_bundle: Path, field: str) -> None:
    with ScriptedEngine(tiny_bundle, "Yes") as engine:
        assert client_of(engine).post(CHAT, json={**BODIES[CHAT], field: 1}).status_code == 200


def test_a_field_in_place_of_another_may_depend_on_the_endpoint(client: TestClient) -> None:
    assert "with response_format or tools in its place" in problem_of(client, CHAT, {"grammar": "x"})["message"]
    assert "with response_format in its place" in problem_of(client, PLAIN, {"grammar": "x"})["message"]
    assert "expected it left out, with echo" in problem_of(client, PLAIN, {"prompt_logprobs": 1})["message"]


def test_as_many_tokens_as_fit_is_what_chat_does_anyhow(client: TestClient) -> None:
    assert client.post(CHAT, json={**BODIES[CHAT], "n_predict": -1}).status_code == 200
    assert problem_of(client, PLAIN, {"n_predict": -1})["param"] == "n_predict"
