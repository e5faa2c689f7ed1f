"""openai-python against a server: what its users call, sync and async, and the errors of a server that is well: 400, 401, 404, 429.

Those of a server that is ending, failing, slow or called by another name need one made for it: tests/test_real_clients.py.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import httpx
import openai
from clients_checks import Server, expect, report
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": "Write one sentence about the sea."}]
GREEDY: Any = {"temperature": 0, "max_tokens": 24}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    """What the model is made to answer with."""

    name: str
    population: int
    coastal: bool


def client(server: Server, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(**{"base_url": server.base_url, "api_key": server.api_key, "max_retries": 0, **options})


def asynchronous(server: Server, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**{"base_url": server.base_url, "api_key": server.api_key, "max_retries": 0, **options})


def greedy_answer(server: Server, **options: Any) -> Any:
    return client(server).chat.completions.create(model=server.model, messages=MESSAGES, **{**GREEDY, **options})


def models_list(server: Server) -> str:
    """`models.list` and `models.retrieve` name the model"""
    listed = client(server).models.list().data
    expect(server.model in [model.id for model in listed], f"{server.model} in the list", listed)
    length = client(server).models.retrieve(server.model).to_dict().get("max_model_len")
    expect(isinstance(length, int) and length > 0, "max_model_len", length)
    return f"{server.model}, max_model_len {length}"


def chat(server: Server) -> str:
    """Chat, sync: text, finish reason and usage"""
    answer = greedy_answer(server)
    usage = answer.usage
    expect(answer.object == "chat.completion", "object chat.completion", answer.object)
    expect(bool(answer.choices[0].message.content), "text", answer.choices[0])
    expect(answer.choices[0].finish_reason in ("stop", "length"), "stop or length", answer.choices[0].finish_reason)
    expect(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, "a total that is the sum", usage)
    return f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, {answer.choices[0].finish_reason}"


def chat_async(server: Server) -> str:
    """Chat, async: eight at once, each equal to the sync answer"""

    async def all_of_them() -> list[Any]:
        async with asynchronous(server) as caller:
            return await asyncio.gather(
                *(caller.chat.completions.create(model=server.model, messages=MESSAGES, **GREEDY) for _ in range(8))
            )

    wanted = greedy_answer(server).choices[0].message.content
    texts = [answer.choices[0].message.content for answer in asyncio.run(all_of_them())]
    expect(texts == [wanted] * 8, f"eight times {wanted!r}", texts)
    return "8 equal answers"


def chat_stream(server: Server) -> str:
    """Stream, sync: role first, one finish reason, joined text equal to the answer in one piece"""
    chunks = list(client(server).chat.completions.create(model=server.model, messages=MESSAGES, stream=True, **GREEDY))
    expect(chunks[0].choices[0].delta.role == "assistant", "the role in the first chunk", chunks[0])
    expect({chunk.object for chunk in chunks} == {"chat.completion.chunk"}, "one kind of object", chunks[0])
    expect(len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1, "one id, time and model", chunks[0])
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    expect(len(reasons) == 1, "one finish reason", reasons)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    wanted = greedy_answer(server).choices[0]
    expect((text, reasons[0]) == (wanted.message.content, wanted.finish_reason), repr(wanted), (text, reasons))
    return f"{len(chunks)} chunks"


def chat_stream_async(server: Server) -> str:
    """Stream, async, closed after three chunks: the server goes on serving"""

    async def three_chunks() -> int:
        async with asynchronous(server) as caller:
            many: Any = {**GREEDY, "max_tokens": 200}
            stream: Any = await caller.chat.completions.create(model=server.model, messages=MESSAGES, stream=True, **many)
            seen = 0
            async for _ in stream:
                seen += 1
                if seen == 3:
                    break
            await stream.close()
            return seen

    seen = asyncio.run(three_chunks())
    expect(seen == 3, "three chunks", seen)
    return chat(server)


def chat_stream_usage(server: Server) -> str:
    """Stream with `include_usage`: a last chunk without choices whose usage equals the answer's in one piece"""
    stream: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client(server).chat.completions.create(model=server.model, messages=MESSAGES, **GREEDY, **stream))
    expect(chunks[-1].choices == [], "no choices in the last chunk", chunks[-1])
    expect(all(chunk.usage is None for chunk in chunks[:-1]), "usage in the last chunk alone", chunks)
    counted, wanted = chunks[-1].usage, greedy_answer(server).usage
    found = (counted.prompt_tokens, counted.completion_tokens)
    expect(found == (wanted.prompt_tokens, wanted.completion_tokens), repr(wanted), counted)
    return f"usage {found[0]} + {found[1]} in the chunk and in the answer"


