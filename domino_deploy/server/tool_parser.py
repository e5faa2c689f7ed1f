"""Calls of tools out of an answer's text, piece by piece: what a client may be told already, it is told."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from domino_deploy.runtime.constraints import CLOSE_CALL, OPEN_CALL

# A call up to the object of its arguments, from where on its text can be passed on as it comes.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]{1,64})"\s*,\s*"arguments"\s*:\s*(?=\{)')


@dataclass(frozen=True, kw_only=True)
class Content:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, kw_only=True)
class CallStart:
    """A call begins; index counts the calls of an answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, kw_only=True)
class CallArguments:
    """The next piece of the arguments' JSON text of call `index`."""

    index: int
    text: str


Piece = Content | CallStart | CallArguments


class ToolCallParser:
    """Reads one answer.  What looks like a call, but is not one of a known function in JSON, stays text.

    White space around calls is dropped; an answer without calls comes out as it went in.

    Args:
        names: the functions that may be called.
        is_parallel: without it, what follows the first call is dropped.
    """

    def __init__(self, names: Collection[str], *, is_parallel: bool = True) -> None:
        self._names = frozenset(names)
        self._is_parallel = is_parallel
        self._buffer = ""
        self._in_call = False
        self._space = ""  # before the tag of the call: text again, if it turns out to be none
        self._arguments: _ObjectScanner | None = None  # of a call whose arguments are passed on as they come
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        """The pieces that this much more text makes certain."""
        self._buffer += text
        pieces: list[Piece] = []
        while (found := self._advance()) is not None:
            pieces += found
        return pieces

    def finish(self) -> list[Piece]:
        """The pieces left when no more text will come: a call cut short keeps the arguments it has."""
        rest, self._buffer = self._buffer, ""
        if self._arguments is not None or self._is_over:
            return []
        if self._in_call:
            return list(self._whole_call(rest, closing=""))
        return self._content(rest.rstrip() if self.calls else rest)

    @property
    def _is_over(self) -> bool:
        return self.calls > 0 and not self._is_parallel and not self._in_call

    def _advance(self) -> list[Piece] | None:
        """Take one step through the buffer; None once more text is needed."""
        if self._is_over:
            self._buffer = ""
            return None
        if not self._in_call:
            return self._advance_text()
        if self._arguments is not None:
            return self._advance_arguments(self._arguments)
        head = _HEAD.match(self._buffer)
        if head and head[1] in self._names:
            self._buffer = self._buffer[head.end() :]
            self._arguments = _ObjectScanner()
            return [self._started(head[1])]
        call, closing, rest = self._buffer.partition(CLOSE_CALL)
        if not closing:
            return None
        self._buffer, self._in_call = rest, False
        return list(self._whole_call(call, closing=closing))

    def _advance_text(self) -> list[Piece] | None:
        before, opening, rest = self._buffer.partition(OPEN_CALL)
        if opening:
            text = before.rstrip()
            self._buffer, self._in_call, self._space = rest, True, before[len(text) :]
            return self._content(text)
        # A tag may have begun, and white space belongs to a call if one follows.
        kept = len(before) - _possible_start(before)
        kept = len(before[:kept].rstrip())
        self._buffer = before[kept:]
        return self._content(before[:kept]) or None

    def _advance_arguments(self, scanner: _ObjectScanner) -> list[Piece] | None:
        if not scanner.is_complete:
            size = scanner.scan(self._buffer)
            text, self._buffer = self._buffer[:size], self._buffer[size:]
            return [CallArguments(index=self.calls - 1, text=text)] if text else None
        _, closing, rest = self._buffer.partition(CLOSE_CALL)
        if not closing:
            return None
        self._buffer, self._in_call, self._arguments = rest, False, None
        return []

    def _whole_call(self, text: str, *, closing: str) -> Iterator[Piece]:
        """A call that was not read on the way: other order of its keys, arguments as a string, or no call at all."""
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments") or {}
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            if name not in self._names or not isinstance(arguments, dict):
                raise ValueError(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            yield Content(text=self._space + OPEN_CALL + text + closing)
            return
        yield self._started(name)
        # ASCII: an escape of the model's may stand for half a character, which no response could carry.
        yield CallArguments(index=self.calls - 1, text=json.dumps(arguments))

    def _started(self, name: str) -> CallStart:
        self.calls += 1
        # 24 characters, as OpenAI's ids have.
        return CallStart(index=self.calls - 1, call_id=f"call_{uuid.uuid4().hex[:24]}", name=name)

    @staticmethod
    def _content(text: str) -> list[Piece]:
        return [Content(text=text)] if text else []


class _ObjectScanner:
    """Finds the end of a JSON object in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self.is_complete = False

    def scan(self, text: str) -> int:
        """Characters of `text` that belong to the object."""
        for position, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_complete = True
                    return position + 1
            elif character == "<":  # no JSON: the closing tag of a call that is broken
                self.is_complete = True
                return position
        return len(text)


def _possible_start(text: str) -> int:
    """Length of the longest end of `text` that begins a call's tag."""
    sizes = range(min(len(OPEN_CALL) - 1, len(text)), 0, -1)
    return next((size for size in sizes if OPEN_CALL.startswith(text[len(text) - size :])), 0)
