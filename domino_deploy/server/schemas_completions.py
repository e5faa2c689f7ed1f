"""The body of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from domino_deploy.server.fields import GenerationFields, TokenId, TopLogprobs
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
    logprobs: TopLogprobs | None = Field(default=None, description="Likeliest tokens to report at each position, beside the chosen one.")

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
    def wanted_tokens(self) -> int:
        """Tokens to generate at most, 0 included."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
