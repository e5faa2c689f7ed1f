"""Fields that chat and plain completions share, with their bounds, and what of them the engine is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticKnownError

from domino_deploy.errors import ConstraintError
from domino_deploy.runtime.requests import MAX_TOP_LOGPROBS, GenerationParams
from domino_deploy.runtime.sampling import (
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TOP_K,
    MIN_P_RANGE,
    MIN_TEMPERATURE,
    TOP_P_RANGE,
    SamplingParams,
)
from domino_deploy.server.body import Body, invalid
from domino_deploy.server.errors import ApiError
from domino_deploy.server.problems import Problem
from domino_deploy.server.schemas_structured import StructuredFields

MAX_TEMPERATURE = 2  # OpenAI's; `SamplingParams` has no such limit
# OpenAI takes 4 stops and 300 biases: room for more, but none for a request that costs every other one time in each step.
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 1024
# JSON has no bound for integers; caches have one far below.
MAX_TOKENS = 2**31 - 1
_Number = TypeVar("_Number", int, float)
NO_LIMIT = -1  # of `max_tokens`, as llama-server has it

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
OneStop = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]


def _not_too_many(found: object) -> object:
    # Pydantic counts an object's items once it has looked into all of them: millions fit into a body, each with an error.
    if isinstance(found, dict) and len(found) > MAX_BIASES:
        raise PydanticKnownError("too_long", {"field_type": "Dictionary", "max_length": MAX_BIASES, "actual_length": len(found)})
    return found


# How clients of llama-server, whose biases are a list, say that there are none.
NoBiases = Annotated[list[Any], Field(json_schema_extra={"maxItems": 0})]  # `problems` has the words for one with items
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
Biases = Annotated[dict[str, Bias], Field(max_length=MAX_BIASES), BeforeValidator(_not_too_many)]


class StreamOptions(Body):
    """What a stream carries beside the answer."""

    include_usage: bool | None = Field(default=None, description="One more chunk with the usage, and no choices, before the end.")
    continuous_usage_stats: bool | None = Field(
        default=None, description="With include_usage: every chunk has the usage of its choice so far, as in vLLM."
    )


class GenerationFields(StructuredFields):
    """Fields of both endpoints.  null is as good as left out, everywhere."""

    model: str = Field(description="One of the names that /v1/models lists.")
    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)] | None = Field(
        default=None, description="0 is greedy decoding; if left out, what the model's own defaults say, else 1."
    )
    top_p: Annotated[float, Field(gt=TOP_P_RANGE[0], le=TOP_P_RANGE[1])] | None = Field(
        default=None, description="Mass of the likeliest tokens to keep; 1 keeps all."
    )
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = Field(
        default=None, description="Likeliest tokens to keep; 0 and -1 keep all."
    )
    min_p: Annotated[float, Field(ge=MIN_P_RANGE[0], le=MIN_P_RANGE[1])] | None = Field(
        default=None, description="Least likelihood, relative to the likeliest token's."
    )
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = Field(default=None, description="Makes sampling repeatable.")
    stop: OneStop | Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = Field(
        default=None, description="End before the first of these strings; an empty one, by itself, is none."
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_BIASES, fail_fast=True)] | None = Field(
        default=None, description="End behind one of these tokens."
    )
    ignore_eos: bool | None = Field(default=None, description="Do not end at the model's own end-of-sequence tokens.")
    max_tokens: Annotated[int, Field(ge=NO_LIMIT, le=MAX_TOKENS)] | None = Field(
        default=None, description="Tokens to generate at most; -1 for what the model's length allows."
    )
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = Field(default=None, description="Tokens before which nothing stops it.")
    logit_bias: Biases | NoBiases | None = Field(
        default=None, description="Token id (as a string) to a number that is added to its logit; an empty list is none."
    )
    presence_penalty: Penalty | None = Field(default=None, description="Taken off logits of tokens that were generated.")
    frequency_penalty: Penalty | None = Field(default=None, description="Taken off logits per time that a token was generated.")
    repetition_penalty: Annotated[float, Field(ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = Field(
        default=None, description="Divides (or multiplies negative) logits of tokens of prompt and answer; 1 changes nothing."
    )
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
        yield from super().problems()
        if self.stream_options is not None and not self.stream:
            yield "stream_options", "expected it with stream: true only, found it without"
        if isinstance(self.logit_bias, list) and self.logit_bias:
            yield "logit_bias", "expected an object of token ids (as strings) and numbers, found a list"
        for name in self._biases:
            if not (name.isascii() and name.isdecimal() and len(name) <= len(str(MAX_TOKENS))):
                yield f"logit_bias.{name[:80]}", "expected a token id as the name, found none"
        if self.ignore_eos and self.constraint_field is not None:
            yield "ignore_eos", f"expected false with a {self.constraint_field} that the answer must match, found true"

    def told(self, error: Exception) -> Exception:
        """What a request of this body failed of; what the answer must match is named by its field."""
        if not isinstance(error, ConstraintError):
            return error
        field, message = self.constraint_field, str(error)
        return ApiError(400, message if message.startswith(f"{field}: ") else f"{field}: {message}", param=field)

    @property
    def _biases(self) -> Mapping[str, float]:
        return self.logit_bias if isinstance(self.logit_bias, dict) else {}

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Those of `stop`, one or several."""
        return (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop or ())

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_in_chunks(self) -> bool:
        """Whether all chunks before it have the usage so far."""
        return self.wants_usage_chunk and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def generation_params(
        self,
        *,
        vocab_size: int,
        max_new_tokens: int,
        defaults: SamplingParams,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> GenerationParams:
        """What the engine is asked for.

        Args:
            vocab_size: tokens of the target.
            max_new_tokens: what the endpoint makes of its own fields for it.
            defaults: of temperature, filters and repetition penalty.
            logprobs: likeliest tokens to report per generated one, None for no report; prompt_logprobs: the same for the prompt's.

        Raises:
            ApiError: 400; a token that the target does not have, more tokens wanted at least than at most, or a form that cannot be
                enforced.
        """
        biases = {int(name): value for name, value in self._biases.items()}
        beyond = f"expected token ids below {vocab_size}, the vocabulary's size, found "
        problems = [("logit_bias", f"{beyond}{token}") for token in biases if token >= vocab_size]
        problems += [("stop_token_ids", f"{beyond}{token}") for token in self.stop_token_ids or () if token >= vocab_size]
        if (self.min_tokens or 0) > max_new_tokens:
            problems.append(("min_tokens", f"expected at most {max_new_tokens}, the tokens to generate at most, found {self.min_tokens}"))
        if problems:
            raise invalid(problems)
        try:
            constraint = self.constraint()
        except ConstraintError as error:
            raise self.told(error) from error
        sampling = SamplingParams(
            temperature=_given(self.temperature, defaults.temperature),
            top_k=max(0, _given(self.top_k, defaults.top_k)),
            top_p=_given(self.top_p, defaults.top_p),
            min_p=_given(self.min_p, defaults.min_p),
            seed=None if self.seed is None else self.seed % (MAX_SEED + 1),  # two's complement: negative seeds are seeds too
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_given(self.repetition_penalty, defaults.repetition_penalty),
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


def _given(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value
