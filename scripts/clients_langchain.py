"""LangChain's ChatOpenAI against a server."""

from __future__ import annotations

from typing import Any

from clients_checks import Server, expect, report
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

QUESTION = "Name one colour of the rainbow."


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int


def get_weather(city: str) -> str:
    """Current weather of a city."""
    return f"Sunny in {city}"


def chat(server: Server, **options: Any) -> ChatOpenAI:
    asked: Any = {"temperature": 0, "max_tokens": 24, "max_retries": 0, **options}
    return ChatOpenAI(base_url=server.base_url, api_key=server.api_key, model=server.model, **asked)  # type: ignore[arg-type]


def invoke(server: Server) -> str:
    """`invoke`: text, usage metadata and finish reason"""
    answer = chat(server).invoke(QUESTION)
    usage: Any = answer.usage_metadata
    expect(bool(answer.content) and usage["output_tokens"] > 0, "text and usage", answer)
    expect(answer.response_metadata["finish_reason"] in ("stop", "length"), "stop or length", answer.response_metadata)
    return f"{usage['input_tokens']} + {usage['output_tokens']} tokens"


def stream(server: Server) -> str:
    """`stream` as it comes: joined text equal to `invoke`, no usage asked for"""
    chunks = list(chat(server).stream(QUESTION))
    text, wanted = "".join(str(chunk.content) for chunk in chunks), chat(server).invoke(QUESTION).content
    expect(text == wanted, repr(wanted), text)
    return f"{len(chunks)} chunks"


def stream_usage(server: Server) -> str:
    """`stream` with `stream_usage=True`: usage on the last chunk, equal to `invoke`'s"""
    chunks = list(chat(server, stream_usage=True).stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    found, wanted = whole.usage_metadata, chat(server).invoke(QUESTION).usage_metadata
    expect(found is not None and wanted is not None, "usage", found)
    counts = [(usage["input_tokens"], usage["output_tokens"]) for usage in (found, wanted) if usage is not None]
    expect(counts[0] == counts[1], repr(wanted), found)
    return f"usage {counts[0][0]} + {counts[0][1]}"


def structured_output(server: Server) -> str:
    """`with_structured_output`, by JSON schema and by function calling: a pydantic object"""
    found = []
    for method in ("json_schema", "function_calling"):
        model: Any = chat(server, max_tokens=160).with_structured_output(Person, method=method)
        person = model.invoke("Anna is 33 years old. Who is she?")
        expect(isinstance(person, Person), "a Person", person)
        found.append(repr(person))
    return "; ".join(found)


def bind_tools(server: Server) -> str:
    """`bind_tools` with `tool_choice="any"`: a parsed tool call"""
    model: Any = chat(server, max_tokens=120).bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    answer = model.invoke("What is the weather in Oslo?")
    expect([call["name"] for call in answer.tool_calls] == ["get_weather"], "one call of get_weather", answer)
    expect(set(answer.tool_calls[0]["args"]) == {"city"}, "the argument city", answer.tool_calls)
    return f"get_weather({answer.tool_calls[0]['args']})"


if __name__ == "__main__":
    report(["langchain-openai", "langchain-core"], [invoke, stream, stream_usage, structured_output, bind_tools])
