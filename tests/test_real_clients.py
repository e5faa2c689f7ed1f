"""Clients as they are installed, against a real server process: openai-python, LangChain, Prometheus' parser.

More of them, and the demo pair: scripts/clients.  Errors that take a server in trouble come from one over a scripted engine.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from domino_deploy.runtime.session import GenerationParams, Session
from domino_deploy.server.app import create_app
from domino_deploy.server.settings import ServerSettings
from tests.support.fake_engine import ScriptedEngine
from tests.support.loopback import served

QUESTIONS = ("Hello there", "What is in the box?", "naïve café", "1 2 3 4 5", "Hello there, again")
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def single_runs(tiny_bundle: Path) -> dict[str, tuple[str, str, int]]:
    """Text, finish reason and tokens of each question, from a session that does nothing else."""
    found = {}
    with Session.open(tiny_bundle, threads=1) as session:
        for question in QUESTIONS:
            chunks = list(session.generate(session.prompt_ids(question), GenerationParams(max_new_tokens=MAX_TOKENS)))
            tokens = sum(len(chunk.step.token_ids) for chunk in chunks)
            found[question] = ("".join(chunk.text for chunk in chunks), str(chunks[-1].finish_reason), tokens)
    return found


@pytest.fixture
def client(tiny_server: Any) -> Any:
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key=tiny_server.api_key, max_retries=0) as caller:
        yield caller


def asked(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "demo-bundle", "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS, **more}


def seen(answer: Any) -> tuple[str, str, int]:
    choice = answer.choices[0]
    return choice.message.content, choice.finish_reason, answer.usage.completion_tokens


def scrape(server: Any) -> Counter[str]:
    """Samples summed over their labels."""
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(server.get("/metrics")):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return sums


def test_openai_gets_the_answer_of_the_single_run(client: openai.OpenAI, single_runs: dict[str, tuple[str, str, int]]) -> None:
    assert {question: seen(client.chat.completions.create(**asked(question))) for question in QUESTIONS} == single_runs


def test_openai_gets_it_for_many_at_a_time(tiny_server: Any, single_runs: dict[str, tuple[str, str, int]]) -> None:
    async def all_of_them() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{tiny_server.url}/v1", api_key=tiny_server.api_key, max_retries=0) as caller:
            return await asyncio.gather(*(caller.chat.completions.create(**asked(question)) for question in QUESTIONS * 3))

    assert [seen(answer) for answer in asyncio.run(all_of_them())] == [single_runs[question] for question in QUESTIONS] * 3


def test_openai_streams_it_with_usage_at_the_end(client: openai.OpenAI, single_runs: dict[str, tuple[str, str, int]]) -> None:
    for question in QUESTIONS:
        stream = client.chat.completions.create(**asked(question), stream=True, stream_options={"include_usage": True})
        *chunks, last = list(stream)
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert (text, *reasons, last.usage.completion_tokens) == single_runs[question]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert last.choices == []
        assert all(chunk.usage is None for chunk in chunks)


def test_openai_completes_token_ids_with_echo_and_logprobs(client: openai.OpenAI) -> None:
    prompt = [5, 6, 7, 8]
    answer = client.completions.create(model="demo-bundle", prompt=prompt, max_tokens=3, temperature=0, echo=True, logprobs=1)
    logprobs: Any = answer.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.token_logprobs) == len(prompt) + answer.usage.completion_tokens
    assert all(max(top.values()) >= value for top, value in zip(logprobs.top_logprobs[1:], logprobs.token_logprobs[1:], strict=True))
    generated = zip(logprobs.top_logprobs[4:], logprobs.token_logprobs[4:], strict=True)
    assert all(max(top.values()) == value for top, value in generated)


@pytest.mark.parametrize(
    ("change", "expected", "param"),
    [
        ({"model": "another"}, openai.NotFoundError, "model"),
        ({"n": 2}, openai.BadRequestError, "n"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
    ],
)
def test_openai_raises_the_class_that_fits(
    client: openai.OpenAI, change: dict[str, Any], expected: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(expected) as raised:
        client.chat.completions.create(**asked("Hello", **change))
    assert raised.value.param == param


def test_openai_raises_for_a_wrong_key(tiny_server: Any) -> None:
    with (
        openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="wrong", max_retries=0) as caller,
        pytest.raises(openai.AuthenticationError),
    ):
        caller.models.list()


class Counting:
    """An application, and how many requests it was sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.requests += 1
        await self._app(scope, receive, send)


