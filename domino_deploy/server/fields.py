"""Fields that chat and plain completions share, with their bounds, and what of them the engine is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from domino_deploy.errors import RequestError
from domino_deploy.runtime.constraints import Constraint
from domino_deploy.runtime.requests import MAX_TOP_LOGPROBS, GenerationParams
from domino_deploy.runtime.sampling import MAX_LOGIT_BIAS, MAX_PENALTY, MAX_REPETITION_PENALTY, MAX_SEED, SamplingParams
from domino_deploy.server.body import Body, invalid
from domino_deploy.server.errors import ApiError
from domino_deploy.server.problems import Problem

# OpenAI takes 4 stops and 300 biases: room for more, but none for a request that costs every other one time in each step.
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 1024
MAX_NAME_CHARACTERS = 64
# JSON has no bound for integers; caches have one far below.
MAX_TOKENS = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
# Of functions and schemas, as OpenAI allows them.
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS, pattern=r"^[a-zA-Z0-9_-]+$")]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]


class StreamOptions(Body):
    """What a stream carries beside the answer."""

    include_usage: bool | None = Field(default=None, description="One more chunk with the usage, and no choices, before the end.")
    continuous_usage_stats: Literal[False] | None = Field(default=None, description="Usage in every chunk: not supported.")


class JsonSchemaFormat(Body):
    """A JSON schema that the answer must match."""

    name: Name = Field(description="What OpenAI's clients call it; without effect.")
    description: str | None = Field(default=None, description="Accepted, without effect.")
    json_schema: dict[str, Any] = Field(alias="schema", description="The schema; a masked grammar makes the answer match it.")
    strict: bool | None = Field(default=None, description="Answers match in any case.")


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(default=None, description="For the type json_schema.")

    def constraint(self) -> Constraint | None:
        """What the answer must match; errors as `Constraint`."""
        if self.type == "json_object":
            return Constraint(kind="json_object")
        if self.type == "json_schema" and self.json_schema is not None:
            return Constraint(kind="json_schema", source=json.dumps(self.json_schema.json_schema))
        return None

    def problems(self) -> Iterator[Problem]:
        if self.type == "json_schema" and self.json_schema is None:
            yield "response_format.json_schema", "expected it for the type json_schema, found no such field"
        if self.type != "json_schema" and self.json_schema is not None:
            yield "response_format.json_schema", f"expected it for the type json_schema only, found it for {self.type}"


class GenerationFields(Body):
    """Fields of both endpoints.  null is as good as left out, everywhere."""

    model: str = Field(description="One of the names that /v1/models lists.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(default=None, description="0 is greedy decoding; 1 if left out.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Mass of the likeliest tokens to keep; 1 if left out."
    )
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = Field(
        default=None, description="Likeliest tokens to keep; 0 and -1 keep all."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Least likelihood, relative to the likeliest token's."
    )
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = Field(default=None, description="Makes sampling repeatable.")
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = Field(
        default=None, description="End before the first of these strings."
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_BIASES, fail_fast=True)] | None = Field(
        default=None, description="End behind one of these tokens."
    )
    ignore_eos: bool | None = Field(default=None, description="Do not end at the model's own end-of-sequence tokens.")
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = Field(default=None, description="Tokens to generate at most.")
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = Field(default=None, description="Tokens before which nothing stops it.")
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = Field(
        default=None, description="Token id (as a string) to a number that is added to its logit."
    )
    presence_penalty: Penalty | None = Field(default=None, description="Taken off logits of tokens that were generated.")
    frequency_penalty: Penalty | None = Field(default=None, description="Taken off logits per time that a token was generated.")
    repetition_penalty: Annotated[float, Field(ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = Field(
        default=None, description="Divides (or multiplies negative) logits of tokens of prompt and answer; 1 changes nothing."
    )
    response_format: ResponseFormat | None = Field(default=None, description="Text (left out), any JSON object, or a schema's JSON.")
    stream: bool | None = Field(default=None, description="Answer as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="With `stream` only.")
    add_special_tokens: bool | None = Field(
        default=None, description="Let the tokenizer add its own special tokens to the prompt; chat: false if left out, else true."
    )
    user: str | None = Field(default=None, description="Accepted, without effect.")
    metadata: dict[str, Any] | None = Field(default=None, description="Accepted, without effect.")
    speculative: bool | None = Field(default=None, description="false: decode without the drafter; the answer is the same.")
    speculation_details: bool | None = Field(default=None, description="Say of every token whether it was drafted, and what cycles cost.")

    def problems(self) -> Iterator[Problem]:
        if self.stream_options is not None and not self.stream:
            yield "stream_options", "expected it with stream: true only, found it without"
        if self.response_format is not None:
            yield from self.response_format.problems()
        for name in self.logit_bias or ():
            if not (name.isascii() and name.isdecimal() and len(name) <= len(str(MAX_TOKENS))):
                yield f"logit_bias.{name[:80]}", "expected a token id as the name, found none"
        if self.ignore_eos and self.constraint_field is not None:
            yield "ignore_eos", f"expected false with a {self.constraint_field} that the answer must match, found true"

    @property
    def constraint_field(self) -> str | None:
        """The field that says what the answer must match; None if it may be anything."""
        is_free = self.response_format is None or self.response_format.type == "text"
        return None if is_free else "response_format"

    def constraint(self) -> Constraint | None:
        """What the answer must match.

        Raises:
            RequestError: something too long to be enforced.
        """
        return None if self.response_format is None else self.response_format.constraint()

    def constraint_error(self, error: RequestError) -> ApiError:
        """The answer to a body whose `constraint_field` cannot be enforced."""
        return ApiError(400, f"{self.constraint_field}: {error}", param=self.constraint_field)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Those of `stop`, one or several."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def generation_params(
        self, *, vocab_size: int, max_new_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> GenerationParams:
        """What the engine is asked for.

        Args:
            vocab_size: tokens of the target.
            max_new_tokens: what the endpoint makes of its own fields for it.
            logprobs: likeliest tokens to report per generated one, None for no report; prompt_logprobs: the same for the prompt's.

        Raises:
            ApiError: 400; a token that the target does not have, more tokens wanted at least than at most, or a form that cannot be
                enforced.
        """
        biases = {int(name): value for name, value in (self.logit_bias or {}).items()}
        beyond = f"expected token ids below {vocab_size}, the vocabulary's size, found "
        problems = [("logit_bias", f"{beyond}{token}") for token in biases if token >= vocab_size]
        problems += [("stop_token_ids", f"{beyond}{token}") for token in self.stop_token_ids or () if token >= vocab_size]
        if (self.min_tokens or 0) > max_new_tokens:
            problems.append(("min_tokens", f"expected at most {max_new_tokens}, the tokens to generate at most, found {self.min_tokens}"))
        if problems:
            raise invalid(problems)
        try:
            constraint = self.constraint()
        except RequestError as error:
            raise self.constraint_error(error) from error
        sampling = SamplingParams(
            temperature=_given(self.temperature, 1.0),
            top_k=max(0, self.top_k or 0),
            top_p=_given(self.top_p, 1.0),
            min_p=self.min_p or 0.0,
            seed=None if self.seed is None else self.seed % (MAX_SEED + 1),  # two's complement: negative seeds are seeds too
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_given(self.repetition_penalty, 1.0),
            logit_bias=biases,
        )
        return GenerationParams(
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens or 0,
            stop_strings=self.stop_strings,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            num_speculative_tokens=0 if self.speculative is False else None,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            constraint=constraint,
        )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
