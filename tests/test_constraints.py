"""Constrained answers: they match, whatever the logits say; drafts change no mask; bad sources are refused by name."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from domino_deploy.bundle import TOKENIZER
from domino_deploy.errors import MissingDependencyError, RequestError
from domino_deploy.runtime.choosing import Chooser
from domino_deploy.runtime.constraints import MAX_SOURCE_CHARACTERS, Constraint, ConstraintCompiler, Matcher, choices, tool_calls
from domino_deploy.runtime.decode import generate
from domino_deploy.runtime.protocols import FloatArray
from domino_deploy.runtime.requests import GenerationParams
from domino_deploy.runtime.sampling import SamplingParams
from domino_deploy.runtime.text import Tokenizer
from tests.support.checkpoints import EOS_ID, write_tokenizer
from tests.support.doubles import RandomDrafter, ScriptedDrafter, ToyTarget

TOKENS = 300
VOCAB = 320  # logits: more than the tokenizer has tokens
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "grün", 'a"b']}, "maxItems": 3},
        "note": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"], "additionalProperties": False}
TOOLS = {"weather": CITY, "now": None}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, TOKENS)
    return Tokenizer(folder / TOKENIZER)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer.source, VOCAB, (EOS_ID,))


def schema(value: object) -> Constraint:
    return Constraint(kind="json_schema", source=json.dumps(value))


class EagerToEnd(ToyTarget):
    """Random logits, but what closes JSON is likelier, so that answers end."""

    def __init__(self, tokenizer: Tokenizer, capacity: int = 600) -> None:
        super().__init__(VOCAB, capacity)
        self.closing = [EOS_ID, *tokenizer.encode('"'), *tokenizer.encode("}"), *tokenizer.encode("]")]

    def logits(self, prefix: tuple[int, ...]) -> FloatArray:
        logits = super().logits(prefix).copy()
        logits[self.closing] += 3.0
        return logits


class RecordingMatcher:
    """A matcher that notes what it forbade at every token."""

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.forbidden: list[bytes] = []

    def mask(self, logits_V: FloatArray) -> None:
        self.matcher.mask(logits_V)
        self.forbidden.append(np.isneginf(logits_V).tobytes())

    def advance(self, token_id: int) -> None:
        self.matcher.advance(token_id)


def answered(
    target: ToyTarget, matcher: Matcher, constraint: Constraint, *, drafter: Any = None, seed: int | None = None, count: int = 0
) -> tuple[list[int], str | None]:
    """Tokens and finish reason of an answer; sampled with a seed, greedy without."""
    sampling = SamplingParams() if seed is None else SamplingParams(temperature=1.0, seed=seed)
    params = GenerationParams(sampling=sampling, max_new_tokens=500, stop_token_ids=(EOS_ID,), constraint=constraint)
    prompt = [5, 6, 7]
    steps = list(generate(target, drafter, prompt, params, num_speculative_tokens=count, chooser=Chooser(params, prompt, matcher)))
    return [token for step in steps for token in step.token_ids], steps[-1].finish_reason


def refused_at(tokenizer: Tokenizer, matcher: Matcher, text: str) -> str | None:
    """The first token of the text (its end last of all) that the matcher forbids; None if it takes them all."""
    for token in [*tokenizer.encode(text), EOS_ID]:
        logits = np.zeros(VOCAB, dtype=np.float32)
        matcher.mask(logits)
        if logits[token] == -np.inf:
            return "the end" if token == EOS_ID else tokenizer.decode([token])
        matcher.advance(token)
    return None


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_random_logits_give_json_that_parses_and_validates(tokenizer, compiler, seed):
    constraint = schema(PERSON)
    tokens, reason = answered(EagerToEnd(tokenizer), compiler.matcher(constraint), constraint, seed=seed)
    assert reason == "stop"
    jsonschema_rs.validate(PERSON, json.loads(tokenizer.decode(tokens)))


@pytest.mark.parametrize("seed", range(4))
def test_random_logits_give_any_json_object(tokenizer, compiler, seed):
    constraint = Constraint(kind="json_object")
    tokens, reason = answered(EagerToEnd(tokenizer), compiler.matcher(constraint), constraint, seed=seed)
    assert reason == "stop"
    assert isinstance(json.loads(tokenizer.decode(tokens)), dict)


DEEP = {"a": [{"b": [1, {"c": None}]}]}


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        *((json.dumps(DEEP, indent=indent), True) for indent in (None, 1, 2, 4, "\t")),
        (json.dumps(DEEP, separators=(",", ":")), True),
        (json.dumps(DEEP, indent=2).replace("\n", "\r\n"), True),
        ("{\n" + 32 * " " + '"a": []}', True),
        ("{\n" + 33 * " " + '"a": []}', False),
        ('{\n\n"a": []}', False),
        ('{ \n"a": []}', False),
        ('{"a":  []}', False),
        ('{"a": []}\n', False),
        ('\n{"a": []}', False),
    ],
)
def test_white_space_of_json_is_a_blank_or_an_indented_line(tokenizer, compiler, text, is_allowed):
    a_list = schema({"type": "object", "properties": {"a": {"type": "array"}}, "additionalProperties": False})
    parameters = {"type": "object", "properties": {"a": {"type": "array"}}}
    call = tool_calls({"f": parameters}, is_forced=True, is_parallel=False)
    for constraint, whole in (
        (a_list, text),
        (Constraint(kind="json_object"), text),
        (call, f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'),
    ):
        assert (refused_at(tokenizer, compiler.matcher(constraint), whole) is None) is is_allowed


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_a_choice_is_taken_letter_by_letter_and_ends(tokenizer, compiler, seed):
    texts = ["a", "ab", 'say "b"\\\n', "日本", "/x+/ %json {}", "\x07"]
    constraint = choices(texts)
    tokens, reason = answered(EagerToEnd(tokenizer), compiler.matcher(constraint), constraint, seed=seed)
    assert reason == "stop"
    assert tokenizer.decode(tokens) in texts
    assert [text for text in [*texts, "b", "abc", "", "日"] if refused_at(tokenizer, compiler.matcher(constraint), text) is None] == texts


def test_of_thousands_of_choices_the_last_one_can_be_made(tokenizer, compiler):
    texts = [f"choice {index}" for index in range(3000)]
    matcher = compiler.matcher(choices(texts))
    assert refused_at(tokenizer, matcher, texts[-1]) is None
    assert refused_at(tokenizer, compiler.matcher(choices(texts)), "choice 3000") == "0"


def test_a_regular_expression_and_a_grammar_hold_the_whole_answer(tokenizer, compiler):
    expression = Constraint(kind="regex", source="[0-9]{3}-(cat|dog)s?")
    for seed in range(5):
        tokens, _ = answered(EagerToEnd(tokenizer), compiler.matcher(expression), expression, seed=seed)
        assert re.fullmatch(expression.source, tokenizer.decode(tokens))
    grammar = Constraint(kind="lark", source='start: "sum: " number ("+" number){1,3}\nnumber: /[0-9]{1,4}/')
    tokens, reason = answered(EagerToEnd(tokenizer), compiler.matcher(grammar), grammar, seed=1)
    assert reason == "stop"
    assert re.fullmatch(r"sum: \d{1,4}(\+\d{1,4}){1,3}", tokenizer.decode(tokens))


@pytest.mark.parametrize("constraint", [schema(PERSON), tool_calls(TOOLS, is_forced=True, is_parallel=False)], ids=["schema", "tools"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_drafts_change_neither_the_answer_nor_any_mask(tokenizer, compiler, constraint, seed):
    plain = RecordingMatcher(compiler.matcher(constraint))
    expected = answered(EagerToEnd(tokenizer), plain, constraint, seed=seed)
    reference = [5, 6, 7, *expected[0]]
    drafters = [RandomDrafter(VOCAB), *(ScriptedDrafter(script, reference, VOCAB) for script in ([-1], [-1, -1, -1, 9], [-1, 4, -2]))]
    for drafter in drafters:
        matcher = RecordingMatcher(compiler.matcher(constraint))
        assert answered(EagerToEnd(tokenizer), matcher, constraint, drafter=drafter, seed=seed, count=6) == expected
        assert matcher.forbidden[: len(plain.forbidden)] == plain.forbidden


def test_the_end_may_come_only_where_the_grammar_may_end_and_tokens_without_text_never(tokenizer, compiler):
    matcher = compiler.matcher(Constraint(kind="regex", source="ab*"))
    allowed = []
    for text in ("a", "b", "b"):
        logits = np.zeros(VOCAB, dtype=np.float32)
        matcher.mask(logits)
        allowed.append(set(np.flatnonzero(logits == 0).tolist()))
        matcher.advance(tokenizer.encode(text)[0])
    assert [EOS_ID in tokens for tokens in allowed] == [False, True, True]
    assert not any(tokens & {0, 1, *range(TOKENS, VOCAB)} for tokens in allowed)


def test_behind_the_end_nothing_is_forbidden(tokenizer, compiler):
    """A drafted end-of-sequence token is followed by more choices of the same cycle, which are dropped."""
    matcher = compiler.matcher(Constraint(kind="regex", source="a"))
    assert refused_at(tokenizer, matcher, "a") is None
    logits = np.zeros(VOCAB, dtype=np.float32)
    matcher.mask(logits)
    matcher.advance(17)
    assert not np.isneginf(logits).any()


CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALL_WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class TestToolCalls:
    @pytest.mark.parametrize(
        ("text", "auto", "single", "forced"),
        [
            ("Hello there.", True, True, False),
            ("", True, True, False),
            (CALL_NOW, True, True, True),
            (CALL_WEATHER, True, True, True),
            ("Let me see.\n" + CALL_NOW, True, True, False),
            (f"{CALL_NOW}\n{CALL_WEATHER}", True, False, True),
            ("a <tool_call> b", False, False, False),
            ("<tool_call>", False, False, False),
            (CALL_NOW + " more", False, False, False),
            (CALL_NOW.replace("now", "other"), False, False, False),
            (CALL_WEATHER.replace('"city": "Paris"', ""), False, False, False),
            (CALL_WEATHER.replace('"Paris"', "5"), False, False, False),
            (CALL_WEATHER.replace("Paris", "Paris and Rome"), False, False, False),
        ],
    )
    def test_what_may_be_said(self, tokenizer, compiler, text, auto, single, forced):
        """By an answer with calls or without, with at most one call, and with nothing but calls."""
        for expected, is_forced, is_parallel in ((auto, False, True), (single, False, False), (forced, True, True)):
            constraint = tool_calls(TOOLS, is_forced=is_forced, is_parallel=is_parallel)
            assert (refused_at(tokenizer, compiler.matcher(constraint), text) is None) == expected

    def test_a_call_is_refused_at_its_first_wrong_word(self, tokenizer, compiler):
        matcher = compiler.matcher(tool_calls(TOOLS, is_forced=False, is_parallel=True))
        assert refused_at(tokenizer, matcher, '<tool_call>\n{"name": "x') == "x"

    @pytest.mark.parametrize("seed", range(3))
    def test_forced_calls_of_random_logits_name_a_tool_and_fit_its_schema(self, tokenizer, compiler, seed):
        constraint = tool_calls(TOOLS, is_forced=True, is_parallel=False)
        tokens, reason = answered(EagerToEnd(tokenizer), compiler.matcher(constraint), constraint, seed=seed)
        text = tokenizer.decode(tokens)
        call = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", text, re.DOTALL)
        assert reason == "stop"
        assert call is not None
        parsed = json.loads(call[1])
        assert list(parsed) == ["name", "arguments"]
        jsonschema_rs.validate(TOOLS[parsed["name"]] or {"type": "object", "maxProperties": 0}, parsed["arguments"])

    def test_a_name_is_taken_literally(self, tokenizer, compiler):
        matcher = compiler.matcher(tool_calls({'a"\\b/[x]': None}, is_forced=True, is_parallel=False))
        text = "<tool_call>\n" + json.dumps({"name": 'a"\\b/[x]', "arguments": {}}) + "\n</tool_call>"
        assert refused_at(tokenizer, matcher, text) is None

    def test_no_tools_are_refused(self):
        with pytest.raises(RequestError, match="tools: expected at least one"):
            tool_calls({}, is_forced=True, is_parallel=True)


class TestRefusals:
    @pytest.mark.parametrize(
        ("kind", "source", "found"),
        [
            ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
            ("json_schema", '{"type":', "EOF|expected value"),
            ("json_schema", "[1]", "object schema"),
            ("json_schema", '{"type": "object", "not": {"type": "string"}}', 'Unimplemented keys: \\["not"\\]'),
            ("json_schema", '{"$ref": "http://x.y/z"}', "not present in a registry"),
            ("json_schema", '{"items":' * 2000 + "{}" + "}" * 2000, "recursion limit"),
            ("json_schema", '{"allOf": [{"type": "string"}, {"type": "integer"}]}', "Unsatisfiable"),
            ("regex", "a(", "unclosed group"),
            ("regex", "(?=a)b", "look-around"),
            ("lark", 'start: "a" b', "unknown name"),
            ("lark", 'begin: "a"', "no start rule"),
        ],
    )
    def test_a_source_that_cannot_be_enforced_is_refused_by_its_kind(self, compiler, kind, source, found):
        with pytest.raises(RequestError, match=f"(?s)^{kind}: expected a source that can be enforced, found: .*(?:{found})") as caught:
            compiler.matcher(Constraint(kind=kind, source=source))
        assert len(str(caught.value)) < 500

    @pytest.mark.parametrize(
        ("kind", "source", "expected"),
        [
            ("xml", "", "Expected a constraint of json_object, json_schema, regex, lark, found 'xml'"),
            ("json_object", "{}", "json_object: expected no source"),
            ("regex", "", "regex: expected a source, found none"),
            ("regex", "a" * (MAX_SOURCE_CHARACTERS + 1), "regex: expected at most 65536 characters, found 65537"),
        ],
    )
    def test_a_constraint_that_is_none_is_refused(self, kind, source, expected):
        with pytest.raises(RequestError, match=re.escape(expected)):
            Constraint(kind=kind, source=source)

    @pytest.mark.parametrize(
        "source",
        [
            json.dumps({"anyOf": [{"type": "object", "properties": {f"a{i}": {"type": "string"}}} for i in range(1000)]}),
            json.dumps(
                {
                    "type": "object",
                    "properties": {f"k{i}": {"type": "string", "pattern": f"^[a-z]{{1,{i + 1}}}x.*y{{3,40}}"} for i in range(900)},
                }
            ),
            json.dumps({"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}),
            json.dumps(
                {"$defs": {f"d{i}": {"allOf": 2 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(25)} | {"d25": {}}, "$ref": "#/$defs/d0"}
            ),
        ],
        ids=["alternatives", "patterns", "repetitions", "references"],
    )
    def test_a_costly_source_is_compiled_soon_or_refused_soon(self, compiler, source):
        started = time.monotonic()
        with contextlib.suppress(RequestError):
            compiler.matcher(Constraint(kind="json_schema", source=source)).mask(np.zeros(VOCAB, dtype=np.float32))
        assert time.monotonic() - started < 10  # a quarter of a second when nothing else runs

    def test_a_grammar_that_grows_beyond_its_bounds_ends_the_request_with_its_reason(self, tokenizer, compiler):
        matcher = compiler.matcher(Constraint(kind="lark", source='start: x{0,3000}\nx: "a"? "b"? "a"?'))
        with pytest.raises(RequestError, match=r"lark: expected an answer that can be checked step by step, found: .*Simplify the source"):
            refused_at(tokenizer, matcher, 100 * "ab")

    def test_without_an_end_of_sequence_token_there_are_none(self, tokenizer):
        with pytest.raises(RequestError, match="end-of-sequence token"):
            ConstraintCompiler(tokenizer.source, VOCAB, ())

    def test_a_missing_package_names_its_extra(self, tokenizer, monkeypatch):
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(MissingDependencyError, match=r"domino-deploy\[serve\]"):
            ConstraintCompiler(tokenizer.source, VOCAB, (EOS_ID,))

    def test_a_constraint_and_an_ignored_end_are_refused(self):
        with pytest.raises(RequestError, match="ignore_eos must be False with a constraint"):
            GenerationParams(constraint=Constraint(kind="json_object"), ignore_eos=True)
