"""What is wrong with a body, in words of ours: what was expected at which place, and what was found there."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import ErrorDetails

# (place in the body, what is wrong there): "" for the body as a whole.
Problem = tuple[str, str]
Place = tuple[str | int, ...]
_Progress = tuple[tuple[int, ...], int]

# By pydantic's name of an error: what was expected, with what pydantic tells of the bounds.
EXPECTED: Mapping[str, str] = {
    "missing": "it",
    "string_type": "text",
    "string_too_short": "text of {min_length} or more characters",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "none_required": "null",
    "literal_error": "{expected}",
    "no_text_part": '"text" (images, audio, video and files are not supported)',
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "too_short": "a list of {min_length} or more items",
    "too_long": "at most {max_length} items",
    "dict_type": "an object",
    "model_type": "an object",
}
_OTHERWISE = "what /openapi.json describes"
_MOST_SHOWN = 8
_LONGEST_SHOWN = 60
_LONGEST_NAME = 80
_LONGEST_PLACE = 300
# As Python spells texts and constants, which is how pydantic lists the values of a literal.
_PYTHON_LITERAL = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\b(?:True|False|None)\b""")


def described(errors: Sequence[ErrorDetails], value: object) -> list[Problem]:
    """One problem per place.  A field of several types fails for each of them: what counts is the type that fits furthest.

    Args:
        errors: of pydantic, with their contexts.
        value: the body.
    """
    furthest: dict[Place, tuple[_Progress, list[tuple[Place, ErrorDetails]]]] = {}
    for error in errors:
        place, union = _places(error["loc"], value, is_missing=error["type"] == "missing")
        progress = _progress(place, is_too_long=error["type"] == "too_long")
        best, found = furthest.setdefault(union, (progress, []))
        if progress > best:
            found = []
        if progress >= best:
            furthest[union] = progress, [*found, (place, error)]
    by_place: dict[Place, list[ErrorDetails]] = {}
    for _, found in furthest.values():
        for place, error in found:
            by_place.setdefault(place, []).append(error)
    return [(joined(place), _problem(alternatives)) for place, alternatives in _causes(by_place).items()]


def joined(place: Place) -> str:
    """OpenAI's way to write it: `messages[0].content`.  Clients may make up names, and nest them: the end of a long one is left out."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step[:_LONGEST_NAME]}" for step in place).removeprefix(".")
    return text if len(text) <= _LONGEST_PLACE else f"{text[: _LONGEST_PLACE - 3]}..."


def shown(value: object) -> str:
    """A value of the client, short enough for a message."""
    text = ""
    for piece in _json_pieces(value):
        text += piece
        if len(text) > _LONGEST_SHOWN:
            return f"{text[: _LONGEST_SHOWN - 3]}..."
    return text


def _json_pieces(value: object) -> Iterator[str]:
    """A value as JSON, bit by bit: whoever needs the beginning pays for no more.  Texts end where nobody shows more of them."""
    if isinstance(value, str):
        yield json.dumps(value[:_LONGEST_SHOWN])
    elif isinstance(value, list):
        yield "["
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _json_pieces(item)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for index, (name, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _json_pieces(name)
            yield ": "
            yield from _json_pieces(item)
        yield "}"
    else:
        yield json.dumps(value)


def _problem(alternatives: Sequence[ErrorDetails]) -> str:
    expected = " or ".join(dict.fromkeys(_expected(error) for error in alternatives))
    first = alternatives[0]
    return f"expected {expected}, found {'no such field' if first['type'] == 'missing' else _shown_input(first['input'])}"


def _causes(by_place: Mapping[Place, list[ErrorDetails]]) -> Mapping[Place, list[ErrorDetails]]:
    """Without fields that are missing beside a wrong `type`: they belong to a type that the object does not have."""
    untyped = {place[:-1] for place, errors in by_place.items() if place[-1:] == ("type",) and not _are_missing(errors)}
    return {place: errors for place, errors in by_place.items() if place[:-1] not in untyped or not _are_missing(errors)}


def _are_missing(alternatives: Sequence[ErrorDetails]) -> bool:
    return all(error["type"] == "missing" for error in alternatives)


def _expected(error: ErrorDetails) -> str:
    context = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in error.get("ctx", {}).items()}
    if error["type"] == "literal_error":
        context["expected"] = _PYTHON_LITERAL.sub(lambda found: json.dumps(ast.literal_eval(found[0])), context["expected"])
    return EXPECTED.get(error["type"], _OTHERWISE).format(**context)


def _shown_input(value: object) -> str:
    if isinstance(value, list) and len(value) > _MOST_SHOWN:
        return f"a list of {len(value)} items"
    if isinstance(value, dict) and len(value) > _MOST_SHOWN:
        return f"an object of {len(value)} items"
    if isinstance(value, str) and len(value) > _LONGEST_SHOWN:
        return f"{shown(value)} ({len(value)} characters)"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**64:
        return f"an integer of {len(str(abs(value)))} digits"
    return shown(value)


def _progress(place: Place, *, is_too_long: bool) -> _Progress:
    # A list that is too long was not looked into: that is further than to fail on the first item, not as far as on the second.
    return (*(step for step in place if isinstance(step, int)), *((0, 0) if is_too_long else ())), len(place)


def _places(loc: Sequence[str | int], value: object, *, is_missing: bool) -> tuple[Place, Place]:
    """The steps into the body of an error's `loc`, in which pydantic also names the branches of unions; and those to the first union."""
    place: list[str | int] = []
    union: Place | None = None
    current: Any = value
    for depth, step in enumerate(loc):
        if isinstance(step, int) and isinstance(current, list) and step < len(current):
            current = current[step]
        elif isinstance(step, str) and isinstance(current, dict) and (step in current or (is_missing and depth == len(loc) - 1)):
            current = current.get(step)
        else:
            union = tuple(place) if union is None else union
            continue
        place.append(step)
    return tuple(place), tuple(place) if union is None else union
