"""The body of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from domino_deploy.server.fields import NO_LIMIT, GenerationFields, TokenId, TopLogprobs
from domino_deploy.server.not_honoured import COMPLETION_INSTEAD, COMPLETION_NOT_HONOURED, Neutral
from domino_deploy.server.problems import Problem

# Each is a request of its own to the engine; evaluation tools send some hundreds.
MAX_PROMPTS = 1024
# Of OpenAI, whose clients that leave it out expect so few.
DEFAULT_MAX_TOKENS = 16

_Text = Annotated[str, Field(min_length=1)]
_Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Several = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)


class CompletionBody(GenerationFields):
    """A request for the text that follows a prompt."""

    not_honoured: ClassVar[Neutral] = COMPLETION_NOT_HONOURED
    instead: ClassVar[Mapping[str, str]] = COMPLETION_INSTEAD

    prompt: _Text | Annotated[list[_Text], _Several] | _Tokens | Annotated[list[_Tokens], _Several] = Field(
        description="A text, token ids, or a list of either, which gives a choice for each."
    )
    echo: bool | None = Field(default=None, description="Put the prompt before the answer, in logprobs too.")
    logprobs: TopLogprobs | Literal[False] | None = Field(
        default=None, description="Likeliest tokens to report at each position, beside the chosen one; false for none."
    )

    @model_validator(mode="before")
    @classmethod
    def _without_limit(cls, found: Any) -> Any:
        """-1 by llama-server's and Ollama's names of `max_tokens`."""
        if isinstance(found, dict) and found.get("max_tokens") is None and NO_LIMIT in (found.get("n_predict"), found.get("num_predict")):
            return {**found, "max_tokens": NO_LIMIT}
        return found

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.max_tokens == 0 and not self.echo:
            yield "max_tokens", "expected at least 1 without echo, found 0"

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each by itself."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]

    @property
    def wanted_tokens(self) -> int | None:
        """Tokens to generate at most, 0 included; None for what the model's length allows."""
        if self.max_tokens == NO_LIMIT:
            return None
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Likeliest tokens to report, None for no report."""
        return None if self.logprobs is False else self.logprobs
