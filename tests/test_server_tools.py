"""Tools: how the model is told of them, how its calls are read, whole and in pieces, and how calls are forced."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from domino_deploy.server.tool_parser import CallArguments, CallStart, Content, Piece, ToolCallParser
from tests.support.fake_engine import ScriptedEngine, client_of

USER = [{"role": "user", "content": "Weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rom", "Ulm"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "more": ["}", "<x>", {"a": "\\"{"}]}}\n</tool_call>'
ARGUMENTS = '{"city": "Rom", "more": ["}", "<x>", {"a": "\\"{"}]}'

TOOL_TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }};{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}CALL {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)


@pytest.fixture
def engine(tiny_bundle: Path) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(tiny_bundle, CALL, max_model_len=2048) as engine:
        yield engine


@pytest.fixture
def client(engine: ScriptedEngine) -> TestClient:
    return client_of(engine)


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER, "temperature": 0, "tools": [WEATHER, TIME], **fields}


def choice_of(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json=body_of(**fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def functions_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in choice["message"]["tool_calls"]]


def prompt_text(engine: ScriptedEngine) -> str:
    return engine.tokenizer.decode(engine.prompts[-1], skip_special_tokens=False)


class TestPrompts:
    def test_a_template_that_knows_tools_gets_them(self, client: TestClient, engine: ScriptedEngine) -> None:
        engine.tokenizer._template_source = TOOL_TEMPLATE
        calls = [{"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}]
        messages = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "call_1", "content": "wet"},
        ]
        choice_of(client, messages=messages, tools=[WEATHER])
        told = json.dumps([WEATHER])
        assert prompt_text(engine) == f'TOOLS {told};[user]Weather?[assistant]CALL weather {{"city": "Ulm"}}[tool]wet'

    def test_another_template_is_told_in_words(self, client: TestClient, engine: ScriptedEngine) -> None:
        calls = [
            {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}},
            {"id": "2", "function": {"name": "time", "arguments": ""}},
        ]
        results = [{"role": "tool", "tool_call_id": "1", "content": "wet"}, {"role": "tool", "tool_call_id": "2", "content": "late"}]
        messages = [{"role": "system", "content": "Be kind."}, *USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
        choice_of(client, messages=messages)
        text = prompt_text(engine)
        system = text.partition("<|im_end|>")[0]
        assert system.startswith("<|im_start|>system\nBe kind.\n\n")
        assert json.dumps(WEATHER["function"]) in system
        assert "<tool_call>" in system
        assert (
            '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\nwet\n</tool_response>\n<tool_response>\nlate\n</tool_response><|im_end|>\n"
        ) in text

    def test_a_system_message_is_added_if_there_is_none(self, client: TestClient, engine: ScriptedEngine) -> None:
        choice_of(client)
        assert prompt_text(engine).startswith("<|im_start|>system\nYou may call functions.")

    def test_tools_that_may_not_be_called_are_not_told_of(self, client: TestClient, engine: ScriptedEngine) -> None:
        choice = choice_of(client, tool_choice="none")
        assert "weather" not in prompt_text(engine)
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


class TestAnswers:
    def test_a_call_is_read(self, client: TestClient) -> None:
        choice = choice_of(client)
        (call,) = choice["message"]["tool_calls"]
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"
        assert call["id"].startswith("call_")
        assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": ARGUMENTS})

    def test_text_and_several_calls(self, client: TestClient, engine: ScriptedEngine) -> None:
        engine.answer = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'
        choice = choice_of(client)
        assert choice["message"]["content"] == "Let me see."
        assert [name for name, _ in functions_of(choice)] == ["weather", "time"]
        ids = [call["id"] for call in choice["message"]["tool_calls"]]
        assert len(set(ids)) == 2

    def test_an_answer_without_calls_is_text(self, client: TestClient, engine: ScriptedEngine) -> None:
        engine.answer = "It is < 5 <tool <tool_cal \n"
        choice = choice_of(client)
        assert (choice["message"]["content"], choice["finish_reason"]) == (engine.answer, "stop")
        assert "tool_calls" not in choice["message"]

    def test_a_stream_gives_name_first_and_arguments_in_pieces(self, client: TestClient, engine: ScriptedEngine) -> None:
        engine.answer = f'Well: {CALL}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'
        lines = client.post("/v1/chat/completions", json=body_of(stream=True)).text.split("\n\n")[:-2]
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        deltas = [delta for choice in choices for delta in choice["delta"].get("tool_calls", ())]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "Well:"
        starts = [delta for delta in deltas if "id" in delta]
        assert [(start["index"], start["type"], start["function"]) for start in starts] == [
            (0, "function", {"name": "weather", "arguments": ""}),
            (1, "function", {"name": "time", "arguments": ""}),
        ]
        pieces = [delta["function"]["arguments"] for delta in deltas if delta["index"] == 0]
        assert "".join(pieces) == ARGUMENTS
        assert len(pieces) > 5
        assert choices[-1]["finish_reason"] == "tool_calls"

    def test_a_call_cut_by_the_limit_says_so(self, client: TestClient) -> None:
        choice = choice_of(client, max_tokens=45)
        assert choice["finish_reason"] == "length"


class TestForcedCalls:
    def test_required_answers_are_calls(self, client: TestClient, engine: ScriptedEngine) -> None:
        engine.answer = "No."
        choice = choice_of(client, tool_choice="required", max_tokens=300, parallel_tool_calls=False)
        ((name, arguments),) = functions_of(choice)
        assert (name, arguments) in [("weather", {"city": "Rom"}), ("weather", {"city": "Ulm"}), ("time", {})]
        assert choice["finish_reason"] == "tool_calls"

    @pytest.mark.parametrize("name", ["weather", "time"])
    def test_a_named_tool_is_called(self, client: TestClient, engine: ScriptedEngine, name: str) -> None:
        engine.answer = "No."
        choice = choice_of(client, tool_choice={"type": "function", "function": {"name": name}}, max_tokens=300)
        assert [called for called, _ in functions_of(choice)] == [name]

    def test_one_call_at_most(self, client: TestClient, engine: ScriptedEngine) -> None:
        one = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
        engine.answer = f"{one}\n{one}"
        assert len(choice_of(client)["message"]["tool_calls"]) == 2
        assert len(choice_of(client, parallel_tool_calls=False)["message"]["tool_calls"]) == 1

    def test_strict_tools_get_arguments_that_match(self, client: TestClient) -> None:
        strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
        choice = choice_of(client, tools=[strict])
        assert functions_of(choice)[0] == ("weather", {"city": "Rom"})


def parsed(pieces: Sequence[Piece]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and (name, arguments) of each call."""
    calls = [
        (piece.name, "".join(more.text for more in pieces if isinstance(more, CallArguments) and more.index == piece.index))
        for piece in pieces
        if isinstance(piece, CallStart)
    ]
    return "".join(piece.text for piece in pieces if isinstance(piece, Content)), calls


