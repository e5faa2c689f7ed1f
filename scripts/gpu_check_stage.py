"""One stage of `scripts/gpu_check` in this process: python gpu_check_stage.py MODULE:FUNCTION SETTINGS, as `gpu_check_plan` calls it."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from gpu_check_context import Context, Deadline, NotHereError, make_importable, sizes_named, timer_of
from gpu_check_report import ABSENT_EXIT_CODE, write_json


def main(function: str, settings: str) -> int:
    """Runs the function; its notes, and its error if there is one, go into the file `notes` of the settings."""
    chosen = json.loads(settings)
    notes: dict[str, Any] = {"result": {}, "error": None}

    def note(**values: Any) -> None:
        notes["result"].update(values)
        write_json(Path(chosen["notes"]), notes)

    try:
        make_importable()
        deadline = Deadline(chosen["seconds"])
        context = Context(
            device=chosen["device"],
            sizes=sizes_named(chosen["sizes"]),
            carried=Path(chosen["carried"]),
            deadline=deadline,
            timer=timer_of(chosen["device"], deadline),
            note=note,
        )
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(context)
    except NotHereError as error:
        notes["error"] = str(error)
        note()
        return ABSENT_EXIT_CODE
    except Exception:  # whatever it is belongs into the report: nobody can look at the machine afterwards
        notes["error"] = traceback.format_exc()
        note()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
