"""AIPerf against a server: a streaming chat profile, its own token counts and its view of the speculation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from clients_checks import Server, Unexpected, expect, report
from clients_prometheus import differences, scrape

REQUESTS, CONCURRENCY = 24, 4
FIGURES = (
    "request_count",
    "output_token_throughput",
    "time_to_first_token",
    "inter_token_latency",
    "total_output_tokens",
    "spec_decode_token_weighted_acceptance_length",
    "spec_decode_overall_draft_acceptance_rate",
    "total_draft_tokens",
    "total_accepted_draft_tokens",
    "total_spec_decode_steps",
)


def profile(server: Server, name: str, *flags: str) -> dict[str, Any]:
    """Run `aiperf profile`; its JSON export."""
    folder = server.folder / name
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", server.model, "--url", server.url]
    command += ["--api-key", server.api_key, "--tokenizer", server.target, "--output-artifact-dir", str(folder), "--ui-type", "none"]
    command += ["--concurrency", str(CONCURRENCY), "--request-count", str(REQUESTS), "--random-seed", "1"]
    command += ["--prompt-input-tokens-mean", "64", "--prompt-output-tokens-mean", "32", *flags]
    # Not HF_HUB_OFFLINE: AIPerf then takes the tokenizer's folder for a name in the hub's cache.
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    exports = sorted(folder.rglob("profile_export_aiperf.json"))
    if done.returncode != 0 or not exports:
        raise Unexpected(f"aiperf ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return dict(json.loads(exports[0].read_text(encoding="utf-8")))


def figures(export: dict[str, Any]) -> dict[str, Any]:
    """Averages of what is in the export, with their units."""
    return {
        name: f"{export[name]['avg']:.4g} {export[name].get('unit', '')}".strip() for name in FIGURES if isinstance(export.get(name), dict)
    }


def chat(server: Server) -> dict[str, Any]:
    """`profile --endpoint-type chat --streaming`, 24 requests at concurrency 4, token counts from the server; its counts equal /metrics"""
    before = scrape(server)
    export = profile(server, "aiperf-chat", "--endpoint-type", "chat", "--streaming", "--use-server-token-count")
    grown = differences(before, scrape(server))
    found = figures(export)
    expect(export["request_count"]["avg"] == REQUESTS, f"{REQUESTS} requests", found)
    expect(not export.get("error_summary"), "no errors", export.get("error_summary"))
    pairs = {"total_output_tokens": "vllm:generation_tokens_total"}
    if "total_draft_tokens" in found:
        pairs["total_draft_tokens"] = "vllm:spec_decode_num_draft_tokens_total"
        pairs["total_accepted_draft_tokens"] = "vllm:spec_decode_num_accepted_tokens_total"
        pairs["total_spec_decode_steps"] = "vllm:spec_decode_num_drafts_total"
    differ = {name: (export[name]["avg"], grown[metric]) for name, metric in pairs.items() if export[name]["avg"] != grown[metric]}
    expect(not differ, "AIPerf's totals equal to the counters of /metrics", differ)
    return found


def completions(server: Server) -> dict[str, Any]:
    """`profile --endpoint-type completions --streaming`, 24 requests at concurrency 4, tokens counted by AIPerf's own tokenizer"""
    export = profile(server, "aiperf-completions", "--endpoint-type", "completions", "--streaming")
    expect(export["request_count"]["avg"] == REQUESTS, f"{REQUESTS} requests", export["request_count"])
    expect(not export.get("error_summary"), "no errors", export.get("error_summary"))
    return figures(export)


if __name__ == "__main__":
    report(["aiperf"], [chat, completions])
