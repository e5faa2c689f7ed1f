"""The line that says what an answer took and what speculation did, for the commands that generate text."""

from __future__ import annotations

from collections.abc import Sequence

from domino_deploy.runtime.protocols import Step


def closing_line(steps: Sequence[Step], *, prefill_seconds: float, decode_seconds: float) -> str:
    """What the answer took and what speculation did; rate and tau leave the prefill out, as in `bench/measure.py`."""
    line = f"{sum(len(step.token_ids) for step in steps)} tokens; prefill {prefill_seconds * 1e3:.0f} ms"
    cycles = steps[1:]
    if cycles:
        decoded = sum(len(step.token_ids) for step in cycles)
        line += f", then {decoded / decode_seconds:.1f} tok/s"
        proposed = sum(step.proposed for step in cycles)
        if proposed:
            accepted = sum(step.accepted for step in cycles)
            line += f"; tau {decoded / len(cycles):.2f}, {accepted / proposed:.0%} of {proposed} drafted tokens accepted"
        pooled = sum(step.pooled for step in cycles)
        if pooled:
            uncertified = sum(step.uncertified for step in cycles)
            line += f"; {uncertified / pooled:.1%} of {pooled} corrections not certified by the candidate pool"
    return line
