"""`/v1/completions`: the text that follows prompts; with echo and logprobs also how likely the prompts are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from domino_deploy.runtime.requests import Output
from domino_deploy.runtime.text import IncrementalDetokenizer, Tokenizer
from domino_deploy.server.answering import Answer, answered, check_prompts
from domino_deploy.server.body import invalid, read_body
from domino_deploy.server.logprobs import CompletionLogprobs, joined_logprobs
from domino_deploy.server.models import check_model_name
from domino_deploy.server.prompt_text import encoded
from domino_deploy.server.schemas_completions import CompletionBody
from domino_deploy.server.state import state_of
from domino_deploy.server.token_texts import TokenTexts


async def completions(request: Request) -> Response:
    """Continue prompts, whole or as a stream."""
    state = state_of(request)
    body = await read_body(request, CompletionBody)
    check_model_name(state, body.model)
    engine = state.engine
    if body.echo and body.wanted_logprobs is not None and not engine.gives_prompt_logprobs:
        found = "this server's backend has no logprobs of a prompt; expected echo without logprobs, or neither, found both"
        raise invalid([("echo", found)])
    # In a thread: grammars of schemas and tools take a while to write, in which others' streams must go on.
    params = await run_in_threadpool(
        body.generation_params,
        vocab_size=engine.bundle.target.vocab_size,
        max_new_tokens=engine.max_model_len if body.wanted_tokens is None else body.wanted_tokens,
        defaults=state.settings.sampling,
        logprobs=body.wanted_logprobs,
        prompt_logprobs=body.wanted_logprobs if body.echo else None,
    )
    prompts = await run_in_threadpool(_tokenised, body, engine.tokenizer, engine.max_model_len)
    check_prompts(prompts, param="prompt", max_model_len=engine.max_model_len, vocab_size=engine.bundle.target.vocab_size)
    form = CompletionForm(body, engine.tokenizer, state.token_texts)
    return await answered(request, body, prompts, params, form)


class CompletionForm:
    """Choices with a text, of one request."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, body: CompletionBody, tokenizer: Tokenizer, texts: TokenTexts) -> None:
        self._prompts = body.prompts
        self._echoes = bool(body.echo)
        self._has_logprobs = body.wanted_logprobs is not None
        self._tokenizer = tokenizer
        self._logprobs = [CompletionLogprobs(texts) for _ in self._prompts]
        self._is_echoed = [False] * len(self._prompts)

    def choice(self, answer: Answer) -> dict[str, Any]:
        return self._choice(answer, Output(tokens=tuple(answer.tokens), finish_reason=answer.finish_reason, stop_reason=answer.stop_reason))

    def chunk_choices(self, answer: Answer, output: Output) -> Iterator[dict[str, Any]]:
        has_echo = self._echoes and not self._is_echoed[answer.index]
        if output.text or has_echo or output.finish_reason is not None or (self._has_logprobs and output.tokens):
            yield self._choice(answer, output)

    def _choice(self, answer: Answer, output: Output) -> dict[str, Any]:
        index = answer.index
        text, logprobs = output.text, None
        if self._echoes and not self._is_echoed[index]:
            self._is_echoed[index] = True
            prompt, logprobs = self._echo(answer)
            text = prompt + text
        if self._has_logprobs:
            logprobs = joined_logprobs(logprobs, self._logprobs[index].of_answer(output.tokens))
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _echo(self, answer: Answer) -> tuple[str, dict[str, list[Any]] | None]:
        """The prompt's text, as it was sent or else decoded, and its log-probabilities."""
        given = self._prompts[answer.index]
        logprobs = None
        if self._has_logprobs:
            pieces = _pieces(answer.prompt_ids, self._tokenizer)
            assert answer.prompt_logprobs is not None, "asked for, and on the first output"
            logprobs = self._logprobs[answer.index].of_prompt(answer.prompt_ids, pieces, answer.prompt_logprobs)
        return (given if isinstance(given, str) else self._tokenizer.decode(given)), logprobs


def _tokenised(body: CompletionBody, tokenizer: Tokenizer, max_model_len: int) -> list[list[int]]:
    has_special = body.add_special_tokens is not False
    return [
        encoded(prompt, tokenizer, param="prompt", max_model_len=max_model_len, add_special_tokens=has_special)
        if isinstance(prompt, str)
        else prompt
        for prompt in body.prompts
    ]


def _pieces(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The text of each token behind the ones before it."""
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    pieces[-1] += detokenizer.flush()
    return pieces


routes = [Route("/v1/completions", completions, methods=["POST"])]
