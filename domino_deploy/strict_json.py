"""JSON objects from untrusted files: bounded, and without what `json` lets pass (duplicate keys, NaN, trailing text)."""

from __future__ import annotations

import codecs
import json
from collections import Counter
from pathlib import Path
from typing import Any

from domino_deploy.errors import CheckpointError

# config.json and index files of the largest public models stay below 1 MiB.
MAX_JSON_BYTES = 16 * 2**20
_ADVICE = "Correct the file or fetch the checkpoint again."

JsonObject = dict[str, Any]


def read_object(path: Path, *, limit: int = MAX_JSON_BYTES) -> JsonObject:
    """The JSON object in `path`.

    Raises:
        CheckpointError: unreadable, longer than `limit`, not JSON, or not an object.
    """
    try:
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(f"{path}: expected at most {limit} bytes of JSON, found {size}. Fetch the checkpoint again.")
        with path.open("rb") as file:
            text = file.read(size)
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, found: {error.strerror}. Check the checkpoint folder.") from error
    return parse_object(text, str(path))


def parse_object(text: bytes, where: str) -> JsonObject:
    """The JSON object in `text`; `where` names it in errors.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, a key given twice, or a number that is not finite.
    """
    try:
        value = strict_value(text)
    except RecursionError as error:
        raise CheckpointError(f"{where}: expected a JSON object, found one nested too deeply. {_ADVICE}") from error
    except ValueError as error:  # undecodable text, bad JSON, or one of our own refusals below
        raise CheckpointError(f"{where}: expected a valid JSON object, found: {error}. {_ADVICE}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}. {_ADVICE}")
    return value


def strict_value(text: bytes) -> Any:
    """The JSON value in `text`.

    Raises:
        ValueError: not UTF-8, not JSON, a key given twice, NaN or an infinity by name, or an integer of thousands of digits.
        RecursionError: nested too deeply.
    """
    if text.startswith(codecs.BOM_UTF8):
        raise ValueError("a byte order mark in front of it")
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"a byte that is not UTF-8, number {error.start}") from error
    except (json.JSONDecodeError, _NotAllowed):
        raise
    except ValueError as error:  # Python's limit, in words for programmers
        raise ValueError("an integer of thousands of digits") from error


class _NotAllowed(ValueError):
    """JSON for `json`, not for us."""


def _unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = [repr(name)[:80] for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise _NotAllowed(f"duplicate key(s) {', '.join(twice[:10])}")
    return result


def _refuse_constant(name: str) -> None:
    raise _NotAllowed(f"the number {name}, which JSON does not have")