def plain(server: Server) -> str:
    """`speculative: false` through `extra_body` gives the same text"""
    found = greedy_answer(server, extra_body={"speculative": False}).choices[0].message.content
    wanted = greedy_answer(server).choices[0].message.content
    expect(found == wanted, repr(wanted), found)
    return repr(found)


def sampled(server: Server) -> str:
    """Temperature 1 with a seed: twice the same text, another seed another text"""
    texts = [greedy_answer(server, temperature=1, seed=seed).choices[0].message.content for seed in (7, 7, 8)]
    expect(texts[0] == texts[1] != texts[2], "equal, equal, different", texts)
    return repr(texts[0])


def stop_string(server: Server) -> str:
    """`stop`: the text ends before it, finish reason stop"""
    whole = greedy_answer(server).choices[0].message.content
    word = whole.split()[3]
    cut = greedy_answer(server, stop=[word]).choices[0]
    expect((cut.message.content, cut.finish_reason) == (whole.split(word)[0], "stop"), repr(whole.split(word)[0]), cut)
    return f"stopped before {word!r}"


def logprobs(server: Server) -> str:
    """`logprobs` and `top_logprobs`: one entry a token, texts join to the answer, the greedy token is the likeliest"""
    answer = greedy_answer(server, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    expect(len(entries) == answer.usage.completion_tokens, f"{answer.usage.completion_tokens} entries", len(entries))
    text = "".join(entry.token for entry in entries)
    expect(text.startswith(answer.choices[0].message.content), answer.choices[0].message.content, text)
    for entry in entries:
        tops = [top.logprob for top in entry.top_logprobs]
        expect(len(tops) == 3 and tops == sorted(tops, reverse=True) and entry.logprob == tops[0] <= 0, "the likeliest first", entry)
    return f"{len(entries)} tokens, mean logprob {sum(entry.logprob for entry in entries) / len(entries):.3f}"


def json_schema(server: Server) -> str:
    """`response_format` JSON schema, and `chat.completions.parse` with a pydantic model"""
    asked: Any = [{"role": "user", "content": "Describe the city of Oslo as JSON."}]
    schema: Any = {
        "type": "json_schema",
        "json_schema": {
            "name": "city",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 20}, "coastal": {"type": "boolean"}},
                "required": ["name", "coastal"],
                "additionalProperties": False,
            },
        },
    }
    limit: Any = {"temperature": 0, "max_tokens": 160}
    content = client(server).chat.completions.create(model=server.model, messages=asked, response_format=schema, **limit)
    value = json.loads(content.choices[0].message.content or "")
    expect(set(value) == {"name", "coastal"} and isinstance(value["coastal"], bool), "name and coastal", value)
    parsed = client(server).chat.completions.parse(model=server.model, messages=asked, response_format=City, **limit)
    city = parsed.choices[0].message.parsed
    expect(isinstance(city, City), "a City", parsed.choices[0])
    return f"{value}; {city!r}"


