"""`/v1/chat/completions`: the next message of a conversation, or the tools to call before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from domino_deploy.runtime.requests import STOP, Output, OutputToken
from domino_deploy.server.answering import Answer, answered, check_prompts
from domino_deploy.server.body import read_body
from domino_deploy.server.conversation import chat_prompt_ids, variables_of
from domino_deploy.server.logprobs import chat_logprobs
from domino_deploy.server.models import check_model_name
from domino_deploy.server.schemas_chat import ChatBody
from domino_deploy.server.state import record_of, state_of
from domino_deploy.server.token_texts import TokenTexts
from domino_deploy.server.tool_parser import CallArguments, CallStart, Content, Piece, ToolCallParser
from domino_deploy.template_variables import differing


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or as a stream."""
    state = state_of(request)
    body = await read_body(request, ChatBody)
    check_model_name(state, body.model)
    engine = state.engine
    # In a thread: grammars of schemas and tools take a while to write, in which others' streams must go on.
    params = await run_in_threadpool(
        body.generation_params,
        vocab_size=engine.bundle.target.vocab_size,
        max_new_tokens=engine.max_model_len if body.wanted_tokens is None else body.wanted_tokens,
        defaults=state.settings.sampling,
        logprobs=body.wanted_logprobs,
    )
    variables, max_model_len = state.settings.chat_template_kwargs, engine.max_model_len
    prompt = await run_in_threadpool(chat_prompt_ids, body, engine.tokenizer, variables, max_model_len=max_model_len)
    check_prompts([prompt], param="messages", max_model_len=engine.max_model_len, vocab_size=engine.bundle.target.vocab_size)
    if body.speculative is not False:
        record_of(request).template_differs = differing(state.settings.trained_with, variables_of(body, variables))
    return await answered(request, body, [prompt], params, ChatForm(body, state.token_texts))


class ChatForm:
    """Choices with a message, of one request."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, body: ChatBody, texts: TokenTexts) -> None:
        names = [tool.function.name for tool in body.usable_tools]
        self._parser = ToolCallParser(names, is_parallel=body.parallel_tool_calls is not False) if names else None
        self._has_logprobs = body.wanted_logprobs is not None
        self._texts = texts
        self._has_begun = False

    def choice(self, answer: Answer) -> dict[str, Any]:
        pieces = self._pieces(answer.text, is_last=True)
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        calls = _whole_calls(pieces)
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": self._finish_reason(answer.finish_reason),
            "stop_reason": answer.stop_reason,
        }

    def chunk_choices(self, answer: Answer, output: Output) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            self._has_begun = True
            yield _chunk_choice(answer.index, {"role": "assistant", "content": ""})
        deltas = [_delta(piece) for piece in self._pieces(output.text, is_last=output.finish_reason is not None)]
        logprobs = self._logprobs(output.tokens) if output.tokens else None
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:
            yield _chunk_choice(answer.index, delta, logprobs=logprobs)
            logprobs = None  # once
        if output.finish_reason is not None:
            choice = _chunk_choice(answer.index, {}, finish_reason=self._finish_reason(output.finish_reason))
            yield {**choice, "stop_reason": output.stop_reason}

    def _pieces(self, text: str, *, is_last: bool) -> list[Piece]:
        if self._parser is None:
            return [Content(text=text)] if text else []
        return self._parser.push(text) + (self._parser.finish() if is_last else [])

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any] | None:
        return chat_logprobs(tokens, self._texts) if self._has_logprobs else None

    def _finish_reason(self, finish_reason: str | None) -> str | None:
        is_call = finish_reason == STOP and self._parser is not None and self._parser.calls > 0
        return "tool_calls" if is_call else finish_reason


def _delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, CallStart):
        return {"tool_calls": [{"index": piece.index, **_call(piece)}]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def _call(start: CallStart) -> dict[str, Any]:
    return {"id": start.call_id, "type": "function", "function": {"name": start.name, "arguments": ""}}


def _whole_calls(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    calls = [_call(piece) for piece in pieces if isinstance(piece, CallStart)]
    for piece in pieces:
        if isinstance(piece, CallArguments):
            calls[piece.index]["function"]["arguments"] += piece.text
    return calls


def _chunk_choice(
    index: int, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


routes = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
