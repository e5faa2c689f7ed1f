"""Training prompts from a JSONL file, rendered through the target's chat template and tokenised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from domino_deploy.errors import TrainingError, listed, shortened

if TYPE_CHECKING:
    from domino_deploy.runtime.text import Tokenizer

_FORMS = 'expected an object with "prompt" (a string), "turns" (a list of strings, of which the first is used) or "messages"'


def read_messages(path: Path) -> list[list[dict[str, str]]]:
    """One conversation per line: `prompt`, `turns` or OpenAI-style `messages`.

    Raises:
        TrainingError: the file is missing or empty, or lines are of another form (all named).
    """
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")  # not splitlines: U+2028 may stand inside a JSON string
    except (OSError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path}: expected a JSONL file of prompts in UTF-8, found none ({error}). Check the path.") from error
    conversations, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            conversations.append(_messages(json.loads(line)))
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: {error}")
    if problems:
        shown = shortened(problems, most=20)
        raise TrainingError(listed(f"{path.name}: {len(problems)} line(s) cannot be used", shown, "Correct or remove these lines."))
    if not conversations:
        raise TrainingError(f"{path.name}: expected at least one prompt, found none. Add prompts, one JSON object a line.")
    return conversations


def tokenise(conversations: list[list[dict[str, str]]], tokenizer: Tokenizer, max_prompt_tokens: int) -> list[tuple[int, ...]]:
    """Token ids of each prompt, generation prompt included; longer ones than `max_prompt_tokens` are left out.

    Raises:
        TrainingError: none is short enough.
    """
    prompts = [tuple(tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)) for messages in conversations]
    kept = [prompt for prompt in prompts if len(prompt) <= max_prompt_tokens]
    if not kept:
        shortest = min(map(len, prompts))
        raise TrainingError(
            f"Expected prompts of at most {max_prompt_tokens} tokens, found none: the shortest has {shortest}. Raise --max-prompt-tokens."
        )
    return kept


def _messages(record: object) -> list[dict[str, str]]:
    if not isinstance(record, dict):
        raise ValueError(f"{_FORMS}, found {str(record)[:60]!r}")
    prompt, turns, messages = record.get("prompt"), record.get("turns"), record.get("messages")
    if isinstance(turns, list) and turns:
        prompt = turns[0]
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
        if messages[-1]["role"] != "user":
            raise ValueError(f"expected the last message to be the user's, found role {messages[-1]['role']!r}")
        return [{"role": message["role"], "content": message["content"]} for message in messages]
    raise ValueError(f"{_FORMS}, found {json.dumps(record)[:60]!r}")


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") in ("system", "user", "assistant") and isinstance(message.get("content"), str)
