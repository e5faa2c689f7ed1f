"""Tools as the model is told of them, in the form of Hermes' and Qwen's templates where the bundle's own template has none.

How calls are forced is `runtime/constraints.py`'s, how they are read out of an answer `tool_parser.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from domino_deploy.errors import RequestError
from domino_deploy.runtime.constraints import CLOSE_CALL, OPEN_CALL
from domino_deploy.runtime.text import Tokenizer

# A tool like any other, by which a template that knows tools shows it.
_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}
_INSTRUCTIONS = """You may call functions. These exist, one JSON description a line:
{descriptions}
To call one, write its name and its arguments (a JSON object) as here, with nothing behind it:
{open}
{{"name": "FUNCTION", "arguments": {{"ARGUMENT": "VALUE"}}}}
{close}
What it returned will be told to you between <tool_response> and </tool_response>."""


def knows_tools(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's chat template does something with tools: it renders a conversation differently with one."""
    messages = [{"role": "user", "content": "x"}]
    try:
        return tokenizer.render_chat(messages, variables={"tools": [_PROBE]}) != tokenizer.render_chat(messages)
    except RequestError:
        return False


def told_in_words(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation for a template that knows no tools: descriptions in the system message, calls and results as text.

    Results of calls come from the user then, neighbouring ones in one message, since many templates insist on alternating roles.
    """
    told: list[dict[str, Any]] = []
    is_behind_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if is_behind_result:
                told[-1]["content"] += f"\n{result}"
            else:
                told.append({"role": "user", "content": result})
        else:
            calls = "\n".join(_call_texts(message))
            content = "\n".join(part for part in (message["content"], calls) if part)
            told.append({**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content})
        is_behind_result = is_result
    if tools:
        _tell_of(tools, told)
    return told


def _call_texts(message: Mapping[str, Any]) -> Iterator[str]:
    for call in message.get("tool_calls", ()):
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        yield f"{OPEN_CALL}\n{json.dumps(function, ensure_ascii=False)}\n{CLOSE_CALL}"


def _tell_of(tools: Sequence[Mapping[str, Any]], told: list[dict[str, Any]]) -> None:
    descriptions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(descriptions=descriptions, open=OPEN_CALL, close=CLOSE_CALL)
    if told[0]["role"] == "system":
        told[0]["content"] = f"{told[0]['content']}\n\n{instructions}"
    else:
        told.insert(0, {"role": "system", "content": instructions})
