"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shapes: tools count prompts with the tokenizer that is served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import FailFast, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from domino_deploy.server.body import Body, invalid, read_body
from domino_deploy.server.conversation import chat_prompt_ids
from domino_deploy.server.fields import TokenId
from domino_deploy.server.models import check_model_name
from domino_deploy.server.not_honoured import Neutral
from domino_deploy.server.problems import Problem
from domino_deploy.server.prompt_text import encoded
from domino_deploy.server.schemas_answers import Detokenized, Tokenized
from domino_deploy.server.schemas_chat import MAX_MESSAGES, MAX_TEMPLATE_VARIABLES, MAX_TOOLS, ChatBody, Message, Tool
from domino_deploy.server.state import ServerState, record_of, state_of

# Far above what models take, and a second of work.
MAX_DETOKENIZED = 2**20


class TokenizeBody(Body):
    """A text, or the messages of a conversation."""

    not_honoured: ClassVar[Neutral] = {"continue_final_message": (False,), "chat_template": ()}

    model: str | None = Field(default=None, description="One of the names that /v1/models lists; null for the one that is served.")
    prompt: str | None = Field(default=None, description="A text; without messages only.")
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = Field(
        default=None, description="A conversation, which the chat template makes a text of; without a prompt only."
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(default=None, description="Functions for the template.")
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = Field(
        default=None, description="Variables of the model's own chat template."
    )
    add_generation_prompt: bool | None = Field(default=None, description="End where the assistant begins; true if left out.")
    add_special_tokens: bool | None = Field(
        default=None, description="Let the tokenizer add its own special tokens; true for a prompt and false for messages if left out."
    )
    return_token_strs: bool | None = Field(default=None, description="Spell the tokens out as well.")

    def problems(self) -> Iterator[Problem]:
        if (self.prompt is None) == (self.messages is None):
            yield "prompt", f"expected either prompt or messages, found {'neither' if self.prompt is None else 'both'}"
        if self.conversation is not None:
            yield from self.conversation.problems()

    @property
    def conversation(self) -> ChatBody | None:
        """The messages as a chat request, so that they become the very same prompt."""
        if self.messages is None:
            return None
        return ChatBody(
            model=self.model or "",
            messages=self.messages,
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            add_special_tokens=self.add_special_tokens,
        )


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = Field(default=None, description="One of the names that /v1/models lists; null for the one that is served.")
    tokens: Annotated[list[TokenId], Field(max_length=MAX_DETOKENIZED), FailFast()] = Field(description="Token ids, special ones included.")


async def tokenize(request: Request) -> Response:
    """The tokens of a text, or of the prompt that a conversation becomes."""
    state = state_of(request)
    body = await read_body(request, TokenizeBody)
    _check_model(request, state, body.model)
    tokens = await run_in_threadpool(_tokens, state, body)
    tokenizer = state.engine.tokenizer
    spellings = [tokenizer.spelling(token) or "" for token in tokens] if body.return_token_strs else None
    found = Tokenized(count=len(tokens), max_model_len=state.engine.max_model_len, tokens=tokens, token_strs=spellings)
    return JSONResponse(found.model_dump())


async def detokenize(request: Request) -> Response:
    """The text of tokens."""
    state = state_of(request)
    body = await read_body(request, DetokenizeBody)
    _check_model(request, state, body.model)
    size = state.engine.bundle.target.vocab_size
    beyond = [token for token in body.tokens if token >= size]
    if beyond:
        raise invalid([("tokens", f"expected token ids below {size}, the vocabulary's size, found {beyond[0]}")])
    # Special tokens stay, so that the text gives the same tokens again.
    text = await run_in_threadpool(state.engine.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return JSONResponse(Detokenized(prompt=text).model_dump())


async def tokenizer_info(request: Request) -> Response:
    """What a client needs to build the same prompts: the special tokens by name, and the chat template."""
    engine = state_of(request).engine
    special = {name: token for name, token in engine.bundle.manifest.special_tokens.items() if token is not None}
    return JSONResponse(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # of transformers, the class that reads a tokenizer.json
            "model_max_length": engine.max_model_len,
            "chat_template": engine.tokenizer.chat_template,
            **special,
        }
    )


def _check_model(request: Request, state: ServerState, name: str | None) -> None:
    if name is not None:
        record_of(request).model = name
        check_model_name(state, name)


def _tokens(state: ServerState, body: TokenizeBody) -> list[int]:
    conversation, tokenizer, max_model_len = body.conversation, state.engine.tokenizer, state.engine.max_model_len
    if conversation is not None:
        return chat_prompt_ids(conversation, tokenizer, state.settings.chat_template_kwargs, max_model_len=max_model_len)
    has_special = body.add_special_tokens is not False
    return encoded(body.prompt or "", tokenizer, param="prompt", max_model_len=max_model_len, add_special_tokens=has_special)


routes = [
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info),
]
