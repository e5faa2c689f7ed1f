"""The chunks of streams, for `/openapi.json`: one event of a stream carries one of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from domino_deploy.server.schemas_answers import AnswerMetrics, AnswerPart, AnswerSpeculation, ChatLogprobs, CompletionLogprobs, Usage


class FunctionCallPart(AnswerPart):
    """The name comes first, the arguments come as pieces of JSON text."""

    name: str = Field(default="")
    arguments: str


class ToolCallPart(AnswerPart):
    """A part of the call at this index; id and type come with its first part."""

    index: int
    id: str = Field(default="")
    type: Literal["function"] = Field(default="function")
    function: FunctionCallPart


class Delta(AnswerPart):
    """What a chunk adds to the message: the role in the first one, nothing in the one with the finish_reason."""

    role: Literal["assistant"] = Field(default="assistant")
    content: str = Field(default="")
    tool_calls: list[ToolCallPart] = Field(default=[])


class ChatChunkChoice(AnswerPart):
    """What a chunk adds to the answer; stop_reason comes with the finish_reason."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    stop_reason: int | str | None = Field(default=None)


class CompletionChunkChoice(AnswerPart):
    """What a chunk adds to the answer to one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None


class UsageSoFar(AnswerPart):
    """Token counts of one choice, up to this chunk."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Chunk(AnswerPart):
    """What chunks of both endpoints carry."""

    id: str
    created: int = Field(description="Unix seconds.")
    model: str
    system_fingerprint: None
    usage: Usage | UsageSoFar | None = Field(
        default=None,
        description="With include_usage: in a chunk without choices, the last one; before it null, or with continuous_usage_stats so far.",
    )
    metrics: AnswerMetrics | None = Field(default=None, description="With --per-request-spec-decode-metrics, beside the usage.")
    speculation: AnswerSpeculation | None = Field(default=None, description="With speculation_details: of what this chunk adds.")


class ChatCompletionChunk(Chunk):
    """A part of the next message; the first one of a choice carries the role."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionChunk(Chunk):
    """A part of the text behind a prompt."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