def fail_soon(engine: ScriptedEngine) -> None:
    """A pass behind the prompt's own raises."""
    engine.fail_after(3)


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A server in trouble and what openai-python is to make of it.

    settings: of the server; headers, fields: of the request; befalls: what happens to the engine first; retries: what the client may do.
    """

    status: int
    kind: type[openai.APIStatusError]
    code: str | None
    words: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    befalls: Callable[[ScriptedEngine], object] = lambda engine: None
    retries: int = 2


# Allowed two retries, the client makes none: not of 403 and 413, and of a 408 since `x-should-retry` says so.  It would of every 5xx.
TROUBLES = [
    Trouble(
        status=403,
        kind=openai.PermissionDeniedError,
        code="host_not_allowed",
        words="found 'rebound.example'",
        headers={"Host": "rebound.example"},
    ),
    Trouble(
        status=408,
        kind=openai.APIStatusError,
        code="request_timeout",
        words="Expected the answer within 0.3 s",
        settings={"request_timeout_seconds": 0.3},
    ),
    Trouble(
        status=413,
        kind=openai.APIStatusError,
        code="body_too_large",
        words="at most 1024 bytes",
        settings={"max_body_bytes": 1024},
        fields={"user": "x" * 1024},
    ),
    Trouble(
        status=500,
        kind=openai.InternalServerError,
        code=None,
        words="The server failed on this request",
        befalls=fail_soon,
        retries=0,
    ),
    Trouble(
        status=503,
        kind=openai.InternalServerError,
        code="unavailable",
        words="Try again later",
        befalls=lambda engine: engine.drain(timeout_seconds=0),
        retries=0,
    ),
]


def whole_answer(url: str, trouble: Trouble) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=trouble.retries, default_headers=trouble.headers) as caller:
        caller.chat.completions.create(**asked("Hello", max_tokens=300, **trouble.fields))


def whole_answer_async(url: str, trouble: Trouble) -> None:
    async def answered() -> None:
        options: Any = {"max_retries": trouble.retries, "default_headers": trouble.headers}
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", **options) as caller:
            await caller.chat.completions.create(**asked("Hello", max_tokens=300, **trouble.fields))

    asyncio.run(answered())


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("trouble", TROUBLES, ids=[str(trouble.status) for trouble in TROUBLES])
def test_openai_raises_the_class_of_a_server_in_trouble(tiny_bundle: Path, trouble: Trouble, is_async: bool) -> None:
    settings = ServerSettings(served_model_names=("demo-bundle",), **trouble.settings)
    with ScriptedEngine(tiny_bundle, "x" * 400, seconds_per_row=0.01) as engine:
        app = Counting(create_app(engine, settings))
        trouble.befalls(engine)
        answered = whole_answer_async if is_async else whole_answer
        with served(app) as url, pytest.raises(trouble.kind, match=trouble.words) as raised:
            answered(url, trouble)
    assert (raised.value.status_code, raised.value.code) == (trouble.status, trouble.code)
    assert "fire" not in str(raised.value), "what the engine died of is none of a client's business"
    assert app.requests == 1


@pytest.mark.parametrize(
    ("settings", "befalls", "code", "words"),
    [
        ({"request_timeout_seconds": 0.3}, lambda engine: None, "request_timeout", "Expected the answer within 0.3 s"),
        ({}, fail_soon, None, "The server failed on this request"),
    ],
    ids=["time limit", "engine that dies"],
)
def test_openai_raises_what_an_event_inside_a_stream_says(
    tiny_bundle: Path, settings: dict[str, Any], befalls: Callable[[ScriptedEngine], None], code: str | None, words: str
) -> None:
    with ScriptedEngine(tiny_bundle, "x" * 400, seconds_per_row=0.01) as engine:
        app = create_app(engine, ServerSettings(served_model_names=("demo-bundle",), **settings))
        befalls(engine)
        with served(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="any") as caller:
            stream = caller.chat.completions.create(**asked("Hello", max_tokens=300), stream=True)
            first = next(stream)
            assert first.choices[0].delta.role == "assistant", "the answer had begun"
            with pytest.raises(openai.APIError, match=words) as raised:
                list(stream)
    assert not isinstance(raised.value, openai.APIStatusError), "the status was 200"
    assert raised.value.code == code


def test_openai_leaves_a_stream_and_the_slot_is_free_again(tiny_server: Any, client: openai.OpenAI) -> None:
    before = scrape(tiny_server)
    stream = client.chat.completions.create(**asked("Hello", max_tokens=150, extra_body={"ignore_eos": True}), stream=True)
    next(iter(stream))
    stream.close()
    for _ in range(200):
        after = scrape(tiny_server)
        if after["vllm:request_success_total"] > before["vllm:request_success_total"]:
            break
        httpx.get(f"{tiny_server.url}/health")  # gives the server a moment
    assert after["vllm:num_requests_running"] == 0


class Verdict(BaseModel):
    """What even a random model can say."""

    is_right: bool
    grade: int


def chat_model(tiny_server: Any, **options: Any) -> ChatOpenAI:
    base: dict[str, Any] = {"base_url": f"{tiny_server.url}/v1", "api_key": tiny_server.api_key, "model": "demo-bundle", "max_retries": 0}
    return ChatOpenAI(**base, temperature=0, **{"max_tokens": MAX_TOKENS, **options})


def test_langchain_invokes_and_streams_the_same_text(tiny_server: Any, single_runs: dict[str, tuple[str, str, int]]) -> None:
    text, reason, tokens = single_runs[QUESTIONS[0]]
    answer = chat_model(tiny_server).invoke(QUESTIONS[0])
    assert (answer.content, answer.response_metadata["finish_reason"], answer.usage_metadata["output_tokens"]) == (text, reason, tokens)
    chunks = list(chat_model(tiny_server).stream(QUESTIONS[0]))
    assert "".join(chunk.content for chunk in chunks) == text
    with_usage = list(chat_model(tiny_server, stream_usage=True).stream(QUESTIONS[0]))
    assert "".join(chunk.content for chunk in with_usage) == text
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in with_usage if chunk.usage_metadata) == tokens


def test_langchain_gets_a_structured_answer(tiny_server: Any) -> None:
    schema = {
        "title": "verdict",
        "type": "object",
        "properties": {"is_right": {"type": "boolean"}, "grade": {"enum": [1, 2, 3]}},
        "required": ["is_right", "grade"],
        "additionalProperties": False,
    }
    model = chat_model(tiny_server, max_tokens=100).with_structured_output(schema, method="json_schema")
    assert Verdict.model_validate(model.invoke("Is it right?")).grade in (1, 2, 3)


def test_prometheus_counts_what_the_answers_say(tiny_server: Any, client: openai.OpenAI) -> None:
    before = scrape(tiny_server)
    answers = [client.chat.completions.create(**asked(question)) for question in QUESTIONS]
    streams = [
        client.chat.completions.create(**asked(question), stream=True, stream_options={"include_usage": True}) for question in QUESTIONS
    ]
    usages = [answer.usage for answer in answers] + [list(stream)[-1].usage for stream in streams]
    grown = scrape(tiny_server)
    grown.subtract(before)
    assert grown["vllm:prompt_tokens_total"] == sum(usage.prompt_tokens for usage in usages)
    assert grown["vllm:generation_tokens_total"] == sum(usage.completion_tokens for usage in usages)
    assert grown["vllm:request_success_total"] == grown["vllm:time_to_first_token_seconds_count"] == len(usages)
    accepted = grown["vllm:spec_decode_num_accepted_tokens_total"]
    assert grown["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == accepted <= grown["vllm:spec_decode_num_draft_tokens_total"]
    # In vLLM's shape, the sum over the answers is what the counters grew by.
    told = [answer.model_extra["metrics"]["speculative_decoding"] for answer in answers]
    assert sum(each["num_accepted_draft_tokens"] for each in told if each) <= accepted
    assert json.loads(json.dumps(told)) == told
