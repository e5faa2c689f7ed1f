"""What a speculative step costs with a bundle: memory, T_verify by width, T_draft and T_head.  Prints one JSON.

    python scripts/bench_steps.py BUNDLE [--context 128] [--repeats 5] [--threads 2]

Every width runs once before it is timed; figures are medians.  The text does not matter for the time, so it is random.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import click
import numpy as np

from domino_deploy.bench.machine import this_machine, versions
from domino_deploy.runtime.session import Session

WIDTHS = (1, 2, 4, 8, 16, 17)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--context", default=128, help="Tokens before the step.")
@click.option("--repeats", default=5)
@click.option("--threads", type=int)
def main(bundle: Path, *, context: int, repeats: int, threads: int | None) -> None:
    """Measure one bundle on ONNX Runtime."""
    started = perf_counter()
    with Session.open(bundle, max_model_len=context + 2 * max(WIDTHS), threads=threads) as session:
        opened = perf_counter() - started
        memory = {"opened_mb": _memory("VmRSS"), "opened_without_mapped_files_mb": _memory("RssAnon")}
        tokens = np.random.default_rng(0).integers(0, session.target.vocab_size, context + 1).tolist()
        features = session.target.forward(tokens[:-1], 1).features.copy()
        session.target.commit(context)
        verify = {width: _median(lambda: session.target.forward(tokens[-1:] * width, width), repeats) for width in WIDTHS}  # noqa: B023
        assert session.drafter is not None, "a session of a bundle has its drafter"
        # The first proposal also reads the prompt's features; those of the steps behind it read a few rows.
        session.drafter.propose(tokens, features, session.drafter.max_proposals)
        drafts, heads, uncertified = [], [], []
        for _ in range(repeats):
            tokens = [*tokens, 1]
            proposal = session.drafter.propose(tokens, features[:1], session.drafter.max_proposals)
            drafts.append(proposal.draft_ms)
            heads.append(proposal.head_ms)
            uncertified.append(getattr(proposal, "uncertified", 0))
        memory |= {"peak_mb": _memory("VmHWM"), "after_steps_without_mapped_files_mb": _memory("RssAnon")}
        figures = {
            "precision": session.bundle.precision.name,
            "candidate_pool": session.bundle.form.candidate_pool,
            "bundle_bytes": sum(entry.bytes for entry in session.bundle.manifest.files.values()),
            "open_seconds": round(opened, 1),
            "memory": memory,
            "verify_ms": {width: round(value, 1) for width, value in verify.items()},
            "draft_ms": round(median(drafts), 1),
            "head_ms": round(median(heads), 1),
            "proposals": session.drafter.max_proposals,
            "uncertified": sum(uncertified),
        }
    facts = {"context": context, "repeats": repeats, "threads": threads, "versions": versions(), "machine": vars(this_machine())}
    json.dump({**figures, **facts}, sys.stdout, indent=2, default=str)
    print()


def _median(run: Callable[[], object], repeats: int) -> float:
    """Milliseconds of a pass, the first one left out."""
    run()
    times = []
    for _ in range(repeats):
        started = perf_counter()
        run()
        times.append((perf_counter() - started) * 1e3)
    return median(times)


def _memory(name: str) -> int:
    """Megabytes of this process: VmRSS, VmHWM (the peak), RssAnon (without mapped files)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return int(lines[name].split()[0]) // 1000


if __name__ == "__main__":
    main()