def tools(server: Server) -> str:
    """`tools`, called by name, and by `tool_choice: required` whole and streamed: one call, arguments that fit the schema"""
    asked: Any = {
        "model": server.model,
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
        "tools": [WEATHER],
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 120,
    }
    create = client(server).chat.completions.create
    found = []
    for choice in ({"type": "function", "function": {"name": "get_weather"}}, "required"):
        answer = create(**asked, tool_choice=choice).choices[0]
        calls = answer.message.tool_calls or []
        expect([call.function.name for call in calls] == ["get_weather"], "one call of get_weather", answer)
        found.append(json.loads(calls[0].function.arguments))
        expect(set(found[-1]) == {"city", "unit"} and found[-1]["unit"] in ("celsius", "fahrenheit"), "city and unit", found[-1])
        expect(answer.finish_reason == "tool_calls", "finish reason tool_calls", answer)
    chunks = create(**asked, tool_choice="required", stream=True)
    deltas = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    text = "".join(delta.function.arguments or "" for delta in deltas)
    expect(json.loads(text) == found[1], repr(found[1]), text)
    return f"get_weather({found[1]}), streamed in {len(deltas)} pieces"


def completions(server: Server) -> str:
    """Completions with `echo` and `logprobs`, the prompt as text and as token ids: the same answer"""
    asked: Any = {"model": server.model, "max_tokens": 8, "temperature": 0, "echo": True, "logprobs": 1}
    prompt = "The capital of France is"
    answer = client(server).completions.create(prompt=prompt, **asked)
    choice: Any = answer.choices[0]
    expect(choice.text.startswith(prompt) and len(choice.text) > len(prompt), "the prompt and more", choice.text)
    values, tokens = choice.logprobs.token_logprobs, choice.logprobs.tokens
    expect(values[0] is None and all(math.isfinite(value) for value in values[1:]), "None, then numbers", values)
    expect(len(values) == len(tokens) == answer.usage.total_tokens, "one for every token", answer.usage)  # type: ignore[union-attr]
    expect("".join(tokens) == choice.text, choice.text, tokens)
    headers = {"Authorization": f"Bearer {server.api_key}"}
    ids = httpx.post(f"{server.url}/tokenize", json={"model": server.model, "prompt": prompt}, headers=headers).json()["tokens"]
    by_ids: Any = client(server).completions.create(prompt=ids, **asked).choices[0]
    expect(by_ids.text == choice.text, choice.text, by_ids.text)
    return f"{choice.text!r}, prompt logprob {sum(values[1:-8]):.3f}"


def list_of_prompts(server: Server) -> str:
    """Completions with a list of prompts, streamed and not: choices by `index`"""
    prompts = ["One, two,", "The sky is", "Roses are red,"]
    asked: Any = {"model": server.model, "max_tokens": 8, "temperature": 0}
    alone = [client(server).completions.create(prompt=prompt, **asked).choices[0].text for prompt in prompts]
    together = client(server).completions.create(prompt=prompts, **asked).choices
    expect([choice.text for choice in sorted(together, key=lambda choice: choice.index)] == alone, repr(alone), together)
    pieces = ["", "", ""]
    for chunk in client(server).completions.create(prompt=prompts, stream=True, **asked):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    expect(pieces == alone, repr(alone), pieces)
    return f"{len(prompts)} prompts"


def errors(server: Server) -> str:
    """Errors: 401 for a wrong key, 404 for another model, 400 with `param`, 400 with both lengths for a prompt too long"""
    seen = []

    def refused(kind: type[openai.APIStatusError], param: str | None, **options: Any) -> Any:
        key = options.pop("api_key", server.api_key)
        try:
            asked = {"model": server.model, "messages": MESSAGES, **GREEDY, **options}
            client(server, api_key=key).chat.completions.create(**asked)
        except kind as error:
            expect(error.param == param, f"param {param}", error.body)
            seen.append(f"{error.status_code} {error.code}")
            return error
        raise openai.OpenAIError(f"no {kind.__name__}")

    refused(openai.AuthenticationError, None, api_key="wrong")
    refused(openai.NotFoundError, "model", model="another")
    refused(openai.BadRequestError, "n", n=3)
    refused(openai.BadRequestError, "temperature", temperature=-1)
    length: Any = client(server).models.retrieve(server.model).to_dict()["max_model_len"]
    too_long = refused(openai.BadRequestError, "messages", messages=[{"role": "user", "content": "word " * (length + 10)}])
    expect(too_long.code == "context_length_exceeded" and str(length) in too_long.message, f"both lengths, {length}", too_long.message)
    return ", ".join(seen)


