"""Training prompts: conversations from JSONL files and our own sets, rendered through the target's chat template and tokenised."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from domino_deploy.errors import RequestError, TrainingError, listed, shortened
from domino_deploy.training import prompts
from domino_deploy.training.samples import Prompt

if TYPE_CHECKING:
    from domino_deploy.runtime.text import Tokenizer

Message = dict[str, str]

_FORMS = 'expected an object with "prompt" (a string), "turns" (a list of strings, of which the first is used) or "messages"'
_ROLES = ("system", "user", "assistant")
_MAX_COUNT = 1_000_000
_DEFAULT_COUNT = 1000

# Packaged sets of our own training prompts; how many of them when the user does not say (None: all there are).
PACKAGED: dict[str, tuple[Callable[[int], list[str]], int | None]] = {
    "templated-code": (lambda count: prompts.templated_code("train")[:count], None),
    "word-problems": (lambda count: prompts.word_problems("train", count), _DEFAULT_COUNT),
    "story-problems": (prompts.story_problems, _DEFAULT_COUNT),
    "short-chat": (lambda count: prompts.short_chat("train")[:count], None),
}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What the target is asked, ending with the user; `kind` travels to the sample, `where` names it in errors."""

    messages: list[Message]
    kind: str = ""
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Tokenised:
    """Prompts, each once, and how many were left out."""

    prompts: list[Prompt]
    too_long: int
    duplicates: int


def read_conversations(path: Path) -> list[Conversation]:
    """One conversation per line: `prompt`, `turns` or OpenAI-style `messages`; `kind` may name where it comes from.

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
            record = json.loads(line)
            conversations.append(Conversation(messages=_messages(record), kind=_kind(record), where=f"{path.name}, line {number}"))
        except (ValueError, RecursionError) as error:
            problems.append(f"line {number}: {error}")
    if problems:
        shown = shortened(problems, most=20)
        raise TrainingError(listed(f"{path.name}: {len(problems)} line(s) cannot be used", shown, "Correct or remove these lines."))
    if not conversations:
        raise TrainingError(f"{path.name}: expected at least one prompt, found none. Add prompts, one JSON object a line.")
    return conversations


def packaged(name_and_count: str) -> list[Conversation]:
    """Prompts of a set out of `PACKAGED`: NAME for its usual number, NAME:COUNT for the first COUNT. Held-out ones are never among them.

    Raises:
        RequestError: an unknown name, or a count that is no number from 1 to a million.
    """
    name, colon, number = name_and_count.partition(":")
    if name not in PACKAGED:
        raise RequestError(f"Expected a kind out of {', '.join(PACKAGED)}, found {name!r}. Correct --kind.")
    make, count = PACKAGED[name]
    if colon:
        if not (number.isascii() and number.isdigit() and len(number) <= len(str(_MAX_COUNT)) and 1 <= int(number) <= _MAX_COUNT):
            raise RequestError(f"Expected {name}:COUNT with a count from 1 to {_MAX_COUNT}, found {number!r}. Correct --kind.")
        count = int(number)
    texts = make(_MAX_COUNT if count is None else count)
    return [Conversation(messages=_asked(text), kind=name, where=f"{name}, prompt {index}") for index, text in enumerate(texts)]


def tokenise(
    conversations: Sequence[Conversation],
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    template_variables: Mapping[str, object] | None = None,
) -> Tokenised:
    """Token ids of each prompt, generation prompt included; longer ones than `max_prompt_tokens` are left out.

    `template_variables` go to the chat template beside the messages.

    Raises:
        TrainingError: none is short enough, or the chat template refuses some or makes nothing of them (all named).
    """
    found: dict[tuple[int, ...], Prompt] = {}
    problems: list[str] = []
    too_long, shortest = 0, 0
    for conversation in conversations:
        try:
            text = tokenizer.render_chat(conversation.messages, variables=template_variables)
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        except RequestError as error:
            problems.append(f"{conversation.where}: {error}")
            continue
        if not ids:
            problems.append(f"{conversation.where}: the chat template makes no text of it")
        elif len(ids) > max_prompt_tokens:
            too_long, shortest = too_long + 1, min(shortest or len(ids), len(ids))
        else:
            found.setdefault(ids, Prompt(ids=ids, kind=conversation.kind))
    if problems:
        shown = shortened(problems, most=20)
        raise TrainingError(listed(f"{len(problems)} prompt(s) cannot be rendered", shown, "Correct or remove these prompts."))
    if not found:
        raise TrainingError(
            f"Expected prompts of at most {max_prompt_tokens} tokens, found none: the shortest has {shortest}. Raise --max-prompt-tokens."
        )
    return Tokenised(prompts=list(found.values()), too_long=too_long, duplicates=len(conversations) - too_long - len(found))


def _asked(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _kind(record: dict[str, Any]) -> str:
    kind = record.get("kind", "")
    if not isinstance(kind, str):
        raise ValueError(f'expected "kind" to be a string, found {json.dumps(kind)[:60]}')
    return kind


def _messages(record: object) -> list[Message]:
    if not isinstance(record, dict):
        raise ValueError(f"{_FORMS}, found {str(record)[:60]!r}")
    prompt, turns, messages = record.get("prompt"), record.get("turns"), record.get("messages")
    if isinstance(turns, list) and turns:
        prompt = turns[0]
    if isinstance(prompt, str) and prompt.strip():
        return _asked(prompt)
    if isinstance(messages, list) and messages:
        return _checked(messages)
    raise ValueError(f"{_FORMS}, found {json.dumps(record)[:60]!r}")


def _checked(messages: list[object]) -> list[Message]:
    checked = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f'message {number}: expected an object with "role" and "content", both text, found {json.dumps(message)[:60]}')
        if message.get("role") not in _ROLES:
            raise ValueError(f"message {number}: expected a role out of {', '.join(_ROLES)}, found {json.dumps(message.get('role'))[:60]}")
        checked.append({"role": message["role"], "content": message["content"]})
    last = checked[-1]
    if last["role"] != "user" or not last["content"].strip():
        found = f"role {last['role']!r}" if last["role"] != "user" else "an empty one"
        raise ValueError(f"expected the last message to be the user's, found {found}")
    return checked
