"""The report of `scripts/gpu_check`: its form (docs/gpu.md, "The report"), its file, and reports of several calls put together."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
CREATED_BY = "scripts/gpu_check"
ABSENT_EXIT_CODE = 3  # of a stage's process: this machine has not what it needs


class ReportError(Exception):
    """A report that is not one, or of another version."""


class Status(StrEnum):
    """How a stage ended.

    DONE: all of it.  ABSENT: this machine has not what it needs.  FAILED: an error, with its text.  LATE: stopped at its limit.
    SKIPPED: not started, no time was left.
    """

    DONE = "done"
    ABSENT = "absent"
    FAILED = "failed"
    LATE = "late"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a stage ended; `result` is what it had noted by then, whatever the status."""

    status: Status
    seconds: float
    limit_s: float
    error: str | None = None
    result: Mapping[str, Any] = field(default_factory=dict)


# What a report must have and of which type; a stage's result is free in form, and empty when the stage noted nothing.
_TOP = {"format_version": int, "created_by": str, "started": str, "minutes": (int, float), "device": str, "sizes": str, "stages": dict}
_STAGE = {"status": str, "seconds": (int, float), "limit_s": (int, float), "error": (str, type(None)), "result": dict}


class Report:
    """gpu_check.json in the output folder, written after every stage.

    Args:
        path: of the file; its folder is made.
        facts: `started`, `minutes`, `device`, `sizes`.
    """

    def __init__(self, path: Path, **facts: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.values: dict[str, Any] = {"format_version": FORMAT_VERSION, "created_by": CREATED_BY, **facts, "stages": {}}
        self._write()

    def add(self, name: str, outcome: Outcome) -> None:
        self.values["stages"][name] = asdict(outcome)
        self._write()

    def _write(self) -> None:
        write_json(self.path, self.values)


def write_json(path: Path, values: Any) -> None:
    """Whole or not at all: the reader may be killed at any moment, and the writer too."""
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    os.replace(aside, path)


def read_report(path: Path) -> dict[str, Any]:
    """A report in this version's form.

    Raises:
        ReportError: with everything that is wrong.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{path}: expected a report of {CREATED_BY}, found: {error}. Give the gpu_check.json of a run.") from error
    wrong = problems(values)
    if wrong:
        raise ReportError(
            "\n- ".join([f"{path}: expected a report of version {FORMAT_VERSION}. Run scripts/gpu_check again. Found:", *wrong])
        )
    return dict(values)


def problems(values: Any) -> list[str]:
    """What keeps `values` from being a report, one line each."""
    if not isinstance(values, dict):
        return [f"{type(values).__name__} instead of an object"]
    found = _differences(values, _TOP, "")
    if values.get("format_version") not in (FORMAT_VERSION, None):
        found.append(f"format_version {values['format_version']!r}")
    stages = values.get("stages")
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        if not isinstance(stage, dict):
            found.append(f"stages.{name}: {type(stage).__name__}")
            continue
        found += _differences(stage, _STAGE, f"stages.{name}.")
        if stage.get("status") not in list(Status):
            found.append(f"stages.{name}.status: {stage.get('status')!r}")
    return found


def _differences(values: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> list[str]:
    absent = [f"{where}{name}: missing" for name in wanted if name not in values]
    foreign = [f"{where}{name}: unknown" for name in values if name not in wanted]
    wrong = [
        f"{where}{name}: {type(values[name]).__name__}"
        for name, kind in wanted.items()
        if name in values and not isinstance(values[name], kind)
    ]
    return absent + foreign + wrong


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first report with the stages of the others: what a later call did again, or for the first time, counts.

    A stage that was done stays when a later call failed at it.
    """
    values = {**reports[0], "stages": dict(reports[0]["stages"])}
    for report in reports[1:]:
        for name, stage in report["stages"].items():
            if stage["status"] == Status.DONE or values["stages"].get(name, {}).get("status") != Status.DONE:
                values["stages"][name] = stage
    return values
