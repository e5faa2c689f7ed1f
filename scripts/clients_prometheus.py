"""A scrape of /metrics, read by Prometheus' own parser: its counters against the usage that clients were told."""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Mapping
from typing import Any

import openai
from clients_checks import Server, expect, report
from prometheus_client.parser import text_string_to_metric_families

NAMES = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:iteration_tokens_total_count",
    "domino_draft_seconds_count",
    "domino_head_seconds_count",
    "domino_verify_seconds_count",
    "domino_build_info",
)


def scrape(server: Server) -> Counter[str]:
    """Every sample summed over its labels; `vllm:request_success_total` also by reason, as NAME{REASON}."""
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {server.api_key}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        text = response.read().decode("utf-8")
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value  # type: ignore[assignment]
            if sample.name == "vllm:request_success_total":
                sums[f"{sample.name}{{{sample.labels['finished_reason']}}}"] += sample.value  # type: ignore[assignment]
    return sums


def differences(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def parses(server: Server) -> str:
    """The scrape parses, and has vLLM's names and ours"""
    found = scrape(server)
    missing = [name for name in NAMES if name not in found]
    expect(not missing, "every name", missing)
    return f"{len(found)} samples, {len(NAMES)} names looked for"


def counters_add_up(server: Server) -> dict[str, float]:
    """Twelve requests, streamed and not: requests, prompt and generated tokens as the answers' usage says, acceptance within bounds"""
    caller = openai.OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0)
    before = scrape(server)
    prompt_tokens = completion_tokens = 0
    reasons: Counter[str] = Counter()
    for number in range(12):
        asked: Any = {
            "model": server.model,
            "messages": [{"role": "user", "content": f"Count from {number} to {number + 5}."}],
            "temperature": 0,
            "max_tokens": 8 + 4 * number,
        }
        if number % 2:
            answer: Any = caller.chat.completions.create(**asked)
            usage, choices = answer.usage, answer.choices
        else:
            chunks = list(caller.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
            usage, choices = chunks[-1].usage, [choice for chunk in chunks for choice in chunk.choices]
        prompt_tokens += usage.prompt_tokens
        completion_tokens += usage.completion_tokens
        reasons.update(choice.finish_reason for choice in choices if choice.finish_reason)
    grown = differences(before, scrape(server))
    told = {"vllm:prompt_tokens_total": prompt_tokens, "vllm:generation_tokens_total": completion_tokens}
    told |= {"vllm:request_success_total": 12, "vllm:e2e_request_latency_seconds_count": 12, "vllm:time_to_first_token_seconds_count": 12}
    told |= {f"vllm:request_success_total{{{reason}}}": count for reason, count in reasons.items()}
    wrong = {name: (value, grown.get(name)) for name, value in told.items() if grown.get(name) != value}
    expect(not wrong, "counters equal to the clients' sums", wrong)
    drafts, proposed, accepted = (grown[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens"))
    expect(0 <= accepted <= proposed and accepted <= completion_tokens, "accepted <= proposed and generated", grown)
    expect(grown["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == accepted, "positions that sum to accepted", grown)
    return {
        "requests": 12,
        "prompt_tokens": prompt_tokens,
        "generation_tokens": completion_tokens,
        "drafts": drafts,
        "draft_tokens": proposed,
        "accepted_tokens": accepted,
    }


if __name__ == "__main__":
    report(["prometheus-client"], [parses, counters_add_up])
