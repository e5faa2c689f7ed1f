"""The soak's books: what the clients saw, what the server logged, and what its counters say must go together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from soak_clients import Ledger

CLIENT_CLOSED = 499
_ENDED = "vllm:request_success_total"


class Line(NamedTuple):
    """A counter and the bounds that it must keep."""

    least: float
    found: float
    most: float

    @property
    def adds_up(self) -> bool:
        return self.least <= self.found <= self.most


def counters(text: str) -> dict[str, float]:
    """Samples of a scrape, summed over labels; `vllm:request_success_total` by reason, as NAME{REASON}."""
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            reason = sample.labels.get("finished_reason")
            sums[sample.name if reason is None else f"{sample.name}{{{reason}}}"] += sample.value  # type: ignore[assignment]
    return dict(sums)


def logged_statuses(log: Path, id_prefix: str) -> Counter[int]:
    """Statuses in the server's log of requests with such ids; 499 stands for a client that left before its answer."""
    statuses: Counter[int] = Counter()
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        record = json.loads(line) if line.startswith("{") else {}
        # Other lines of a request, of fields that were ignored, have its id too.
        if "status" in record and str(record.get("request_id", "")).startswith(id_prefix):
            statuses[record["status"]] += 1
    return statuses


def balance(ledger: Ledger, logged: Mapping[int, int], grown: Mapping[str, float]) -> dict[str, Line]:
    """The books against what the server's counters grew by.

    What became of a request whose client left is not known: it may never have arrived, it may even have ended.  One of which the
    client saw a part had arrived.  It may have been refused, too.  So counters lie between two bounds, which are equal if no client left.
    """
    left, started = ledger.left, [request for request in ledger.left if request.has_started]
    reasons = Counter(answer.finish_reason for answer in ledger.finished)
    lines = {
        f"requests that ended with {reason}": Line(reasons[reason], grown[f"{_ENDED}{{{reason}}}"], reasons[reason] + len(left))
        for reason in ("stop", "length", "abort")
    }
    lines["requests that ended with error"] = Line(0, grown[f"{_ENDED}{{error}}"], 0)
    ended = sum(grown[f"{_ENDED}{{{reason}}}"] for reason in ("stop", "length", "abort", "error"))
    lines["requests that ended"] = Line(len(ledger.finished) + len(started), ended, len(ledger.finished) + len(left))
    told = sum(answer.completion_tokens for answer in ledger.finished)
    most = sum(request.max_tokens for request in left)
    lines["generated tokens"] = Line(told, grown["vllm:generation_tokens_total"], told + most)
    told = sum(answer.prompt_tokens for answer in ledger.finished)
    least, most = (sum(request.prompt_tokens for request in requests) for requests in (started, left))
    lines["prompt tokens"] = Line(told + least, grown["vllm:prompt_tokens_total"], told + most)
    accepted = grown["vllm:spec_decode_num_accepted_tokens_total"]
    lines["accepted tokens by position"] = Line(accepted, grown.get("vllm:spec_decode_num_accepted_tokens_per_pos_total", 0), accepted)
    refused = sum(count for status, count in ledger.statuses.items() if status >= 400)
    logged_refused = sum(count for status, count in logged.items() if status >= 400 and status != CLIENT_CLOSED)
    lines["requests refused, in the log"] = Line(refused, logged_refused, refused + len(left) - len(started))
    lines["requests sent"] = Line(ledger.sent, len(ledger.finished) + refused + len(left), ledger.sent)
    return lines


def memory_trend(samples: Sequence[tuple[float, int]], warm_up_seconds: float) -> dict[str, float]:
    """Memory behind the warm-up, in MB (10^6).

    Args:
        samples: (seconds since the start, bytes).
        warm_up_seconds: what is left out.

    Returns:
        start_mb: median of the first tenth; max_mb; slope_mb_per_minute: least squares; growth_mb: slope times the time measured.
    """
    kept = [(seconds, size / 1e6) for seconds, size in samples if seconds >= warm_up_seconds]
    seconds, sizes = np.array(kept).T
    slope = float(np.polyfit(seconds, sizes, 1)[0]) * 60
    return {
        "samples": len(kept),
        "start_mb": round(float(np.median(sizes[: max(1, len(sizes) // 10)])), 1),
        "max_mb": round(float(sizes.max()), 1),
        "slope_mb_per_minute": round(slope, 4),
        "growth_mb": round(slope * float(seconds[-1] - seconds[0]) / 60, 2),
    }
