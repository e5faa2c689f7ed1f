"""The soak's books: what the clients saw, what the server logged, and what its counters say must go together."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from soak_clients import Finished, Ledger

CLIENT_CLOSED = 499
_ENDED = "vllm:request_success_total"
# Histograms of all requests that ended, and of those that came as far as their first token.
_OF_EVERY_END = ("e2e_request_latency_seconds", "request_queue_time_seconds")
_OF_FIRST_TOKENS = (
    "time_to_first_token_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
)


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
    lines |= _cache_lines(ledger, grown) | _speculation_lines(ledger, grown) | _histogram_lines(ledger, grown)
    refused = sum(count for status, count in ledger.statuses.items() if status >= 400)
    logged_refused = sum(count for status, count in logged.items() if status >= 400 and status != CLIENT_CLOSED)
    lines["requests refused, in the log"] = Line(refused, logged_refused, refused + len(left) - len(started))
    lines["requests sent"] = Line(ledger.sent, len(ledger.finished) + refused + len(left), ledger.sent)
    return lines


def _cache_lines(ledger: Ledger, grown: Mapping[str, float]) -> dict[str, Line]:
    """Looked for, and found: nobody here reads log-probabilities of prompts, so every prompt was looked for."""
    told = sum(answer.cached_tokens for answer in ledger.finished)
    asked = sum(answer.prompt_tokens for answer in ledger.finished)
    left = sum(request.prompt_tokens for request in ledger.left)
    started = sum(request.prompt_tokens for request in ledger.left if request.has_started)
    cached = grown["domino_cached_prompt_tokens_total"]
    return {
        "cached tokens": Line(told, cached, told + left),
        "cached tokens, by vLLM's name": Line(cached, grown["vllm:prefix_cache_hits_total"], cached),
        "tokens looked for in a cache": Line(asked + started, grown["vllm:prefix_cache_queries_total"], asked + left),
    }


def _speculation_lines(ledger: Ledger, grown: Mapping[str, float]) -> dict[str, Line]:
    """A cycle yields one token at least: a request that was left cannot have had more drafts than tokens to generate."""
    left = sum(request.max_tokens for request in ledger.left)
    counted = [("drafts", "drafts", left), ("accepted_tokens", "accepted_tokens", left)]
    # Only whole answers tell the width: without one nothing bounds what was drafted for those that were left.
    if ledger.finished or not ledger.left:
        width = max((answer.max_drafts for answer in ledger.finished), default=0)
        counted.append(("drafted_tokens", "draft_tokens", left * width))
    lines = {}
    for name, counter, added in counted:
        told = sum(getattr(answer, name) for answer in ledger.finished)
        lines[name.replace("_", " ")] = Line(told, grown[f"vllm:spec_decode_num_{counter}_total"], told + added)
    accepted = grown["vllm:spec_decode_num_accepted_tokens_total"]
    lines["accepted tokens by position"] = Line(accepted, grown["vllm:spec_decode_num_accepted_tokens_per_pos_total"], accepted)
    return lines


def _histogram_lines(ledger: Ledger, grown: Mapping[str, float]) -> dict[str, Line]:
    """How much each histogram was told.  Of `inter_token_latency_seconds` no client knows: tokens may share an output."""
    ended = sum(value for name, value in grown.items() if name.startswith(f"{_ENDED}{{"))
    answers, left = len(ledger.finished), len(ledger.left)
    started = sum(request.has_started for request in ledger.left)
    several = sum(answer.completion_tokens > 1 for answer in ledger.finished)
    bounds = {name: (ended, ended) for name in _OF_EVERY_END}
    bounds |= {name: (answers + started, answers + left) for name in _OF_FIRST_TOKENS}
    bounds |= {"request_time_per_output_token_seconds": (several, several + left)}
    lines = {f"{name}, count": Line(least, grown[f"vllm:{name}_count"], most) for name, (least, most) in bounds.items()}
    # How many cycles there were no client knows; but all have the one pair of times, and those that draft the other one too.
    for one, other in (("draft", "head"), ("verify", "other")):
        cycles = grown[f"domino_{one}_seconds_count"]
        lines[f"domino_{other}_seconds, count"] = Line(cycles, grown[f"domino_{other}_seconds_count"], cycles)
    # Rows of prompts that no cache had, and tokens that cycles committed: all but the first of an answer.
    told = sum(answer.prompt_tokens - answer.cached_tokens + answer.completion_tokens - 1 for answer in ledger.finished)
    most = told + sum(request.prompt_tokens + request.max_tokens for request in ledger.left)
    lines["iteration_tokens, sum"] = Line(told, grown["vllm:iteration_tokens_total_sum"], most)
    return lines


def least_drafted_tokens(answer: Finished) -> int:
    """What an answer has drafted at least where every cycle drafts all that it may.

    A cycle with r tokens still to come drafts min(max_drafts, r - 1) and yields one token more than it accepted.  So the fewest are drafted
    where all are accepted: all tokens but one of each cycle, and the first token of the answer, which comes from the prompt.
    """
    tokens = 0 if answer.is_plain else answer.completion_tokens - 1
    return tokens - math.ceil(tokens / (answer.max_drafts + 1))


def drafted_share(answers: Sequence[Finished]) -> dict[str, Any]:
    """Drafted tokens per generated token: what was found, the least at a fixed width, and the answers that stay below their own least."""
    generated = max(1, sum(answer.completion_tokens for answer in answers))
    return {
        "found": round(sum(answer.drafted_tokens for answer in answers) / generated, 3),
        "least_at_fixed_width": round(sum(map(least_drafted_tokens, answers)) / generated, 3),
        "answers_below": sum(answer.drafted_tokens < least_drafted_tokens(answer) for answer in answers),
    }


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
