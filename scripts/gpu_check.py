"""Runs the stages of a GPU check, packs what one of them wants, or renders its reports; `scripts/gpu_check` says how."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import gpu_check_render
from gpu_check_plan import STAGES, InAProcess, Stage, run_stages
from gpu_check_report import Report, ReportError

STARTED = time.monotonic()  # the minutes count from here
ROOT = Path(__file__).resolve().parents[1]
PAGE, KEPT = ROOT / "docs" / "gpu.md", ROOT / "docs" / "gpu.json"
CARRIED = ROOT / "build" / "gpu-rtx"
SIZES = ("qwen3-4b", "tiny")
NEEDED = ("torch", "triton", "numpy", "click", "tokenizers")


def run(stages: Sequence[Stage], out: Path, *, minutes: float, device: str, sizes: str, carried: Path) -> bool:
    """All stages, each in a process of its own; whether none of them failed.

    Args:
        stages: some of `gpu_check_plan.STAGES`.
        out: for gpu_check.json.
        minutes: for all of it.
        device: "cuda", or "cpu" to try the stages out, where Triton interprets.
        sizes: one of `SIZES`.
        carried: folder that packed pieces lie under.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report(out / "gpu_check.json", started=started, minutes=minutes, device=device, sizes=sizes)
    settings = {"device": device, "sizes": sizes, "carried": str(carried)}
    environment = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    is_done = run_stages(stages, report, 60 * minutes, InAProcess(settings=settings, environment=environment), started=STARTED)
    print(f"{report.path}: {'done' if is_done else 'not all of it was done'}")
    return is_done


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("--pack", type=Path, metavar="DIR", help="pack TensorRT-RTX into DIR/carry-N for a machine without a network")
    parser.add_argument(
        "--render", type=Path, nargs="+", metavar="FILE", help="keep reports as docs/gpu.json, and their tables in docs/gpu.md"
    )
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "build" / "gpu-check"), help="folder of the report"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", choices=SIZES, default=SIZES[0])
    parser.add_argument("--stages", help=f"some of {','.join(stage.name for stage in STAGES)}; all by default")
    parser.add_argument("--carried", type=Path, default=CARRIED, help="folder with what was carried")
    chosen = parser.parse_args(arguments)
    names = [stage.name for stage in STAGES]
    wanted = names if chosen.stages is None else chosen.stages.split(",")
    unknown = [name for name in wanted if name not in names]
    if unknown:
        parser.error(f"argument --stages: expected some of {', '.join(names)}, found {', '.join(unknown)}")
    try:
        if chosen.pack:
            from gpu_check_pack import pack

            print("\n".join(pack(chosen.pack.resolve())))
            return 0
        if chosen.render:
            gpu_check_render.render(chosen.render, PAGE, KEPT)
            print(f"{PAGE} and {KEPT} written")
            return 0
    except ReportError as error:
        raise SystemExit(str(error)) from error
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"expected the packages {', '.join(NEEDED)}, found none of these: {', '.join(missing)}. Set PYTHON to a Python that has them."
        )
    stages = [stage for stage in STAGES if stage.name in wanted]
    places = {"sizes": chosen.sizes, "device": chosen.device, "carried": chosen.carried.resolve()}
    return 0 if run(stages, chosen.out.resolve(), minutes=chosen.minutes, **places) else 1


if __name__ == "__main__":
    sys.exit(main())
