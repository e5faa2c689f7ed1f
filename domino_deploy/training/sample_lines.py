"""A sample as a line of JSON, and back; files may be torn at their end, anything else wrong with them is an error."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from domino_deploy.errors import TrainingError, listed, shortened
from domino_deploy.training.samples import Sample

_FORM = '{"prompt_ids": [...], "response_ids": [...], "kind": "..."} with token ids'
_MAX_ID = 2**31


@dataclass(frozen=True, kw_only=True)
class Lines:
    """What a file holds: whole samples, the bytes they take, and whether the last of them still lacks its end of line."""

    samples: list[Sample]
    whole_bytes: int
    lacks_newline: bool


def line_of(sample: Sample) -> bytes:
    """The sample's line, end of line included."""
    record: dict[str, Any] = {"prompt_ids": sample.prompt_ids, "response_ids": sample.response_ids}
    if sample.kind:
        record["kind"] = sample.kind
    return json.dumps(record).encode() + b"\n"


def read_lines(path: Path) -> Lines:
    """All whole samples of a file; a last line without its end is left out, unless it is whole but for that.

    Raises:
        TrainingError: lines that are no samples, named by their numbers.
    """
    samples: list[Sample] = []
    problems: list[str] = []
    whole_bytes, lacks_newline = 0, False
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            is_torn = not line.endswith(b"\n")
            try:
                samples.append(_sample(line))
            except (ValueError, RecursionError) as error:
                if is_torn:
                    break
                problems.append(f"line {number}: {error}")
            lacks_newline = is_torn
            whole_bytes += len(line)
    if problems:
        advice = "Remove these lines and the folder's features (features.json, features-*.f16); their prompts are answered again."
        raise TrainingError(listed(f"{path}: expected {_FORM} in every line, found", shortened(problems, most=10), advice))
    return Lines(samples=samples, whole_bytes=whole_bytes, lacks_newline=lacks_newline)


def _sample(line: bytes) -> Sample:
    record = json.loads(line.decode("utf-8"))
    if not isinstance(record, dict) or not {"prompt_ids", "response_ids"} <= record.keys() <= {"prompt_ids", "response_ids", "kind"}:
        raise ValueError(f"found {line[:60]!r}")
    kind = record.get("kind", "")
    if not isinstance(kind, str):
        raise ValueError(f"kind must be a string, found {json.dumps(kind)[:60]}")
    return Sample(prompt_ids=_ids(record, "prompt_ids"), response_ids=_ids(record, "response_ids"), kind=kind)


def _ids(record: dict[str, Any], name: str) -> tuple[int, ...]:
    ids = record[name]
    if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < _MAX_ID for token in ids):
        raise ValueError(f"{name} must be a list of token ids, found {json.dumps(ids)[:60]}")
    return tuple(ids)
