"""What tests of regeneration share: prompt files, and how near features kept in fp16 must be."""

from __future__ import annotations

import json
from pathlib import Path

# A unit in the last place of 11 bits: fp32 values that differ by little may be rounded apart.
FP16 = {"rtol": 1e-3, "atol": 1e-3}


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
