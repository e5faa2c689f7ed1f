"""From a chat request to prompt tokens, through the bundle's own template and no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from domino_deploy.errors import RequestError
from domino_deploy.runtime.text import Tokenizer
from domino_deploy.server.errors import ApiError
from domino_deploy.server.prompt_text import encoded
from domino_deploy.server.schemas_chat import ChatBody, Message
from domino_deploy.server.tools import knows_tools, told_in_words


def chat_prompt_ids(body: ChatBody, tokenizer: Tokenizer, default_variables: Mapping[str, Any], *, max_model_len: int) -> list[int]:
    """The prompt of a conversation.

    Args:
        body: the request; its template variables win over `default_variables`.
        tokenizer: with the template.
        default_variables: the server's own.
        max_model_len: the served model's.

    Raises:
        ApiError: 400; no template, one that refuses these messages, or a text that is too long.
    """
    messages = [_for_template(message) for message in body.messages]
    tools = [tool.model_dump(exclude_none=True) for tool in body.usable_tools]
    has_tools = bool(tools) or any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    variables = variables_of(body, default_variables)
    if has_tools and not knows_tools(tokenizer):
        messages = told_in_words(messages, tools)
    elif tools:
        variables["tools"] = tools
    try:
        text = tokenizer.render_chat(messages, add_generation_prompt=body.add_generation_prompt is not False, variables=variables)
        # The template spells special tokens out.
        has_special = bool(body.add_special_tokens)
        return encoded(text, tokenizer, param="messages", max_model_len=max_model_len, add_special_tokens=has_special)
    except RequestError as error:
        raise ApiError(400, str(error), param="messages") from error


def variables_of(body: ChatBody, default_variables: Mapping[str, Any]) -> dict[str, Any]:
    """What the template gets beside messages and tools, but for what it gets in any case; the request's win."""
    return {**default_variables, **(body.chat_template_kwargs or {})}


def _for_template(message: Message) -> dict[str, Any]:
    """A message as templates know it: text in one piece, arguments as an object, "system" for OpenAI's newer "developer"."""
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return found
