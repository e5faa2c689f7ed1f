"""From a checked request to its response, whole or as a stream; the shape of the JSON is a `Form`'s, one per endpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from domino_deploy.errors import ConstraintError
from domino_deploy.runtime.requests import (
    GenerationParams,
    Output,
    OutputToken,
    RequestStatistics,
    TokenLogprobs,
    longest_prompt,
)
from domino_deploy.server.bridge import Generation, while_connected
from domino_deploy.server.errors import ApiError, api_error, error_body
from domino_deploy.server.fields import GenerationFields
from domino_deploy.server.sse import DONE, KEEP_ALIVE, EventStream, event
from domino_deploy.server.state import record_of, state_of
from domino_deploy.server.statistics import SpeculationDetails, speculation_metrics, usage

_LOG = logging.getLogger(__name__)
# Nobody reads it; other servers' logs write it for a client that closed the connection.
_CLIENT_CLOSED = 499


@dataclass(kw_only=True)
class Answer:
    """What one prompt has been answered so far.

    index: of the choice; prompt_ids: the prompt; tokens, finish_reason, stop_reason, prompt_logprobs, statistics: of the outputs so
    far; details: tokens and cycles not told of yet.
    """

    index: int
    prompt_ids: Sequence[int]
    tokens: list[OutputToken] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    statistics: RequestStatistics | None = None
    details: SpeculationDetails = field(default_factory=SpeculationDetails)

    @property
    def text(self) -> str:
        """What the model has said."""
        return "".join(token.text for token in self.tokens)

    def take(self, output: Output) -> None:
        """Add the next output."""
        self.tokens += output.tokens
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason, self.statistics = output.finish_reason, output.stop_reason, output.statistics
        self.details.add(output)


class Form(Protocol):
    """The JSON of an endpoint's answers: chat and plain completions differ in little else."""

    object_name: str
    chunk_name: str
    id_prefix: str

    def choice(self, answer: Answer) -> dict[str, Any]:
        """The choice of a whole answer."""

    def chunk_choices(self, answer: Answer, output: Output) -> Iterator[dict[str, Any]]:
        """The choices of the chunks, one each, that an output becomes; it is taken into `answer` already."""


async def answered(
    request: Request,
    body: GenerationFields,
    prompts: Sequence[Sequence[int]],
    params: GenerationParams,
    form: Form,
) -> Response:
    """The response to a request.

    Args:
        request: its body was read.
        body: the checked body.
        prompts: token ids, one choice each.
        params: of all of them.
        form: of the JSON.

    Raises:
        ApiError: it failed before the first byte of the response; RequestError and its like: the engine refuses it.
    """
    exchange = _Exchange(request, body, prompts, params, form)
    try:
        if body.stream:
            await exchange.generation.start()
            return EventStream(exchange.events(), exchange.generation.close)
        return JSONResponse(await while_connected(request.receive, exchange.whole()))
    except ClientDisconnect:
        return Response(status_code=_CLIENT_CLOSED)
    except ConstraintError as error:
        raise body.told(error) from error


