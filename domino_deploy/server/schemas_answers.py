"""The bodies of answers, for `/openapi.json`: what `answering.py` and the other routes write, as models to describe and check it by."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class AnswerPart(BaseModel):
    """Every field that an answer has is described: another one is a mistake."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetails(AnswerPart):
    """What went wrong; `param` is the place in the body, `code` a short name, null where there is none."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(AnswerPart):
    """Every answer of 400 and above."""

    error: ErrorDetails


class CachedTokens(AnswerPart):
    """Prompt tokens whose rows were found in the cache."""

    cached_tokens: int


class Usage(AnswerPart):
    """Token counts of all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Likelihood(AnswerPart):
    """A token with its log-probability, as text and as UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLikelihood(Likelihood):
    """A chosen token and the likeliest ones in its place."""

    top_logprobs: list[Likelihood]


class ChatLogprobs(AnswerPart):
    """Of all tokens of a message."""

    content: list[TokenLikelihood] | None
    refusal: None = None


class FunctionCall(AnswerPart):
    """The name, and the arguments as JSON text."""

    name: str
    arguments: str


class AnswerToolCall(AnswerPart):
    """A tool to call."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(AnswerPart):
    """The next message of the conversation."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnswerToolCall] = Field(default=[])


class Choice(AnswerPart):
    """What both endpoints tell of an answer; stop_reason is vLLM's: the stop string or token that ended it."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None


class ChatChoice(Choice):
    """An answer to a conversation."""

    message: AnswerMessage
    logprobs: ChatLogprobs | None


class CompletionLogprobs(AnswerPart):
    """One entry per token; null for the first one of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Choice):
    """An answer to one prompt."""

    text: str
    logprobs: CompletionLogprobs | None


class SpokenToken(AnswerPart):
    """A token of the answer; drafted: it was proposed by the drafter and accepted, else it is the target's own."""

    id: int
    text: str
    drafted: bool


class Terms(AnswerPart):
    """Milliseconds of cycles, by what took them."""

    draft: float
    head: float
    verify: float
    other: float


class AnswerSpeculation(AnswerPart):
    """How the tokens came about.

    cycles: of the decode loop, the prompt's pass counts as one; batch: answers that shared one of them at most, and with it the times;
    drafts: cycles that drafted; proposed, accepted: tokens of these.
    """

    tokens: list[SpokenToken]
    cycles: int
    batch: int
    drafts: int
    proposed: int
    accepted: int
    terms_ms: Terms


class AcceptanceMetrics(AnswerPart):
    """vLLM's "Per-Request Acceptance Metrics"; the two lists of single steps at the level "detailed" only."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] = Field(default=[])
    per_step_drafted: list[int] = Field(default=[])


class AnswerMetrics(AnswerPart):
    """Statistics of the request; null for several choices, and for a server without a drafter."""

    speculative_decoding: AcceptanceMetrics | None


class WholeAnswer(AnswerPart):
    """What both endpoints tell of all choices together."""

    id: str
    created: int = Field(description="Unix seconds.")
    model: str
    system_fingerprint: None
    usage: Usage
    metrics: AnswerMetrics | None = Field(default=None, description="With --per-request-spec-decode-metrics.")
    speculation: list[AnswerSpeculation] | None = Field(default=None, description="With speculation_details, one per choice.")


class Completion(WholeAnswer):
    """The text behind each prompt."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(WholeAnswer):
    """The next message."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ModelEntry(AnswerPart):
    """One name of the model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(AnswerPart):
    """All names."""

    object: Literal["list"]
    data: list[ModelEntry]


class Tokenized(AnswerPart):
    """Tokens of a text; token_strs: how the tokenizer spells them, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(AnswerPart):
    """Text of tokens."""

    prompt: str


class TokenizerInfo(BaseModel):
    """What builds the same prompts; beside these, special tokens by name."""

    tokenizer_class: str
    model_max_length: int
    chat_template: str | None


class Status(AnswerPart):
    """How the server is."""

    status: Literal["ok", "ready"]


class Version(AnswerPart):
    """Of domino-deploy."""

    version: str
