"""Forms of the answer by OpenAI's and vLLM's fields: what they let through, where it ends, what `strict` means."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from starlette.testclient import TestClient

from domino_deploy.runtime.engine import Engine
from domino_deploy.runtime.engine_settings import EngineSettings
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


def test_a_grammar_is_told_what_to_send_in_its_place(engine: ScriptedEngine) -> None:
    answer = client_of(engine).post(CHAT, json={**BODIES[CHAT], "structured_outputs": {"grammar": 'root ::= "a"'}})
    message = answer.json()["error"]["message"]
    assert "structured_outputs.grammar: this server does not support it; expected it left out, with regex, json or choice in its" in message


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

    def test_definitions_beside_what_is_joined_are_closed(self) -> None:
        found = closed({"allOf": [{"$ref": "#/$defs/d"}], "$defs": {"d": {"properties": {}}}})
        assert found["$defs"]["d"] == {"properties": {}, "additionalProperties": False}


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
