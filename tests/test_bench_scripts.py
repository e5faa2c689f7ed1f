"""The scripts behind docs/precision.md, on a tiny bundle: their figures are there and mean what their names say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def figures(script: str, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_step_is_measured_at_every_width(tiny_bundle: Path) -> None:
    made = figures("bench_steps.py", tiny_bundle, "--context", 20, "--repeats", 2, "--threads", 1)
    assert list(made["verify_ms"]) == ["1", "2", "4", "8", "16", "17"]
    assert made["proposals"] == 6
    assert made["memory"]["opened_without_mapped_files_mb"] <= made["memory"]["opened_mb"] <= made["memory"]["peak_mb"]


def test_a_bundle_agrees_with_itself_and_its_speculation_is_lossless(tiny_bundle: Path) -> None:
    flags = ("--prompts-per-kind", 1, "--max-new-tokens", 8, "--threads", 1)
    first, second = figures("bench_precision.py", tiny_bundle, tiny_bundle, *flags)["bundles"]
    assert first["agreement"] == second["agreement"] == 1.0
    assert first["perplexity"] == second["perplexity"] > 1
    assert first["identical_to_plain"] == "6 of 6"
