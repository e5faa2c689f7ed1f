"""The words for what is wrong with a body: of every error that the schemas can raise, and of fields that other servers honour."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails
from starlette.testclient import TestClient

from domino_deploy.server.body import Body
from domino_deploy.server.not_honoured import CHAT_INSTEAD, CHAT_NOT_HONOURED, COMPLETION_INSTEAD, COMPLETION_NOT_HONOURED
from domino_deploy.server.problems import EXPECTED, described, shown
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


class SchemaOfBody:
    """Values for a body and for all that it is made of, by its JSON schema."""

    def __init__(self, body: type[Body]) -> None:
        self.root = body.model_json_schema()

    def resolved(self, node: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self.root["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        return found

    def right(self, node: dict[str, Any]) -> Any:
        """A small value that fits."""
        node = self.resolved(node)
        if "anyOf" in node:
            return self.right(node["anyOf"][0])
        match node.get("type"):
            case "object":
                return {name: self.right(node["properties"][name]) for name in node.get("required", ())}
            case "array":
                return [self.right(node["items"])] * node.get("minItems", 0)
            case "string":
                return node.get("const", node.get("enum", ["x"])[0])
            case "integer" | "number":
                return node.get("minimum", 1)
            case kind:
                return {"boolean": True, "null": None}.get(kind)

    def wrong(self, node: dict[str, Any]) -> Iterator[Any]:
        """Values of every type, beyond every bound, and with every part wrong in turn; some of them fit after all."""
        node = self.resolved(node)
        yield from (None, True, 5, 2.5, "?", [], {}, "")
        for branch in node.get("anyOf", ()):
            yield from self.wrong(branch)
        yield from (node[bound] for bound in ("exclusiveMinimum", "exclusiveMaximum") if bound in node)
        yield from (node[bound] + step for bound, step in (("minimum", -1), ("maximum", 1)) if bound in node)
        if "maxLength" in node:
            yield "x" * (node["maxLength"] + 1)
        if "maxProperties" in node:
            yield {str(number): 1 for number in range(node["maxProperties"] + 1)}
        if "items" in node:
            yield [self.right(node["items"])] * (node.get("maxItems", 0) + 1)
            yield from ([item] for item in self.wrong(node["items"]))
        if isinstance(node.get("additionalProperties"), dict):
            yield from ({"x": item} for item in self.wrong(node["additionalProperties"]))
        right = self.right(node) if "properties" in node else {}
        for name, inner in node.get("properties", {}).items():
            yield {other: value for other, value in right.items() if other != name}
            yield from (right | {name: value} for value in self.wrong(inner))


def errors_of(body: type[Body]) -> Iterator[ErrorDetails]:
    """What pydantic finds wrong with each of many bodies."""
    schema = SchemaOfBody(body)
    body.model_validate(schema.right(schema.root))
    for value in schema.wrong(schema.root):
        try:
            body.model_validate(value)
        except ValidationError as error:
            yield from error.errors(include_url=False)


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
        (PLAIN, {"logprobs": True}, "logprobs", "expected an integer or false, found true"),
    ],
    "no_text_part": [
        (
            CHAT,
            message(content=[{"type": "image_url", "image_url": {"url": "data:"}}]),
            "messages[0].content[0].type",
            'expected "text" (images, audio, video and files are not supported), found "image_url"',
        )
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
    "dict_type": [
        (CHAT, {"metadata": "x"}, "metadata", 'expected an object, found "x"'),
        (CHAT, {"logit_bias": 5}, "logit_bias", "expected an object or a list, found 5"),
    ],
    "model_type": [
        (CHAT, {"messages": ["Hello"]}, "messages[0]", 'expected an object, found "Hello"'),
        (CHAT, {"tools": [TOOL], "tool_choice": 5}, "tool_choice", 'expected "none", "auto" or "required" or an object, found 5'),
    ],
}


def test_every_error_that_the_schemas_can_raise_has_words() -> None:
    bodies: list[type[Body]] = [ChatBody, CompletionBody, TokenizeBody, DetokenizeBody]
    reachable = {error["type"] for body in bodies for error in errors_of(body)}
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


class Odd(Body):
    """Values that Python and JSON spell unlike each other, and texts that look like them."""

    constant: Literal["it's", 'a "b"', "True or 'None'", "back\\slash", True, None] = None
    text: Annotated[str, Field(pattern="^('True'|None)$")] = "None"


def test_values_are_spelled_as_json_and_patterns_as_they_are() -> None:
    body = {"constant": 5, "text": "x"}
    with pytest.raises(ValidationError) as raised:
        Odd.model_validate(body)
    assert described(raised.value.errors(), body) == [
        ("constant", r"""expected "it's", "a \"b\"", "True or 'None'", "back\\slash", true or null, found 5"""),
        ("text", """expected text that matches ^('True'|None)$, found "x\""""),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=80),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=80), inner),
)


@given(JSON)
def test_a_value_is_shown_as_the_beginning_of_its_json(value: Any) -> None:
    text = json.dumps(value)
    assert shown(value) == (text if len(text) <= 60 else f"{text[:57]}...")


@pytest.mark.parametrize(
    "value",
    ["é" * 10**6, ["é" * 10**6], {"é" * 10**6: 1}, [[1] * 10**6], {"a": [{}] * 10**6}],
    ids=["text", "item", "name", "list", "deep"],
)
def test_no_more_of_a_value_is_spelled_than_is_shown(value: Any) -> None:
    tracemalloc.start()
    try:
        shown(value)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 20_000


# Of other servers, each in the field that changes the answer; None where the answer of ours cannot be had.
FOREIGN: list[tuple[str, Any, str | None]] = [
    ("grammar", 'root ::= "a"', "structured_outputs (regex, json or choice)"),
    ("guided_grammar", 'root ::= "a"', "structured_outputs (regex, json or choice)"),
    ("structural_tag", {"type": "structural_tag"}, "structured_outputs (regex, json or choice)"),
    ("guided_decoding_backend", "xgrammar", None),
    ("repetition_detection", {"max_pattern_size": 5}, None),
    ("prompt_embeds", "AAAA", None),
    ("truncation_side", "left", None),
    ("media_io_kwargs", {"video": {"fps": 1}}, None),
    ("speculative_config", {"num_speculative_tokens": 2}, "speculative"),
    ("num_speculative_tokens", 2, "speculative"),
    ("json_schema", {"type": "object"}, "response_format"),
    ("regex", "a+", "structured_outputs (regex)"),
    ("ebnf", 'root ::= "a"', "structured_outputs (regex, json or choice)"),
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
    assert "expected it left out, found 1" in problem_of(client, CHAT, {"prompt_logprobs": 1})["message"]
    assert "expected it left out, with echo" in problem_of(client, PLAIN, {"prompt_logprobs": 1})["message"]


def test_biases_in_llama_servers_form_are_told_the_right_one(client: TestClient) -> None:
    words = "logit_bias: expected an object of token ids (as strings) and numbers, found a list"
    assert problem_of(client, PLAIN, {"logit_bias": [[5, 1]]})["message"] == f"{words}{ADVICE}"
