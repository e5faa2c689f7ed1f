"""Forms of the answer by OpenAI's and vLLM's fields: what they let through, where it ends, what `strict` means."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
from starlette.testclient import TestClient

from domino_deploy.bundle import open_bundle
from domino_deploy.errors import ConstraintError, RequestError
from domino_deploy.runtime.constraints import ConstraintCompiler, json_schema
from domino_deploy.runtime.engine import Engine
from domino_deploy.runtime.engine_settings import EngineSettings
from domino_deploy.runtime.text import bundle_tokenizer
from domino_deploy.server.strict_schema import closed
from tests.support.fake_engine import ScriptedEngine, client_of

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60},
    PLAIN: {"model": "tiny", "prompt": "Hello", "max_tokens": 60},
}
REGEX = r"^[0-9]{3}-(cat|dog)s?$"
CHOICE = ["yes", "no", "don't know"]
SCHEMA = {"type": "object", "properties": {"ok": {"enum": ["yes", "no"]}}, "required": ["ok"], "additionalProperties": False}


# As a grammar of calls, it is over the limit that its own JSON keeps.
LARGE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"enum": ["x" * 65_380]}},
}


def is_of_the_schema(text: str) -> bool:
    return bool(jsonschema_rs.is_valid(SCHEMA, json.loads(text)))


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"structured_outputs": {"regex": REGEX}}, re.compile(REGEX).fullmatch),
    ({"structured_outputs": {"choice": CHOICE}}, CHOICE.__contains__),
    ({"structured_outputs": {"json": SCHEMA}}, is_of_the_schema),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_of_the_schema),
    (
        {"structured_outputs": {"regex": REGEX, "json_object": False, "grammar": None, "disable_fallback": True}},
        re.compile(REGEX).fullmatch,
    ),
    ({"guided_regex": REGEX}, re.compile(REGEX).fullmatch),
    ({"guided_choice": CHOICE, "response_format": {"type": "text"}}, CHOICE.__contains__),
    ({"guided_json": SCHEMA}, is_of_the_schema),
]


@pytest.fixture(scope="module")
def real(tiny_bundle: Path) -> Iterator[TestClient]:
    with Engine.open(tiny_bundle, max_model_len=96, settings=EngineSettings(max_sequences=2, adaptive=False)) as engine:
        yield client_of(engine)


@pytest.fixture
def engine(tiny_bundle: Path) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(tiny_bundle) as engine:
        yield engine


@pytest.fixture(scope="module")
def compiler(tiny_bundle: Path) -> ConstraintCompiler:
    opened = open_bundle(tiny_bundle)
    source = bundle_tokenizer(opened).source
    return ConstraintCompiler(source, opened.target.vocab_size, opened.target.eos_token_ids)


def choice_of(client: TestClient, path: str, **fields: Any) -> tuple[str, str]:
    """Text and finish reason."""
    answer = client.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return (choice["message"]["content"] if path == CHAT else choice["text"]), choice["finish_reason"]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize(("fields", "matches"), FORMS, ids=[json.dumps(fields)[:60] for fields, _ in FORMS])
def test_the_answer_of_a_real_pair_has_the_form_and_ends_with_it_with_and_without_drafts(
    real: TestClient, path: str, fields: dict[str, Any], matches: Any
) -> None:
    for sampling in ({"temperature": 0}, {"temperature": 1, "seed": 1}, {"temperature": 1.5, "seed": 2}):
        text, reason = choice_of(real, path, **fields, **sampling)
        assert reason == "stop"
        assert matches(text), text
        assert choice_of(real, path, **fields, **sampling, speculative=False) == (text, reason)


def test_an_answer_that_could_go_on_says_what_the_model_would(engine: ScriptedEngine) -> None:
    engine.answer = "yes indeed"
    client = client_of(engine)
    assert choice_of(client, CHAT, structured_outputs={"choice": ["yes", "yes indeed", "no"]}) == ("yes indeed", "stop")
    assert choice_of(client, CHAT, structured_outputs={"choice": ["yes", "no"]}) == ("yes", "stop")
    assert choice_of(client, PLAIN, guided_regex="[a-z ]+") == ("yes indeed", "stop")


def test_any_json_object_may_be_asked_for_in_vllms_words(engine: ScriptedEngine) -> None:
    engine.answer = '{"a": [1, 2]}'
    assert choice_of(client_of(engine), PLAIN, structured_outputs={"json_object": True}) == (engine.answer, "stop")


@pytest.mark.parametrize("form", [{"guided_json": {}}, {"structured_outputs": {"json": {}}}])
def test_a_schema_that_says_nothing_is_that_of_any_json(engine: ScriptedEngine, form: dict[str, Any]) -> None:
    engine.answer = "no JSON"
    text, _ = choice_of(client_of(engine), PLAIN, **form, temperature=0)
    assert text != engine.answer
    assert text[0] in '{["-0123456789tfn'


@pytest.mark.parametrize("regex", ["a(", r"(a)\1", "(?=a)b"])
def test_an_expression_that_cannot_be_enforced_is_a_400_that_names_the_field(engine: ScriptedEngine, regex: str) -> None:
    for fields, param in (({"structured_outputs": {"regex": regex}}, "structured_outputs"), ({"guided_regex": regex}, "guided_regex")):
        answer = client_of(engine).post(PLAIN, json={**BODIES[PLAIN], **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert error["message"].startswith(f"{param}: regex: expected a source that can be enforced, found: ")


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (PLAIN, {"structured_outputs": {"choice": [f"{number:0100}" for number in range(700)]}}, "structured_outputs: choice: "),
        (PLAIN, {"guided_choice": [f"{number:0100}" for number in range(700)]}, "guided_choice: choice: "),
        (CHAT, {"tools": [LARGE_TOOL], "tool_choice": "required"}, "tools: "),
    ],
    ids=["choice", "guided_choice", "tools"],
)
def test_too_much_to_choose_from_is_told_in_words_of_the_field(
    engine: ScriptedEngine, path: str, fields: dict[str, Any], words: str
) -> None:
    answer = client_of(engine).post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{words}expected at most 65536 characters, found ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"structured_outputs": {"choice": ["ab", "b"]}}, "structured_outputs", "structured_outputs: choice: expected an answer"),
        ({"guided_regex": "a+b"}, "guided_regex", "guided_regex: regex: expected an answer"),
    ],
)
def test_a_grammar_that_grows_on_the_way_names_its_field_in_whole_answers_and_streams(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, stream: bool, fields: dict[str, Any], param: str, words: str
) -> None:
    monkeypatch.setattr("domino_deploy.runtime.constraints._GrammarMatcher.advance", lambda matcher, token: _fail(matcher))
    answer = client_of(engine).post(PLAIN, json={**BODIES[PLAIN], **fields, "stream": stream})
    text = answer.text
    found = next(line for line in text.splitlines() if '"error"' in line).removeprefix("data: ") if stream else text
    error = json.loads(found)["error"]
    assert error["param"] == param
    assert error["message"].startswith(words)


def _fail(matcher: Any) -> None:
    matcher._compiled = SimpleNamespace(is_error=lambda: True, get_error=lambda: "too large")
    matcher._check()


def test_an_error_of_something_else_does_not_name_the_form(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RequestError("prompt_logprobs: expected another backend, found this one. Leave it out.")

    monkeypatch.setattr(engine, "submit", refuse)
    answer = client_of(engine).post(PLAIN, json={**BODIES[PLAIN], "guided_regex": "a"})
    assert answer.json()["error"]["param"] is None
    assert answer.json()["error"]["message"].startswith("prompt_logprobs: ")


def test_a_schema_of_few_characters_and_many_bytes_is_honoured(engine: ScriptedEngine) -> None:
    engine.answer = '"'
    schema = {"enum": ["語" * 30_000]}  # escaped, it would be 180000 characters
    response_format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    text, _ = choice_of(client_of(engine), CHAT, response_format=response_format)
    assert text.startswith(engine.answer)


def test_a_schema_far_too_long_is_refused_before_it_is_written_out() -> None:
    with pytest.raises(ConstraintError, match="json_schema: expected at most 65536 characters, found more"):
        json_schema({"enum": Endless()})


class Endless(list[Any]):
    """A list without an end."""

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_a_grammar_is_told_what_to_send_in_its_place(engine: ScriptedEngine) -> None:
    answer = client_of(engine).post(CHAT, json={**BODIES[CHAT], "structured_outputs": {"grammar": 'root ::= "a"'}})
    message = answer.json()["error"]["message"]
    assert "structured_outputs.grammar: this server does not support it; expected it left out, with regex, json or choice in its" in message


OWN: dict[str, Any] = {"properties": {"b": {"type": "string"}}}
DEFINITIONS: dict[str, Any] = {
    "Base": {"type": "object", "properties": {"a": {"type": "string"}}},
    "Derived": {"allOf": [{"$ref": "#/$defs/Base"}]},
    "with/slash": {"$anchor": "base", "type": "object", "properties": {"a": {"type": "string"}}},
}
# Objects with a and b, of which each is listed by another part.
JOINED: list[dict[str, Any]] = [
    {"allOf": [{"$ref": "#/$defs/Base"}, {**OWN, "required": ["b"]}]},
    {"allOf": [{"$ref": "#/$defs/Derived"}, {**OWN, "required": ["b"]}]},
    {"allOf": [{"$ref": "#/$defs/with~1slash"}, {**OWN, "required": ["b"]}]},
    {"allOf": [{"$ref": "#base"}, {**OWN, "required": ["b"]}]},
    {**OWN, "required": ["b"], "$ref": "#/$defs/Base"},
    {**OWN, "required": ["b"], "anyOf": [{"$ref": "#/$defs/Base"}, {"$ref": "#/$defs/Derived"}]},
    {"allOf": [{"$ref": "#/$defs/Base"}], "required": ["b"]},
    {"allOf": [{"allOf": [{"$ref": "#/$defs/Base"}, OWN]}, {"required": ["b"]}]},
]
OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MORE = '{"a": 1, "b": 2}'


class TestStrict:
    @pytest.mark.parametrize(("strict", "text"), [(True, '{"a": 1}'), (False, MORE), (None, MORE)])
    def test_a_format_without_word_of_other_properties_has_none(self, engine: ScriptedEngine, strict: bool | None, text: str) -> None:
        engine.answer = MORE
        json_schema = {"name": "s", "schema": OPEN, "strict": strict}
        found, _ = choice_of(client_of(engine), CHAT, response_format={"type": "json_schema", "json_schema": json_schema})
        assert found.startswith(text.rstrip("}"))
        assert json.loads(found).keys() == json.loads(text).keys()

    @pytest.mark.parametrize(("strict", "names"), [(True, {"a"}), (None, {"a", "b"})])
    def test_so_have_arguments_of_a_tool(self, engine: ScriptedEngine, strict: bool | None, names: set[str]) -> None:
        engine.answer = f'<tool_call>\n{{"name": "f", "arguments": {MORE}}}\n</tool_call>'
        tools = [{"type": "function", "function": {"name": "f", "parameters": OPEN, "strict": strict}}]
        body = {**BODIES[CHAT], "tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
        answer = client_of(engine).post(CHAT, json=body)
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]).keys() == names

    def test_every_object_that_lists_properties_is_closed_unless_it_says_otherwise(self) -> None:
        inner = {"properties": {"x": {"enum": [{"properties": {}}], "default": {"properties": {}}}}}
        shut = {**inner, "additionalProperties": False}
        for word in ("items", "additionalProperties"):
            assert closed({word: inner}) == {word: shut}
        for word in ("anyOf", "oneOf", "prefixItems"):
            assert closed({word: [inner, True]}) == {word: [shut, True]}
        for word in ("patternProperties", "$defs", "definitions"):
            assert closed({word: {"n": inner}}) == {word: {"n": shut}}
        assert closed({"properties": {"n": inner}}) == {"properties": {"n": shut}, "additionalProperties": False}
        for others in (True, False, {"type": "string"}):
            assert closed({**inner, "additionalProperties": others}) == {**inner, "additionalProperties": others}

    @pytest.mark.parametrize(
        "schema",
        [
            True,
            {"type": "object"},
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
            {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
            {"const": {"properties": {}}, "items": [1], "properties": 5, "$ref": "#"},
        ],
    )
    def test_what_is_joined_of_several_or_lists_nothing_stays(self, schema: Any) -> None:
        assert closed(schema) == schema

    def test_definitions_that_nothing_joined_refers_to_are_closed(self) -> None:
        listing = {"properties": {"a": {}}}
        shut = {**listing, "additionalProperties": False}
        alone = {"title": "t", "allOf": [{"$ref": "#/$defs/d"}], "$defs": {"d": listing}}
        assert closed(alone)["$defs"]["d"] == shut
        assert closed({"allOf": [listing]}) == {"allOf": [shut]}
        beside = {"allOf": [{"$ref": "#/$defs/d"}, {"required": ["b"]}], "$defs": {"d": listing, "e": listing.copy()}}
        assert closed(beside)["$defs"] == {"d": listing, "e": shut}

    @pytest.mark.parametrize("joined", JOINED)
    def test_what_an_object_is_joined_of_leaves_room_for_the_other_parts(
        self, compiler: ConstraintCompiler, joined: dict[str, Any]
    ) -> None:
        schema = {"type": "object", **joined, "$defs": DEFINITIONS}
        both = {"a": "x", "b": "y"}
        assert jsonschema_rs.is_valid(schema, both)
        assert jsonschema_rs.is_valid(closed(schema), both)
        compiler.matcher(json_schema(closed(schema)))  # refused if nothing could match it

    @pytest.mark.parametrize("place", ["properties", "$defs"])
    def test_so_does_one_inside_of_another(self, place: str) -> None:
        inner = {"allOf": [{"$ref": "#/$defs/Base"}, {**OWN, "required": ["b"]}]}
        shape = {"properties": {"n": inner}, "$defs": DEFINITIONS}
        if place == "$defs":
            shape = {"properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {**DEFINITIONS, "n": inner}}
        assert jsonschema_rs.is_valid(closed(shape), {"n": {"a": "x", "b": "y"}})
        assert not jsonschema_rs.is_valid(closed(shape), {"n": {"a": "x", "b": "y"}, "other": 1})


class TestUnknownFields:
    @staticmethod
    def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "domino_deploy.server.unknown_fields"]

    def test_a_name_is_logged_once_without_its_value_and_with_what_was_likely_meant(
        self, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        client = client_of(engine)
        with caplog.at_level(logging.INFO):
            for value in ("secret", "other secret"):
                assert client.post(PLAIN, json={**BODIES[PLAIN], "temprature": value, "zz\n": value, "min_p": None}).status_code == 200
            client.post(CHAT, json={**BODIES[CHAT], "temprature": 1})
        assert self.logged(caplog) == [
            'Ignored the field "temprature" of a request: there is none of this name; temperature may have been meant',
            'Ignored the field "zz\\n" of a request: there is none of this name',
        ]
        assert "secret" not in caplog.text

    def test_one_inside_of_a_field_is_told_with_its_place(self, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
        messages = [{"role": "user", "content": [{"type": "text", "text": "x", "txet": 1}], "nmae": 1}] * 2
        body = {**BODIES[CHAT], "messages": messages, "structured_outputs": {"regex": "a", "regx": "b", "disable_fallback": True}}
        with caplog.at_level(logging.INFO):
            assert client_of(engine).post(CHAT, json=body).status_code == 200
        assert [line.split(" of a request: ")[0] for line in self.logged(caplog)] == [
            'Ignored the field "messages[].nmae"',
            'Ignored the field "messages[].content[].txet"',
            'Ignored the field "structured_outputs.regx"',
        ]
        assert self.logged(caplog)[2].endswith("; structured_outputs.regex may have been meant")

    def test_a_slip_in_place_of_the_form_is_no_empty_form(self, engine: ScriptedEngine) -> None:
        answer = client_of(engine).post(PLAIN, json={**BODIES[PLAIN], "structured_outputs": {"regx": None}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs")

    def test_a_refused_request_logs_none(self, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            assert client_of(engine).post(PLAIN, json={"model": "tiny", "promt": "x"}).status_code == 400
        assert self.logged(caplog) == []

    def test_a_client_that_makes_up_names_fills_neither_log_nor_memory(
        self, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        client = client_of(engine)
        with caplog.at_level(logging.INFO):
            for start in (0, 5000):
                names = {f"{number}{'x' * 1000}": 1 for number in range(start, start + 5000)}
                assert client.post(PLAIN, json={**BODIES[PLAIN], "max_tokens": 1, **names}).status_code == 200
        lines = self.logged(caplog)
        assert len(lines) == 256
        assert [line.endswith("Further names are not logged") for line in lines] == [False] * 255 + [True]
        assert max(map(len, lines)) < 200


class TestComplaints:
    @pytest.mark.parametrize(("fields", "found"), [({}, "no such field"), ({"model": None}, "null")])
    def test_who_names_no_model_is_told_which_there_is(self, engine: ScriptedEngine, fields: dict[str, Any], found: str) -> None:
        answer = client_of(engine).post(PLAIN, json={"prompt": "x", **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "model")
        assert error["message"].startswith(f'model: expected "tiny", which is served here, found {found}. ')

    @pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "input_audio", "input_audio": {}}])
    def test_a_part_that_is_no_text_has_one_problem(self, engine: ScriptedEngine, part: dict[str, Any]) -> None:
        answer = client_of(engine).post(CHAT, json={"model": "tiny", "messages": [{"role": "user", "content": [part]}]})
        assert answer.json()["error"]["message"] == (
            'messages[0].content[0].type: expected "text" (images, audio, video and files are not supported), '
            f"found {json.dumps(part['type'])}. Correct the body and send the request again."
        )

    def test_a_part_without_a_type_has_two(self, engine: ScriptedEngine) -> None:
        answer = client_of(engine).post(CHAT, json={"model": "tiny", "messages": [{"role": "user", "content": [{}]}]})
        assert "The body has 2 problems" in answer.json()["error"]["message"]
