"""Clients as they are installed, against a real server process: openai-python, LangChain, Prometheus' parser.

More of them, and the demo pair: scripts/clients.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from langchain_openai import ChatOpenAI
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from domino_deploy.runtime.session import GenerationParams, Session

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
