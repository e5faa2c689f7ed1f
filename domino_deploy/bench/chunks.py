"""The chunks of one streamed answer, as OpenAI's clients read them; nothing here waits or connects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from domino_deploy.bench import failures
from domino_deploy.bench.event_stream import EventReader

MOST_BYTES = 256 << 20  # of one answer, comments included: about a million tokens, with one to a chunk
_MOST_TOKENS = 2**53  # every reader of JSON holds whole numbers up to here exactly
# What bytes that are no chunk raise.
UNREADABLE = (ValueError, TypeError, AttributeError, RecursionError)


class Chunks:
    """One answer, as far as it came.

    text_times: when each chunk with text arrived, by `clock`; usage: `Answer`'s fields of tokens, by the last chunk that stated them;
    message: the server's own words for an error in the stream.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reader = EventReader()
        self._bytes = 0
        self._failure: str | None = None
        self._has_choices = False
        self.message: str | None = None
        self.is_complete = False
        self.text_times: list[float] = []
        self.texts: list[str] = []
        self.usage: Mapping[str, int | None] = {}

    @property
    def error(self) -> str | None:
        """As `Answer.error`, once no more bytes come."""
        if self._failure or not self.is_complete:
            return self._failure or "broken_stream"
        return None if self._has_choices else "no_answer"

    def take(self, piece: bytes) -> None:
        """Bytes that have just arrived.

        Raises:
            UNREADABLE: one of these, at what is no chunk.
            LongAnswer: at more than `MOST_BYTES`.
        """
        now = self._clock()
        self._bytes += len(piece)
        if self._bytes > MOST_BYTES:
            raise failures.LongAnswer
        for data in self._reader.feed(piece):
            if data.startswith("[DONE]"):
                self.is_complete = True
                return
            chunk = json.loads(data)
            if chunk.get("error"):
                self._failure, self.is_complete = "error_in_stream", True
                self.message = failures.message_of(chunk["error"])
                return
            if chunk.get("usage"):
                self.usage = _counts(chunk["usage"])
            choices = chunk.get("choices") or ()
            text = "".join(map(_text, choices))
            self._has_choices = self._has_choices or bool(choices)
            if text:
                self.text_times.append(now)
                self.texts.append(text)


def _counts(usage: Mapping[str, Any]) -> dict[str, int | None]:
    """Tokens by the names that `Answer` has for them, None for what is not stated.

    Raises:
        ValueError: a number of tokens that is none.
    """
    counts = {
        "prompt_tokens": usage.get("prompt_tokens"),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
    }
    for name, count in counts.items():
        if count is not None and not (type(count) is int and 0 <= count <= _MOST_TOKENS):
            raise ValueError(f"{name} is no number of tokens")
    return counts


def _text(choice: Mapping[str, Any]) -> str:
    """What a chunk's choice adds to the answer, visible or not: text, thoughts, arguments of tool calls."""
    delta = choice.get("delta") or {}
    thoughts = delta.get("reasoning_content") or delta.get("reasoning") or ""
    calls = [(call.get("function") or {}).get("arguments") or "" for call in delta.get("tool_calls") or ()]
    return "".join((choice.get("text") or "", delta.get("content") or "", thoughts, *calls))