class _Exchange:
    """One request and its response on the way."""

    def __init__(
        self,
        request: Request,
        body: GenerationFields,
        prompts: Sequence[Sequence[int]],
        params: GenerationParams,
        form: Form,
    ) -> None:
        self._state = state_of(request)
        self._record = record_of(request)
        self._body = body
        self._form = form
        self._answers = [Answer(index=index, prompt_ids=prompt) for index, prompt in enumerate(prompts)]
        self._envelope: dict[str, Any] = {
            "id": f"{form.id_prefix}-{self._record.request_id}",
            "object": form.chunk_name if body.stream else form.object_name,
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": None,
        }
        self._record.model, self._record.is_stream = body.model, bool(body.stream)
        settings = self._state.settings
        self.generation = Generation(
            self._state.engine,
            prompts,
            params,
            under_way=self._state.generations,
            name=self._envelope["id"],
            arrived=self._record.arrived,
            time_limit=settings.request_timeout_seconds,
            note_end=self._note_end,
        )

    async def whole(self) -> dict[str, Any]:
        """The JSON of the whole answer."""
        await self.generation.start()
        try:
            async for _ in self._outputs():
                pass
        finally:
            await self.generation.close()
        finished = self._finished()
        choices = [self._form.choice(answer) for answer in self._answers]
        found = {**self._envelope, "choices": choices, "usage": usage(finished), **self._metrics(finished)}
        if self._body.speculation_details:
            found["speculation"] = [answer.details.take() for answer in self._answers]
        return found

    async def events(self) -> AsyncIterator[str]:
        """The events of the stream; of a generation that was started."""
        try:
            async for item in self._outputs():
                if item is None:
                    yield KEEP_ALIVE
                    continue
                answer, output = item
                for choice in self._form.chunk_choices(answer, output):
                    yield event(self._chunk(answer, choice))
            if self._body.wants_usage_chunk:
                finished = self._finished()
                yield event({**self._envelope, "choices": [], "usage": usage(finished), **self._metrics(finished)})
        except Exception as error:
            found = api_error(self._body.told(error))
            if found.status == 500:  # the stream ends in order, so nothing else would say why
                _LOG.exception("Request %s failed", self._record.request_id)
            self._record.error = found.label
            yield event(error_body(found))
        yield DONE

    async def _outputs(self) -> AsyncIterator[tuple[Answer, Output] | None]:
        async for item in self.generation.outputs(self._state.settings.keep_alive_seconds):
            if item is None:
                yield None
                continue
            index, output = item
            answer = self._answers[index]
            answer.take(output)
            if output.finish_reason is not None and self._state.settings.logs_prompts:
                self._log_texts()
            yield answer, output

    def _note_end(self, output: Output) -> None:
        if output.finish_reason is not None and output.statistics is not None:
            self._record.answers.append((output.finish_reason, output.statistics))

    def _chunk(self, answer: Answer, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._envelope, "choices": [choice]}
        # The first chunk of a chat bears the role alone: its tokens come with the text.
        has_tokens = "role" not in choice.get("delta", ())
        if self._body.wants_usage_chunk:
            chunk["usage"] = _usage_so_far(answer, has_tokens=has_tokens) if self._body.wants_usage_in_chunks else None
        if self._body.speculation_details and has_tokens:
            chunk["speculation"] = answer.details.take()
        return chunk

    def _finished(self) -> list[RequestStatistics]:
        return [answer.statistics for answer in self._answers if answer.statistics is not None]

    def _metrics(self, finished: Sequence[RequestStatistics]) -> dict[str, Any]:
        return speculation_metrics(finished, self._state.settings.statistics_level, self._state.engine.max_speculative_tokens)

    def _log_texts(self) -> None:
        decode = self._state.engine.tokenizer.decode
        self._record.prompt = "\n".join(decode(answer.prompt_ids) for answer in self._answers)
        self._record.answer = "\n".join(answer.text for answer in self._answers)


def _usage_so_far(answer: Answer, *, has_tokens: bool) -> dict[str, int]:
    """Of one choice; how much of its prompt was found in a cache is known at the end only."""
    told = len(answer.tokens) if answer.statistics is None else answer.statistics.generated_tokens
    prompt, generated = len(answer.prompt_ids), told if has_tokens else 0
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def check_prompts(prompts: Sequence[Sequence[int]], *, param: str, max_model_len: int, vocab_size: int) -> None:
    """Check prompts before the first one runs.

    Raises:
        ApiError: 400; an empty or too long one, or a token that the target does not have.
    """
    most = longest_prompt(max_model_len)
    for prompt in prompts:
        if not prompt:
            raise ApiError(400, f"{param}: expected at least one token, found none. Send a longer prompt.", param=param)
        if len(prompt) > most:
            raise ApiError(
                400,
                f"{param}: expected at most {most} tokens, the model's length {max_model_len} without one for the answer, "
                f"found {len(prompt)}. Shorten the prompt.",
                param=param,
                code="context_length_exceeded",
            )
        if max(prompt) >= vocab_size:
            raise ApiError(
                400,
                f"{param}: expected token ids below {vocab_size}, the vocabulary's size, found {max(prompt)}. "
                "Tokenise with this model's tokenizer.",
                param=param,
            )