def queue_full(server: Server) -> str:
    """429 when the queue is full, with `Retry-After`; with retries every request is served"""

    async def burst(retries: int) -> list[Any]:
        async with asynchronous(server, max_retries=retries, timeout=300) as caller:
            create = caller.chat.completions.create
            return await asyncio.gather(
                *(create(model=server.model, messages=MESSAGES, **GREEDY) for _ in range(48)), return_exceptions=True
            )

    answers = asyncio.run(burst(0))
    refusals = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    others = [answer for answer in answers if isinstance(answer, Exception) and answer not in refusals]
    expect(bool(refusals) and not others, "some RateLimitError and no other error", others or "no refusal")
    waits = {error.response.headers.get("retry-after") for error in refusals}
    expect(all(wait and float(wait) > 0 for wait in waits), "Retry-After in seconds", waits)
    retried = asyncio.run(burst(20))
    failed = [answer for answer in retried if isinstance(answer, Exception)]
    expect(not failed, "48 answers", failed)
    return f"{len(refusals)} of 48 refused without retries, Retry-After {sorted(map(str, waits))}; none with"


def request_id(server: Server) -> str:
    """`x-request-id` comes back, and is part of the answer's id"""
    raw = client(server).chat.completions.with_raw_response.create(
        model=server.model, messages=MESSAGES, extra_headers={"x-request-id": "my-own-id-1"}, **GREEDY
    )
    expect(raw.headers.get("x-request-id") == "my-own-id-1", "my-own-id-1", raw.headers.get("x-request-id"))
    expect("my-own-id-1" in raw.parse().id, "the id inside the answer's", raw.parse().id)
    return raw.parse().id


def usage_of_stream_matches_text(server: Server) -> str:
    """Stream of Greek and emoji: whole characters in every piece; joined, text and usage of the whole answer, and its tokens' bytes"""
    # Left to itself the demo model answers in ASCII, of which no piece can be half a character.
    several_bytes: Any = {"structured_outputs": {"regex": "[α-ω]{12} [🙂-🙏]{8}"}}
    asked: Any = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 64, "extra_body": several_bytes}
    chunks = list(client(server).chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
    text, usage = "".join(pieces), chunks[-1].usage
    answer: Any = client(server).chat.completions.create(**asked, logprobs=True)
    choice, entries = answer.choices[0], answer.choices[0].logprobs.content
    expect(text == choice.message.content, repr(choice.message.content), text)
    counted = [(found.prompt_tokens, found.completion_tokens) for found in (usage, answer.usage)]
    expect(counted[0] == counted[1], repr(answer.usage), usage)
    expect(len(entries) == usage.completion_tokens, f"{usage.completion_tokens} tokens", len(entries))
    expect(choice.finish_reason == "stop", "an answer that max_tokens did not cut", choice.finish_reason)
    # All but the token that stops the answer, which has no text.  Half a character, anywhere, would be U+FFFD in the text alone.
    spelled = b"".join(bytes(entry.bytes) for entry in entries[:-1])
    expect(text.encode() == spelled and len(text) == 21, f"12 letters, a blank and 8 emoji: {spelled!r}", text)
    split = sum(not _is_utf8(bytes(entry.bytes)) for entry in entries[:-1])
    expect(split > 0, "tokens that are part of a character", entries)
    return f"{text!r}: {len(pieces)} pieces, {len(entries)} tokens, {split} of them a part of a character"


def _is_utf8(spelled: bytes) -> bool:
    try:
        spelled.decode()
    except UnicodeDecodeError:
        return False
    return True


if __name__ == "__main__":
    report(
        ["openai"],
        [
            models_list,
            chat,
            chat_async,
            chat_stream,
            chat_stream_async,
            chat_stream_usage,
            usage_of_stream_matches_text,
            plain,
            sampled,
            stop_string,
            logprobs,
            json_schema,
            tools,
            completions,
            list_of_prompts,
            errors,
            queue_full,
            request_id,
        ],
    )
