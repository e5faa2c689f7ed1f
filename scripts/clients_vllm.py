"""`vllm bench serve` against a server, from vllm's own wheel: only its Python files, since a client computes nothing.

vllm asks for /metrics without a key, so the server behind this has none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from clients_checks import Server, Unexpected, expect, report
from clients_prometheus import differences, scrape

PACKAGE = Path(__file__).parents[1] / "build" / "clients-vllm"
REQUESTS, CONCURRENCY, OUTPUT_TOKENS = 24, 4, 32
# vllm's own entry point imports what only a server needs.
COMMAND = (
    "from vllm.benchmarks.serve import add_cli_args, main; from vllm.utils.argparse_utils import FlexibleArgumentParser;"
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
FIGURES = (
    "completed",
    "total_input_tokens",
    "total_output_tokens",
    "output_throughput",
    "mean_ttft_ms",
    "mean_tpot_ms",
    "mean_itl_ms",
    "spec_decode_acceptance_length",
    "spec_decode_acceptance_rate",
    "spec_decode_num_drafts",
    "spec_decode_draft_tokens",
    "spec_decode_accepted_tokens",
)


def bench(server: Server, backend: str, endpoint: str) -> dict[str, Any]:
    """One run; figures of its result file, its counts held against /metrics."""
    before = scrape(server)
    command = [sys.executable, "-c", COMMAND, "--backend", backend, "--base-url", server.url, "--endpoint", endpoint]
    command += ["--model", server.model, "--tokenizer", server.target, "--dataset-name", "random", "--random-input-len", "64"]
    command += ["--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(REQUESTS), "--max-concurrency", str(CONCURRENCY)]
    command += ["--ignore-eos", "--temperature", "0", "--num-warmups", "0", "--ready-check-timeout-sec", "0", "--disable-tqdm"]
    command += ["--save-result", "--result-dir", str(server.folder), "--result-filename", f"{backend}.json"]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    server.folder.mkdir(exist_ok=True)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        raise Unexpected(f"vllm bench serve ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    result = json.loads((server.folder / f"{backend}.json").read_text(encoding="utf-8"))
    grown = differences(before, scrape(server))
    found = {name: result[name] for name in FIGURES if name in result}
    pairs = {
        "completed": "vllm:request_success_total",
        "total_output_tokens": "vllm:generation_tokens_total",
        "spec_decode_num_drafts": "vllm:spec_decode_num_drafts_total",
        "spec_decode_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
        "spec_decode_accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    }
    expect(found["completed"] == REQUESTS, f"{REQUESTS} requests", found)
    differ = {name: (found.get(name), grown[metric]) for name, metric in pairs.items() if found.get(name) != grown[metric]}
    expect(not differ, "its counts equal to those of /metrics", differ)
    return found


def chat(server: Server) -> dict[str, Any]:
    """`vllm bench serve --backend openai-chat`, 24 random prompts at concurrency 4, 32 tokens each; counts equal /metrics"""
    return bench(server, "openai-chat", "/v1/chat/completions")


def completions(server: Server) -> dict[str, Any]:
    """`vllm bench serve --backend openai`, the same through /v1/completions"""
    return bench(server, "openai", "/v1/completions")


if __name__ == "__main__":
    sys.path.append(str(PACKAGE))  # for the version
    report(["vllm"], [chat, completions])
