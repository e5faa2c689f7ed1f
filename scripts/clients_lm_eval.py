"""lm-eval against a server, and against its own transformers backend on the same target: the same scores and answers.

The tasks are those of scripts/clients_tasks; nothing is fetched from a hub.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from clients_checks import Server, Unexpected, expect, report

TASKS = ("capital_choice", "capital_answer", "short_texts")
TASK_FOLDER = Path(__file__).with_name("clients_tasks")
# Two fp32 implementations that add up in different orders: log-likelihoods, sums over some 60 tokens at most, agree to that.
LOGPROB_TOLERANCE = 2e-3


def evaluate(server: Server, name: str, model: str, model_args: str, tasks: tuple[str, ...], *flags: str) -> dict[str, Any]:
    """Run lm-eval: `scores` as task, metric, value; `answers` as task, then per document what the model gave."""
    folder = server.folder / name
    command = [str(Path(sys.executable).with_name("lm_eval")), "--model", model, "--model_args", model_args, "--tasks", ",".join(tasks)]
    command += ["--include_path", str(TASK_FOLDER), "--output_path", str(folder), "--log_samples", "--batch_size", "4", *flags]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command, env={**os.environ, **offline, "OPENAI_API_KEY": server.api_key}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise Unexpected(f"lm_eval ended with {done.returncode}: {done.stderr[-1500:]}")
    results = json.loads(next(folder.rglob("results_*.json")).read_text(encoding="utf-8"))["results"]
    answers: dict[str, list[Any]] = {}
    for task in tasks:
        lines = next(folder.rglob(f"samples_{task}_*.jsonl")).read_text(encoding="utf-8").splitlines()
        documents = sorted((json.loads(line) for line in lines), key=lambda document: document["doc_id"])
        answers[task] = [document["resps"] for document in documents]
    scores = {
        task: {metric: value for metric, value in metrics.items() if "," in metric and "stderr" not in metric}
        for task, metrics in results.items()
    }
    return {"scores": scores, "answers": answers}


def numbers(answers: Any) -> list[float]:
    """Log-likelihoods inside lm-eval's nested answers, which it writes as numbers or as text."""
    if isinstance(answers, list):
        return [number for answer in answers for number in numbers(answer)]
    try:
        return [float(answers)]
    except ValueError:  # the other half of a pair: whether the continuation is the greedy one
        return []


@functools.cache
def reference(server: Server, *flags: str, tasks: tuple[str, ...] = TASKS) -> dict[str, Any]:
    """What the transformers backend gives; run once for the same tasks."""
    arguments = f"pretrained={server.target},dtype=float32"
    return evaluate(server, "-".join(("hf", *tasks, *flags)), "hf", arguments, tasks, "--device", "cpu", *flags)


def compared(server: Server, tokenizer: str) -> dict[str, Any]:
    arguments = f"base_url={server.base_url}/completions,model={server.model},tokenizer={server.target},{tokenizer},num_concurrent=4"
    served = evaluate(server, tokenizer, "local-completions", arguments, TASKS)
    wanted = reference(server)
    worst = 0.0
    for task in ("capital_choice", "short_texts"):
        pairs = list(zip(numbers(served["answers"][task]), numbers(wanted["answers"][task]), strict=True))
        worst = max(worst, *(abs(found - asked) for found, asked in pairs))
    expect(worst <= LOGPROB_TOLERANCE, f"log-likelihoods within {LOGPROB_TOLERANCE}", worst)
    expect(served["answers"]["capital_answer"] == wanted["answers"]["capital_answer"], "the same generated text", served["answers"])
    for task in ("capital_choice", "capital_answer"):
        expect(served["scores"][task] == wanted["scores"][task], f"{wanted['scores'][task]}", served["scores"][task])
    for metric, value in wanted["scores"]["short_texts"].items():
        found = served["scores"]["short_texts"][metric]
        expect(abs(found - value) <= 1e-4 * value, f"{metric} {value}", found)
    return {
        "server": served["scores"],
        "transformers": wanted["scores"],
        "largest_logprob_difference": worst,
        "generations_equal": len(wanted["answers"]["capital_answer"]),
    }


def completions(server: Server) -> dict[str, Any]:
    """`local-completions`, log-likelihood, generation and rolling tasks: scores, texts and log-likelihoods of the `hf` backend"""
    return compared(server, "tokenizer_backend=huggingface")


def remote_tokenizer(server: Server) -> dict[str, Any]:
    """The same with the server's own tokenizer (`/tokenizer_info`, `/tokenize`)"""
    return compared(server, "tokenizer_backend=remote")


def chat_completions(server: Server) -> dict[str, Any]:
    """`local-chat-completions` with `--apply_chat_template`: texts and score of the `hf` backend"""
    tasks = ("capital_answer",)
    arguments = f"base_url={server.base_url}/chat/completions,model={server.model},num_concurrent=4"
    served = evaluate(server, "chat", "local-chat-completions", arguments, tasks, "--apply_chat_template")
    wanted = reference(server, "--apply_chat_template", tasks=tasks)
    expect(served["answers"] == wanted["answers"], "the same generated text", served["answers"])
    expect(served["scores"] == wanted["scores"], repr(wanted["scores"]), served["scores"])
    return {"server": served["scores"], "transformers": wanted["scores"]}


if __name__ == "__main__":
    report(["lm-eval", "transformers", "torch"], [completions, remote_tokenizer, chat_completions])