def fed(text: str, size: int, *, is_parallel: bool = True) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(["weather", "time"], is_parallel=is_parallel)
    pieces = [piece for start in range(0, len(text), size) for piece in parser.push(text[start : start + size])]
    return parsed([*pieces, *parser.finish()])


NOT_CALLS = [
    "",
    " \n ",
    "plain",
    "a < b <tool_call",
    "<tool_call>no JSON</tool_call> more ",
    'x \n<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
    '<tool_call>["weather"]</tool_call>',
    "\n<tool_call>\n{",
]


class TestParser:
    @pytest.mark.parametrize("size", [1, 2, 7, 1000])
    @pytest.mark.parametrize("text", NOT_CALLS)
    def test_what_is_no_call_stays_as_it_is(self, text: str, size: int) -> None:
        assert fed(text, size) == (text, [])

    @pytest.mark.parametrize("size", [1, 3, 1000])
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (CALL, ("", [("weather", ARGUMENTS)])),
            (f"a\n{CALL}\n\n{CALL}\nb", ("a\nb", [("weather", ARGUMENTS)] * 2)),
            ('<tool_call>{"arguments": {"a": 1}, "name": "time"}</tool_call>', ("", [("time", '{"a": 1}')])),
            ('<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("time", '{"a": 1}')])),
            # Half a character, which no response could carry, stays an escape.
            (r'<tool_call>{"arguments": {"a": "\ud800"}, "name": "time"}</tool_call>', ("", [("time", r'{"a": "\ud800"}')])),
            ('<tool_call>{"name": "time"}</tool_call>', ("", [("time", "{}")])),
            ('<tool_call>{"name": "time", "arguments": null}</tool_call>', ("", [("time", "{}")])),
            ('<tool_call>{"name":"time","arguments":{"a":"\\\\"}}', ("", [("time", '{"a":"\\\\"}')])),
            ('<tool_call>{"name": "time", "arguments": {"a": [1, </tool_call>x', ("x", [("time", '{"a": [1, ')])),
        ],
    )
    def test_calls_are_read_however_they_come(self, text: str, expected: tuple[str, list[tuple[str, str]]], size: int) -> None:
        assert fed(text, size) == expected

    @pytest.mark.parametrize("size", [1, 1000])
    def test_behind_the_one_call_allowed_nothing_follows(self, size: int) -> None:
        assert fed(f"a {CALL} b {CALL}", size, is_parallel=False) == ("a", [("weather", ARGUMENTS)])
